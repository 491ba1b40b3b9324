"""Rotation: old lines move to verified files, state stays as it was, and a crash anywhere loses nothing."""

from __future__ import annotations

import gzip
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.ledger import archive as archive_module
from gpukeeper.ledger.archive import Rotation, read_archive, rotate, status
from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.errors import LeaseHeld, LedgerError
from gpukeeper.model.event import BaselineSeen, Complaint, Decided, Event, NodeTested, Paused, Quarantined, Vanished
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import LedgerKeep
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref
from tests.unit.ledger.examples import EVAL, GPU, NOW, TRAIN, closed, held, intended, noticed, passed, run
from tests.unit.ledger.test_state import everything

DAY = timedelta(days=1)
KEEP = LedgerKeep()
OLD = NOW - 40 * DAY


def history() -> list[Event]:
    """40 days: an intent that is still open, a hold that still counts, a pause, something that vanished."""
    return [
        noticed(at=OLD),
        noticed(TRAIN, OLD, started=OLD),
        intended("forgotten", TRAIN, OLD),
        intended("s1", at=OLD),
        held(at=OLD, until=400 * DAY),
        Decided(at=OLD, ref=EVAL, action=Action.KEEP, rule="hold", verdict=Verdict.PROTECT, reason="held"),
        Paused(at=OLD, by="root", reason="maintenance"),
        passed(pass_id=41, at=OLD),
        closed("s1", at=NOW - 35 * DAY),
        passed(pass_id=42, at=NOW - 29 * DAY),
        intended("young", at=NOW - timedelta(minutes=5)),
    ]


async def filled(path: Path) -> SqliteLedger:
    ledger = open_ledger(path, write=True)
    for line in history():
        await ledger.append([line])
    return ledger


async def told(ledger: SqliteLedger) -> Counter[tuple[int, str]]:
    """Every line of history, in the journal and in all archives."""
    found = [
        (seq, repr(line)) for seq, line in await ledger.lines(LineFilter(last=None)) if "Checkpoint" not in repr(line)
    ]
    for file in (ledger.path.parent / "archive").glob("journal-*.gz"):
        found += [(seq, repr(line)) for seq, line in read_archive(file)]
    return Counter(found)


async def answers(ledger: SqliteLedger) -> tuple[object, ...]:
    """All answers but those that are about lines themselves."""
    found = await everything(ledger)
    return (*found[:4], await ledger.acts_since(NOW - timedelta(hours=1), frozenset(), but=True), found[6])


def test_old_lines_move_to_a_file_and_state_stays(tmp_path: Path) -> None:
    """C15.7"""

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        lines, state = await told(ledger), await answers(ledger)
        done = await rotate(ledger, KEEP, NOW)
        assert (done.lines, done.archive) == (9, "journal-20260203.jsonl.gz")
        assert [seq for seq, _ in await ledger.lines()] == [10, 11, 12]
        assert await told(ledger) == lines
        assert await answers(ledger) == state
        assert await ledger.rebuild() == 1  # the checkpoint is all it needs
        assert await answers(ledger) == state
        assert await ledger.next_pass() == 43
        remaining = InMemoryLedger(line for _, line in await ledger.lines(LineFilter(last=None)))
        assert await everything(remaining) == await everything(ledger)
        assert (await ledger.totals(OLD)).covers_from == NOW - 35 * DAY
        assert (await ledger.totals(NOW - 30 * DAY)).covers_from is None
        assert await ledger.damage() == []
        # Again: nothing is old enough, so nothing happens; not even a checkpoint.
        assert did_nothing(await rotate(ledger, KEEP, NOW))
        assert len(await ledger.lines()) == 3
        ledger.close()

    run(story())


@pytest.mark.parametrize("step", ["written", "verified", "named", "deleted", "pruned"])
def test_a_crash_at_any_step_loses_nothing_and_the_next_run_finishes(tmp_path: Path, step: str) -> None:
    """C15.7"""

    def crash(now: str) -> None:
        if now == step:
            raise KeyboardInterrupt

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        lines, state = await told(ledger), await answers(ledger)
        with pytest.raises(KeyboardInterrupt):
            await rotate(ledger, KEEP, NOW, crash)
        ledger.close()
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        assert set(await told(ledger)) == set(lines)
        assert await answers(ledger) == state
        await ledger.append([Complaint(at=NOW, what="between")])
        done = await rotate(ledger, KEEP, NOW + 2 * DAY)
        assert bool(done.finished) == (step == "named")
        found = await told(ledger)
        assert set(lines) < set(found)
        assert set(found.values()) == {1}
        assert await answers(ledger) == state
        assert did_nothing(await rotate(ledger, KEEP, NOW + 2 * DAY))
        assert not list((tmp_path / "archive").glob(".*"))
        ledger.close()

    # KeyboardInterrupt would end asyncio.run's loop differently; the story catches it inside.
    run(story())


def did_nothing(done: Rotation) -> bool:
    return msgspec.structs.replace(done, believed=None) == Rotation()


def test_one_wrong_clock_deletes_nothing_for_ever(tmp_path: Path) -> None:
    """A clock years ahead archives; what the archive holds stays until that time has really come."""

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        await rotate(ledger, KEEP, NOW)
        for _ in range(3):
            done = await rotate(ledger, KEEP, NOW + 3650 * DAY)
            assert done.archives_deleted == ()
            assert done.believed is not None
            assert done.believed <= NOW + 6 * DAY
        ledger.close()

    run(story())


def test_archives_older_than_keep_are_deleted_and_signals_are_pruned(tmp_path: Path) -> None:
    """C15.7"""

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        signals = open_signals(ledger.path, write=True)
        await signals.add(
            [Sample(EVAL.key, Signal.GPU, "0", NOW - age * DAY, 1.0) for age in (20, 8, 6)]
            + [Sample(TRAIN.key, Signal.GPU, "0", NOW - 20 * DAY, 1.0)]
        )
        first = await rotate(ledger, KEEP, NOW)
        assert first.signals_deleted == 3
        assert list(await signals.series([EVAL.key, TRAIN.key], NOW - 6 * DAY, NOW)) == [EVAL.key]
        deleted: tuple[str, ...] = ()
        for day in range(2, 342, 2):
            deleted += (await rotate(ledger, KEEP, NOW + day * DAY)).archives_deleted
        assert deleted[0] == first.archive
        assert first.archive not in [p.name for p in (tmp_path / "archive").glob("*")]
        signals.close()
        ledger.close()

    run(story())


def test_status_shows_what_there_is_and_finds_damage(tmp_path: Path) -> None:
    """C15.7: verify and status."""

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        await rotate(ledger, KEEP, NOW)
        found = await status(ledger, check=True)
        assert (found.lines, found.oldest, found.newest) == (3, NOW - 29 * DAY, NOW)
        assert (found.paused, found.reserve) == (f"maintenance, by root since {OLD:%Y-%m-%d %H:%M} UTC", True)
        (archive,) = found.archives
        assert archive.header is not None
        assert (archive.header.lines, archive.header.since, archive.damage) == (9, OLD, None)
        file = tmp_path / "archive" / archive.name
        content = bytearray(file.read_bytes())
        content[-40] ^= 1
        file.write_bytes(content)
        (archive,) = (await status(ledger, check=True)).archives
        assert archive.damage is not None
        ledger.close()

    run(story())


def test_a_damaged_file_is_never_taken_for_the_lines_it_should_hold(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        lines = await told(ledger)

        def crash(now: str) -> None:
            if now == "named":
                raise RuntimeError

        with pytest.raises(RuntimeError):
            await rotate(ledger, KEEP, NOW, crash)
        (file,) = (tmp_path / "archive").glob("journal-*")
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)
        with pytest.raises(LedgerError, match="Nothing was"):
            await rotate(ledger, KEEP, NOW)
        file.rename(tmp_path / "moved-away")
        assert await told(ledger) == lines
        await rotate(ledger, KEEP, NOW)
        assert await told(ledger) == lines
        ledger.close()

    run(story())


@pytest.mark.parametrize("good", [0, 1])
def test_a_line_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    monkeypatch.setattr(archive_module, "LINE_MAX", 2000)

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        await rotate(ledger, KEEP, NOW)
        ledger.close()

    run(story())
    (file,) = (tmp_path / "archive").glob("journal-*")
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    file.write_bytes(gzip.compress(b"".join([*lines[:good], b" " * 1990 + lines[good]])))
    with pytest.raises(LedgerError, match="a line is over"):
        archive_module.verify(file)
    with pytest.raises(LedgerError, match="a line is over"):
        list(archive_module.read_archive(file))


def test_archives_of_an_earlier_ledger_are_not_mistaken_for_this_one(tmp_path: Path) -> None:
    """A ledger begun anew counts from 1 again."""

    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        await rotate(ledger, KEEP, NOW)
        ledger.close()
        (tmp_path / "ledger.db").rename(tmp_path / "lost")
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        await ledger.append([Complaint(at=NOW - 35 * DAY, what=f"anew {n}") for n in range(20)])
        done = await rotate(ledger, KEEP, NOW)
        assert (done.lines, done.finished) == (20, ())
        assert done.archive == "journal-20260203-1.jsonl.gz"
        assert sum((await told(ledger)).values()) == 9 + 20
        ledger.close()

    run(story())


def test_a_wrong_clock_neither_hurries_nor_stops_rotation(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        times: list[datetime] = [OLD, NOW + 9999 * DAY, OLD, NOW, OLD]
        await ledger.append([Complaint(at=at, what="x") for at in times])
        assert (await rotate(ledger, KEEP, NOW)).lines == 3
        hasty = LedgerKeep(archive_after=timedelta(minutes=1))
        assert (await rotate(ledger, hasty, NOW + timedelta(hours=2))).lines == 0
        ledger.close()

    run(story())


def test_what_is_long_gone_is_forgotten_unless_a_hold_counts(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        refs = [Ref("docker", "a", "container", name, name) for name in ("gone", "held", "there", "recent")]
        gone, kept, there, recent = refs
        await ledger.append([noticed(ref, OLD) for ref in refs])
        await ledger.append([held(kept, OLD, 90 * DAY), held(gone, OLD, 3 * DAY)])
        await ledger.append([Vanished(at=OLD, ref=ref) for ref in (gone, kept)])
        await ledger.append([Vanished(at=NOW, ref=recent)])
        await rotate(ledger, KEEP, NOW)
        assert set(await ledger.memories(ref.key for ref in refs)) == {kept.key, there.key, recent.key}
        ledger.close()

    run(story())


def test_two_rotations_do_not_run_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        async with ledger.lease("ledger", "archive"):
            with pytest.raises(LeaseHeld):
                await rotate(ledger, KEEP, NOW)
        ledger.close()

    run(story())


def test_what_is_remembered_of_a_gpu_outlives_its_lines(tmp_path: Path) -> None:
    """A quarantine of long ago is still one."""

    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        await ledger.append([BaselineSeen(at=OLD, ref=GPU, memory_used_mib=615)])
        await ledger.append([Quarantined(at=OLD, ref=GPU, reason="dirty"), intended("newest", at=NOW)])
        assert (await rotate(ledger, KEEP, NOW)).lines == 2
        known = (await ledger.gpus("node-3"))["GPU-1"]
        assert (known.baseline_mib, known.quarantined, known.quarantine_reason) == (615, OLD, "dirty")
        assert await ledger.gpus("node") == {}
        await ledger.rebuild()
        assert (await ledger.gpus("node-3"))["GPU-1"] == known
        ledger.close()

    run(story())


def test_what_acceptance_runs_showed_outlives_its_lines(tmp_path: Path) -> None:
    """A GPU is compared with its own history, however old that is."""

    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        node = Ref("host", "lab-1", "node", "lab-1", "lab-1")
        line = NodeTested(
            at=OLD,
            ref=node,
            run="run-1",
            verdict=Grade.PASS,
            reason="all good",
            device="cuda",
            gpus={"serial-1": Grade.PASS},
            values={"serial-1": {"gemm.bf16 mm": 700.0}},
        )
        await ledger.append([line, intended("newest", at=NOW)])
        known = (await ledger.memories([node.key]))[node.key]
        assert known.tested
        assert (await rotate(ledger, KEEP, NOW)).lines == 1
        assert (await ledger.memories([node.key]))[node.key] == known
        await ledger.rebuild()
        assert (await ledger.memories([node.key]))[node.key] == known
        ledger.close()

    run(story())

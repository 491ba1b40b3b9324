"""State is the fold of the journal: the same in memory, in SQLite, and when it is made anew."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given

from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.tables import set_meta
from gpukeeper.model.event import Event
from gpukeeper.model.subject import ClockRecord
from tests.unit.ledger.examples import EVAL, EVERY_TYPE, NOW, SPLIT, TRAIN, any_lines, run


async def everything(ledger: SqliteLedger | InMemoryLedger) -> tuple[object, ...]:
    """All that the port answers."""
    places = [("docker", "node-3"), ("kubernetes", "prod/a"), ("kubernetes", "prod"), ("no", "where")]
    keys = [EVAL.key, TRAIN.key, SPLIT.key, "no/such/key"]
    return (
        dict(await ledger.memories(keys)),
        dict(await ledger.decided(keys)),
        [dict(await ledger.present(*place)) for place in places],
        [list(await ledger.open_intents(*place)) for place in places],
        [
            await ledger.acts_since(at, rules, but=but)
            for at in (NOW.replace(year=2000), NOW, NOW.replace(year=2050))
            for rules in (frozenset(), frozenset({"idle"}), frozenset({"temporary_tree", "leftover_tree"}))
            for but in (True, False)
        ],
        [list(await ledger.about(words)) for words in ("eval", "trainjob/RUN-7", "uid-7", "a/uid-7", "nothing")],
        await ledger.paused(),
        await ledger.last_line_at(),
        list((await ledger.clock_records()).items()),
    )


async def compare(folder: Path, batches: Sequence[Sequence[Event]]) -> None:
    memory, disk = InMemoryLedger(), open_ledger(folder / "ledger.db", write=True)
    try:
        for batch in batches:
            await memory.append(batch)
            await disk.append(batch)
            for boot in ("boot-1", *(line.owner or "" for line in batch)):
                record = ClockRecord(zero=NOW, doubted_until=float(len(batch)), watched=bool(batch))
                await memory.record_clock(boot, record)
                await disk.record_clock(boot, record)
        expected = await everything(memory)
        assert await everything(disk) == expected
        await disk.rebuild()
        assert await everything(disk) == expected
        assert await disk.next_pass() == await memory.next_pass()
    finally:
        disk.close()
    again = open_ledger(folder / "ledger.db", write=False)
    assert await everything(again) == expected
    again.close()


@given(any_lines)
def test_sqlite_the_rebuilt_state_and_memory_agree_for_any_lines(lines: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(compare(Path(folder), [lines[::2], lines[1::2]]))


def test_every_type_of_line_is_stored_and_read_back_as_it_was(tmp_path: Path) -> None:
    """C15.3"""

    async def story() -> None:
        await compare(tmp_path, [EVERY_TYPE])
        ledger = open_ledger(tmp_path / "ledger.db", write=False)
        assert [line for _, line in await ledger.lines()] == list(EVERY_TYPE)
        ledger.close()

    run(story())


def test_rebuilding_mends_state_that_was_tampered_with(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        await ledger.append(EVERY_TYPE[:7])
        before = await everything(ledger)
        await ledger.change(lambda c: c.execute("DELETE FROM memories"))
        await ledger.change(lambda c: c.execute("UPDATE open_intents SET step = 'other'"))
        assert await everything(ledger) != before
        assert await ledger.rebuild() == 7
        assert await everything(ledger) == before
        ledger.close()

    run(story())


def test_pass_numbers_never_go_back_when_state_is_recreated(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        given_out = [await ledger.next_pass() for _ in range(3)]
        await ledger.rebuild()
        assert [*given_out, await ledger.next_pass()] == [1, 2, 3, 4]
        ledger.close()

    run(story())


async def damaged(folder: Path) -> None:
    ledger = open_ledger(folder / "ledger.db", write=True)
    try:
        await ledger.change(lambda c: set_meta(c, "clock", '{"boot-1": {"zero": "no time"}}'))
        assert [one.doubted_until is not None for one in (await ledger.clock_records()).values()] == [True]
        await ledger.record_clock("boot-1", ClockRecord(zero=NOW))
        assert (await ledger.clock_records())["boot-1"] == ClockRecord(zero=NOW)
    finally:
        ledger.close()


def test_a_record_of_the_clock_that_cannot_be_read_is_a_doubt(tmp_path: Path) -> None:
    run(damaged(tmp_path))


def test_of_the_clock_as_many_boots_are_kept_as_machines_share_a_ledger() -> None:
    async def story() -> None:
        ledger = InMemoryLedger()
        for number in range(40):
            await ledger.record_clock(f"boot-{number}", ClockRecord(zero=NOW))
            await ledger.record_clock("boot-0", ClockRecord(zero=NOW))
        assert list(await ledger.clock_records()) == [*(f"boot-{n}" for n in range(9, 40)), "boot-0"]

    run(story())

"""The ledger on disk, as the engine and the command line use it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Closed, Complaint, Event, Paused, Resumed
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from tests.unit.ledger.examples import EVAL, NOW, TRAIN, closed, intended, noticed, passed, run, warned


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    opened = open_ledger(tmp_path / "ledger.db", write=True)
    yield opened
    opened.close()


@pytest.fixture
def other(ledger: SqliteLedger) -> Iterator[SqliteLedger]:
    """The same file, as another process has it."""
    opened = open_ledger(ledger.path, write=True)
    yield opened
    opened.close()


def test_a_pause_by_another_process_is_seen_at_once(ledger: SqliteLedger, other: SqliteLedger) -> None:
    async def story() -> None:
        assert await ledger.paused() is None
        await other.append([Paused(at=NOW, by="root")])
        first = await ledger.paused()
        assert (first or "").startswith("by root since ")
        await other.append([Paused(at=NOW, by="ann", reason="burning smell")])
        assert await ledger.paused() == first, "the first stands until somebody resumes"
        await other.append([Resumed(at=NOW)])
        assert await ledger.paused() is None

    run(story())


def test_pass_numbers_are_unique_over_processes_and_restarts(ledger: SqliteLedger, other: SqliteLedger) -> None:
    async def story() -> None:
        numbers = await asyncio.gather(*(one.next_pass() for one in [ledger, other] * 20))
        assert sorted(numbers) == list(range(1, 41))
        await ledger.append([passed(pass_id=100)])
        assert await other.next_pass() == 101
        again = open_ledger(ledger.path, write=True)
        assert await again.next_pass() == 102
        again.close()

    run(story())


def test_a_batch_is_written_as_a_whole_or_not_at_all(ledger: SqliteLedger) -> None:
    async def story() -> None:
        broken = Complaint(at=NOW.replace(tzinfo=None), what="a time without zone is a bug")
        with pytest.raises(TypeError):
            await ledger.append([noticed(), broken])
        assert await ledger.lines() == []
        assert await ledger.present("docker", "node-3") == {}
        await ledger.append([noticed()])
        assert len(await ledger.lines()) == 1

    run(story())


def test_the_journal_is_append_only(ledger: SqliteLedger) -> None:
    async def story() -> None:
        await ledger.append([noticed()])
        with pytest.raises(LedgerError, match="append-only"):
            await ledger.change(lambda c: c.execute("UPDATE journal SET owner = 'bob'"))

    run(story())


def test_a_name_that_is_no_text_and_a_figure_that_is_no_number_do_not_stop_the_journal(ledger: SqliteLedger) -> None:
    async def story() -> None:
        odd = Ref("host", "here", "tree", "pip-\udcff\x00\x1b", "8:1")
        await ledger.append([noticed(odd), closed(ref=odd, gpu_hours=math.nan), passed(seconds=math.inf)])
        (_, first), (_, second), _ = await ledger.lines()
        assert first.ref is not None
        assert first.ref.name == "pip-\\udcff\x00\x1b"
        assert isinstance(second, Closed)
        assert isinstance(second.gpu_hours, Unknown)
        assert list(await ledger.present("host", "here")) == [odd.key]
        assert await ledger.memories(["host/here/\udcff"]) == {}

    run(story())


def test_lines_since_a_time_are_counted_by_type(ledger: SqliteLedger) -> None:
    async def story() -> None:
        day = timedelta(days=1)
        old = Complaint(at=NOW - day - timedelta(microseconds=1), what="before")
        await ledger.append([old, Complaint(at=NOW - day, what="since"), noticed(), noticed(TRAIN)])
        found = await ledger.lines_by_type(NOW - day)
        assert (found["complaint"], found["noticed"], found["outcome"]) == (1, 2, 0)
        plan = await ledger.read(
            lambda c: c.execute(
                "EXPLAIN QUERY PLAN SELECT count(*) FROM journal WHERE type = 'noticed' AND at >= 1"
            ).fetchall()
        )
        assert "COVERING INDEX journal_type" in str(plan), "a scrape must not read a month of lines"

    run(story())


def test_lines_can_be_narrowed(ledger: SqliteLedger) -> None:
    """C15.3, C15.6: last 100, by type, owner, workload, errors only, since."""
    later = NOW + timedelta(hours=1)
    lines: list[Event] = [
        noticed(),
        noticed(TRAIN),
        closed(result=Result.STILL_THERE),
        closed("s2", owner="bob"),
        passed(unseen=("namespace lab",)),
        warned(delivered=False),
        Complaint(at=later, what="no pass for an hour"),
    ]

    async def story() -> None:
        await ledger.append(lines)

        async def numbers(**wanted: object) -> list[int]:
            return [seq for seq, _ in await ledger.lines(LineFilter(**wanted))]  # type: ignore[arg-type]

        assert await numbers() == [1, 2, 3, 4, 5, 6, 7]
        assert await numbers(last=2) == [6, 7]
        assert await numbers(types=("noticed", "pass")) == [1, 2, 5]
        assert await numbers(owner="bob") == [4]
        assert await numbers(workload="eval") == [1, 3, 4, 6]
        assert await numbers(workload="Node-3/eval", last=1) == [6]
        assert await numbers(search="NO PASS for") == [7]
        assert await numbers(search="namespace lab") == [5]
        assert await numbers(search="docker/node-3/eval", last=2) == [4, 6]
        assert await numbers(search="outcome", owner="bob") == [4]
        assert await numbers(search="incarnation") == [], "a field's name is no text"
        assert await numbers(workload="val") == []
        assert await numbers(workload="uid-7") == [2]
        assert await numbers(errors_only=True) == [3, 5, 6, 7]
        assert await numbers(since=later) == [7]
        assert await numbers(types=("outcome",), owner="ann", errors_only=True, workload="eval") == [3]

    run(story())


def test_following_shows_what_is_there_and_what_another_process_adds(ledger: SqliteLedger, other: SqliteLedger) -> None:
    """C15.3"""

    async def story() -> None:
        await ledger.append([noticed()] * 3)
        seen = []
        async for seq, _ in ledger.follow(1, poll=0.001):
            seen.append(seq)
            if seq == 3:
                await other.append([noticed(TRAIN)] * 2)
            if seq == 5:
                break
        assert seen == [2, 3, 4, 5]

    run(story())


def test_totals_keep_unknown_figures_apart(ledger: SqliteLedger) -> None:
    """C15.7: totals. What was not measured is counted, never added as zero."""
    lines = [
        closed("a", gpus_back=4, gpu_hours=2.5, bytes_back=10),
        closed("b", TRAIN, owner=None, rule="finished", gpus_back=Unknown("x"), gpu_hours=Unknown("x"), bytes_back=5),
        closed("b", TRAIN, owner=None, rule="finished", gpus_back=9),  # looked at again after a crash
        closed("c", result=Result.STILL_THERE, gpus_back=100),
        closed("d", at=NOW - timedelta(days=9), gpus_back=100),
    ]

    async def story() -> None:
        await ledger.append(lines)
        found = await ledger.totals(NOW - timedelta(days=1))
        whole = found.whole
        assert (whole.steps, whole.gpus, whole.gpu_hours, whole.bytes) == (2, 4, 2.5, 15)
        assert (whole.unmeasured_gpus, whole.unmeasured_gpu_hours, whole.unmeasured_bytes) == (1, 1, 0)
        assert {name: part.gpus for name, part in found.owners.items()} == {"ann": 4, "": 0}
        assert {name: part.bytes for name, part in found.rules.items()} == {"idle": 10, "finished": 5}
        assert {name: part.unmeasured_gpus for name, part in found.platforms.items()} == {"docker": 0, "kubernetes": 1}
        assert found.covers_from is None

    run(story())


def test_a_ledger_for_reading_writes_nothing(ledger: SqliteLedger) -> None:
    async def story() -> None:
        await ledger.append([intended()])
        reader = open_ledger(ledger.path, write=False)
        assert len(await reader.open_intents("docker", "node-3")) == 1
        for attempt in (reader.append([noticed()]), reader.next_pass(), reader.rebuild()):
            with pytest.raises(LedgerError, match="opened for reading"):
                await attempt
        with pytest.raises(LedgerError, match="opened for reading"):
            async with reader.lease("docker", "node-3"):
                pass
        with pytest.raises(LedgerError):
            await reader.read(lambda c: c.execute("DELETE FROM journal"))
        reader.close()

    run(story())


def test_acts_are_counted_on_every_place(ledger: SqliteLedger) -> None:
    async def story() -> None:
        await ledger.append([intended("a"), intended("b", TRAIN, NOW - timedelta(hours=2)), closed("a")])
        assert await ledger.acts_since(NOW - timedelta(hours=1), frozenset(), but=True) == 1
        assert await ledger.acts_since(NOW - timedelta(hours=2), frozenset(), but=True) == 2

    run(story())


def test_acts_are_counted_by_their_rules(ledger: SqliteLedger) -> None:
    """Trees of files have an hour of their own."""
    trees = frozenset({"temporary_tree", "leftover_tree"})

    async def story() -> None:
        rules = ("idle", "temporary_tree", "leftover_tree", "temporary_tree", "retention")
        await ledger.append([intended(f"s{n}", rule=rule) for n, rule in enumerate(rules)])
        assert await ledger.acts_since(NOW, trees) == 3
        assert await ledger.acts_since(NOW, trees, but=True) == 2
        assert await ledger.acts_since(NOW + timedelta(seconds=1), trees) == 0

    run(story())


def test_an_outcome_that_could_not_be_verified_leaves_the_intent_open(ledger: SqliteLedger) -> None:
    async def story() -> None:
        await ledger.append([intended(action=Action.REMOVE), closed(action=Action.REMOVE, result=Result.UNKNOWN)])
        assert [i.step for i in await ledger.open_intents(EVAL.platform, EVAL.place)] == ["s1"]
        await ledger.append([closed(action=Action.REMOVE)])
        assert await ledger.open_intents(EVAL.platform, EVAL.place) == []

    run(story())

"""A bug in one adapter: the pass at its place stops and is reported; other places, and the next pass, go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.reclaim import PassReport, look_and_plan, reclaim
from gpukeeper.engine.view import find
from gpukeeper.model.decision import Result
from gpukeeper.model.errors import LedgerError, PlatformError, UsageError
from gpukeeper.model.event import Closed, Complaint, Intended, Passed
from gpukeeper.model.series import Sample
from gpukeeper.model.subject import Ref, Subject
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform
from gpukeeper.platforms.simulated.world import SimulatedPlace, Thing, VirtualLoop, run_virtually
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual

THERE = SimulatedPlace("docker", "node-4", ("GPU-2",), ("ann",))
CALLS = ("observe", "read", "capture", "act", "wake")


class Broken(SimulatedPlatform):
    """Has a bug in one of its calls, for a while."""

    bug_in = ""
    problem: Exception = KeyError("a line without a colon")

    def _break(self, call: str) -> None:
        if call == self.bug_in:
            raise self.problem

    async def observe(self, scope: Any) -> Any:
        async for page in super().observe(scope):
            self._break("observe")
            yield page

    async def wake(self) -> AsyncIterator[Ref | None]:
        await asyncio.sleep(1)
        self._break("wake")
        async for ref in super().wake():
            yield ref

    async def read(self, ref: Ref) -> Any:
        self._break("read")
        return await super().read(ref)

    async def capture(self, subject: Subject, what: Sequence[str]) -> Any:
        self._break("capture")
        return await super().capture(subject, what)

    async def act(self, *args: Any) -> Any:
        answer = await super().act(*args)
        self._break("act")
        return answer


class Two:
    """A broken place and a sound one, each with something that is due."""

    def __init__(self, b: Harness, bug_in: str) -> None:
        b.world.things[THERE.key], b.world.nodes[THERE.key] = {}, []
        b.world.places = (HERE, THERE)
        self.b, self.broken, self.sound = b, Broken(b.world, HERE), SimulatedPlatform(b.world, THERE)
        self.broken.bug_in = bug_in
        places = (self.broken, self.sound)
        self.keeper = Keeper(places, b.ledger, b.signals, b.evidence, b.notifier(*places), b.clock, b.meter)
        self.here, self.there = b.ended("eval"), self._there("eval")
        self.reports: list[PassReport] = []
        self.said: list[str] = []

    def _there(self, name: str) -> Thing:
        made = self.b.ended(name)
        self.b.world.things[HERE.key].pop(made.ref.uid)
        made.ref = msgspec.structs.replace(made.ref, place=THERE.place)
        return self.b.world.add(made)

    def is_there(self, thing: Thing) -> bool:
        return self.b.world.find(thing.ref) is not None

    async def serve(self, span: timedelta) -> None:
        stop = asyncio.Event()
        self.b.loop.call_later(span.total_seconds(), stop.set)
        await watch(Watch(self.keeper, lambda: self.b.book, stop, self.reports.append, self.said.append))


def story(bug_in: str, tell: Any) -> None:
    loop = VirtualLoop()

    async def run() -> None:
        await tell(Two(Harness(loop), bug_in))

    run_virtually(run(), loop)


@pytest.mark.parametrize("call", CALLS)
def test_a_bug_at_one_place_stops_neither_serve_nor_another_place(call: str) -> None:
    async def tell(two: Two) -> None:
        await two.serve(20 * MINUTE)
        assert not two.is_there(two.there)
        passes = [line for line in two.b.ledger.lines if isinstance(line, Passed)]
        assert sum(line.place == THERE.place for line in passes) >= 4
        if call in ("observe", "read", "capture"):
            assert [line for line in passes if line.place == HERE.place] == []
        said = two.said[0]
        for words in ("a bug in gpukeeper", "docker/node-3", "KeyError", "test_isolation.py"):
            assert words in said, said
        two.broken.bug_in = ""
        await two.serve(2 * MINUTE)
        assert not two.is_there(two.here)
        closed = [line.result for line in two.b.lines(Closed) if line.ref == two.here.ref]
        assert closed.count(Result.RECLAIMED) == 1
        assert len(closed) == len([line for line in two.b.lines(Intended) if line.ref == two.here.ref])

    story(call, tell)


def test_the_ledger_has_a_complaint_when_it_begins_and_not_every_pass() -> None:
    async def tell(two: Two) -> None:
        await two.serve(HOUR)
        bugs = [line.what for line in two.b.lines(Complaint) if "a bug in gpukeeper" in line.what]
        assert len(bugs) == 1
        assert len([report for report in two.reports if report.stopped]) >= 10

    story("observe", tell)


def test_the_same_line_is_reported_seldom_and_counted() -> None:
    async def tell(two: Two) -> None:
        await two.serve(HOUR)
        bugs = [line for line in two.said if "a bug in gpukeeper" in line]
        assert len([report for report in two.reports if report.stopped]) > 10
        assert len(bugs) == 4, bugs
        assert bugs[1].endswith("(4 times in the last 17m1s)")

    story("observe", tell)


def test_what_was_done_before_the_bug_is_reported() -> None:
    async def tell(two: Two) -> None:
        two.b.ended("older", ago=5 * HOUR)
        two.broken.bug_in = "act"
        report = await reclaim(two.keeper, two.broken, two.b.book)
        assert report.stopped is not None
        assert report.outcomes == []
        two.broken.bug_in = ""
        again = await reclaim(two.keeper, two.broken, two.b.book)
        assert [line.result for line in again.settled] == [Result.RECLAIMED], "it happened, and is closed as found"
        assert again.stopped is None

    story("", tell)


@virtual
async def test_a_platform_that_fails_in_the_middle_is_no_bug(b: Harness) -> None:
    b.platform = Broken(b.world, HERE)
    b.ended("eval")
    b.platform.bug_in, b.platform.problem = "act", PlatformError("the engine hung up")
    report = await reclaim(b.keeper, b.platform, b.book)
    assert report.stopped == (
        "the pass on docker/node-3 stopped: the engine hung up. Nothing more was touched there; "
        "the next pass continues."
    )


@virtual
async def test_a_plan_shows_which_place_it_could_not_make(b: Harness) -> None:
    b.platform = Broken(b.world, HERE)
    b.platform.bug_in = "observe"
    report = await look_and_plan(b.keeper, b.platform, b.book)
    assert report.stopped is not None
    assert (report.plan.steps, report.survey.decisions) == ((), [])
    assert b.ledger.lines == []


@virtual
async def test_a_ledger_that_fails_is_not_taken_for_a_bug_of_the_place(b: Harness) -> None:
    b.platform = Broken(b.world, HERE)
    b.platform.bug_in, b.platform.problem = "observe", LedgerError("no space left")
    with pytest.raises(LedgerError):
        await reclaim(b.keeper, b.platform, b.book)


class BrokenMeter(SimulatedMeter):
    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        if any(one.ref.place == HERE.place for one in subjects):
            raise ValueError("a counter that is no number")
        return await super().read(subjects)


def test_a_bug_in_measuring_costs_one_place_its_minutes() -> None:
    async def tell(two: Two) -> None:
        two.keeper = replace(two.keeper, meter=BrokenMeter(two.b.world))
        runs = two.b.running("train", devices=("GPU-1",))
        two.here, other = runs, two._there("eval-2")
        other.start(two.b.now(), busy_for=HOUR)
        await two.serve(10 * MINUTE)
        assert two.b.world.samples.get(runs.ref.uid) is None
        assert two.b.world.samples.get(other.ref.uid)
        assert any("docker/node-3" in line and "ValueError" in line for line in two.said)

    story("", tell)


@virtual
async def test_a_policy_that_cannot_even_be_requested_stops_no_daemon(b: Harness) -> None:
    """And a reader of reports that fails stops no pass."""
    said: list[str] = []
    asked = 0

    def book() -> Any:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise OSError("stale file handle")
        return b.book

    def on_report(report: PassReport) -> None:
        raise ZeroDivisionError

    stop = asyncio.Event()
    b.loop.call_later(1200, stop.set)
    await watch(Watch(b.keeper, book, stop, on_report, said.append))
    assert any("stale file handle" in line for line in said)
    assert any("ZeroDivisionError" in line for line in said)
    assert b.lines(Passed)


@pytest.mark.parametrize("answering", [False, True])
def test_a_bug_at_one_place_does_not_fail_a_request_about_another(answering: bool) -> None:
    async def tell(two: Two) -> None:
        two.keeper.request_state.enabled = answering
        name = two.there.ref.path
        found = await find(two.keeper, two.b.book, name)
        assert found.view.subject.ref == two.there.ref
        with pytest.raises(UsageError) as raised:
            await find(two.keeper, two.b.book, "no-such-thing")
        for words in ("docker/node-3", "a bug in gpukeeper", "KeyError"):
            assert words in str(raised.value)

    story("observe", tell)


def test_a_ledger_that_fails_is_not_taken_for_a_place_that_cannot_be_seen() -> None:
    async def tell(two: Two) -> None:
        two.broken.problem = LedgerError("the ledger cannot be read")
        with pytest.raises(LedgerError):
            await find(two.keeper, two.b.book, two.there.ref.path)

    story("observe", tell)

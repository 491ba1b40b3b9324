"""The story of a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.engine.memory import BACK_OFF
from gpukeeper.engine.outlook import explained
from gpukeeper.engine.ports import MOST_READS
from gpukeeper.engine.reclaim import look_and_plan, reclaim
from gpukeeper.engine.view import find
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Action, Plan, Result
from gpukeeper.model.errors import LeaseHeld, PlatformError
from gpukeeper.model.event import Closed, Complaint, Intended, Passed, Paused, Vanished, WarningSent
from gpukeeper.model.policy import Amount, Breaker, Budget
from gpukeeper.model.subject import Gone, Ref, State
from gpukeeper.model.words import in_words
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import Faults, SimulatedPlace
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual


@virtual
async def test_a_pass_reclaims_what_is_due_and_records_itself(b: Harness) -> None:
    due, young = b.ended("old"), b.ended("young", ago=MINUTE)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(due.ref) is None
    assert b.world.find(young.ref) is young
    assert [one.result for one in report.reclaimed] == [Result.RECLAIMED]
    passed = b.lines(Passed)[0]
    assert (passed.pass_id, passed.seen, passed.due, passed.reclaimed, passed.failed) == (1, 2, 1, 1, 0)
    assert b.ledger.lines[-1] is passed


@virtual
async def test_mode_plan_observes_decides_and_records_but_touches_nothing(b: Harness) -> None:
    due = b.ended("old")
    report = await reclaim(b.keeper, b.platform, b.book, act=False)
    assert len(report.plan.steps) == 1
    assert not report.acted
    assert b.world.find(due.ref) is due
    assert b.order() == ["Noticed", "Decided", "Passed"]


@virtual
async def test_planning_writes_nothing(b: Harness) -> None:
    b.ended("old")
    report = await look_and_plan(b.keeper, b.platform, b.book)
    assert (len(report.plan.steps), report.acted, b.ledger.lines) == (1, False, [])


@virtual
async def test_a_plan_that_nobody_confirms_is_not_carried_out(b: Harness) -> None:
    due, asked = b.ended("old"), list[Plan]()

    async def no(plan: Plan) -> bool:
        asked.append(plan)
        return False

    report = await reclaim(b.keeper, b.platform, b.book, confirm=no)
    assert asked == [report.plan]
    assert b.world.find(due.ref) is due


@virtual
async def test_a_confirmed_plan_is_carried_out_and_its_progress_told(b: Harness) -> None:
    b.ended("old")
    b.running("train", 100 * MINUTE)
    told: list[Any] = []

    async def yes(plan: Plan) -> bool:
        return True

    await reclaim(b.keeper, b.platform, b.book, confirm=yes, progress=told.append)
    assert [type(line) for line in told] == [WarningSent, Closed]


@virtual
async def test_nothing_to_do_asks_nobody(b: Harness) -> None:
    async def never(plan: Plan) -> bool:
        raise AssertionError("asked about an empty plan")

    await reclaim(b.keeper, b.platform, b.book, confirm=never)


@virtual
async def test_pausing_counts_between_two_steps(b: Harness) -> None:
    """The owner is told, an admin hears it and pauses: the removal after it does not happen."""
    due = b.ended("old")
    b.running("train", 100 * MINUTE)
    b.world.on_warning = lambda owner, message: b.ledger._take(Paused(at=b.now(), by="root", reason="maintenance"))
    report = await reclaim(b.keeper, b.platform, b.book)
    assert "maintenance, by root" in str(report.paused)
    assert len(report.warnings) == 1
    assert b.world.find(due.ref) is due
    assert "maintenance, by root" in str((await look_and_plan(b.keeper, b.platform, b.book)).paused)


@virtual
async def test_a_warning_that_is_not_needed_any_more_is_not_counted(b: Harness) -> None:
    thing = b.running("train", 100 * MINUTE)

    async def meanwhile(plan: Plan) -> bool:
        b.world.remove(thing)
        return True

    report = await reclaim(b.keeper, b.platform, b.book, confirm=meanwhile)
    assert (len(report.plan.steps), report.warnings) == (1, [])


@virtual
async def test_two_passes_never_overlap_on_one_place(b: Harness) -> None:
    async with b.ledger.lease("docker", "node-3"):
        with pytest.raises(LeaseHeld):
            await reclaim(b.keeper, b.platform, b.book)
    await reclaim(b.keeper, b.platform, b.book)


@virtual
async def test_the_budget_defers_the_youngest(b: Harness) -> None:
    things = [b.ended(f"job-{n}", ago=n * HOUR) for n in (2, 3, 4)]
    b.set_policy(budget=Budget(per_pass=Amount(count=2)))
    report = await reclaim(b.keeper, b.platform, b.book)
    assert [b.world.find(thing.ref) is None for thing in things] == [False, True, True]
    assert b.lines(Passed)[0].deferred == len(report.plan.deferred) == 1


@virtual
async def test_the_hour_counts_over_passes(b: Harness) -> None:
    for n in range(4):
        b.ended(f"job-{n}", ago=(n + 2) * HOUR)
    b.set_policy(budget=Budget(per_pass=Amount(count=2), per_hour=Amount(count=3)))
    for _ in range(3):
        await reclaim(b.keeper, b.platform, b.book)
    assert len(b.lines(Intended)) == 3


@virtual
async def test_an_open_breaker_touches_nothing_and_is_recorded(b: Harness) -> None:
    things = [await b.overdue(f"job-{n}") for n in range(3)]
    b.set_policy(breaker=Breaker(running=0.2))
    report = await reclaim(b.keeper, b.platform, b.book)
    assert b.lines(Passed)[0].breaker == report.plan.breaker
    assert "3 of 3 running workloads" in str(report.plan.breaker)
    assert all(thing.state is State.RUNNING for thing in things)


@virtual
async def test_a_person_may_allow_it_once(b: Harness) -> None:
    things = [await b.overdue(f"job-{n}") for n in range(3)]
    b.set_policy(breaker=Breaker(running=0.2))
    await reclaim(b.keeper, b.platform, b.book, allow=2)
    assert [thing.state for thing in things].count(State.ENDED) == 2


@virtual
async def test_neither_a_narrow_pass_nor_an_allowed_one_closes_the_breaker_of_a_place(b: Harness) -> None:
    """They say nothing about the place: what a full pass found applies to hints until the next full one."""
    things = [await b.overdue(f"job-{n}") for n in range(4)]
    b.set_policy(breaker=Breaker(running=0.2))
    opened = (await reclaim(b.keeper, b.platform, b.book)).plan.breaker
    assert opened is not None
    for how in ({"narrow": Narrow(name="none")}, {"allow": 1}, {"allow": 0, "narrow": Narrow(owner="ann")}):
        assert (await reclaim(b.keeper, b.platform, b.book, **how)).plan.breaker is None
        left = [thing for thing in things if thing.state is State.RUNNING]
        report = await reclaim(b.keeper, b.platform, b.book, only=[left[0].ref])
        assert report.plan.breaker == opened
        assert [thing for thing in things if thing.state is State.RUNNING] == left
    b.set_policy(breaker=Breaker(running=1.0))
    assert (await reclaim(b.keeper, b.platform, b.book, act=False)).plan.breaker is None
    assert (await reclaim(b.keeper, b.platform, b.book, only=[left[0].ref])).plan.breaker is None


@virtual
async def test_a_clock_behind_the_ledger_touches_nothing(b: Harness) -> None:
    due = b.ended("old")
    await b.ledger.append([Passed(at=b.now() + HOUR, pass_id=1, **_place_counts())])
    assert (await look_and_plan(b.keeper, b.platform, b.book)).plan.breaker is not None
    report = await reclaim(b.keeper, b.platform, b.book, allow=5)
    assert "but the newest ledger line is of" in str(report.plan.breaker)
    assert b.world.find(due.ref) is due


def _place_counts() -> dict[str, Any]:
    return {"platform": "docker", "place": "node-3", "seen": 0, "due": 0, "reclaimed": 0, "deferred": 0, "failed": 0}


@virtual
async def test_a_clock_that_jumps_between_two_steps_ends_the_pass(b: Harness) -> None:
    due = b.ended("old")
    b.running("train", 100 * MINUTE)
    b.world.on_warning = lambda owner, message: setattr(b.clock, "skew", timedelta(hours=3))
    report = await reclaim(b.keeper, b.platform, b.book)
    assert "The clock jumped" in str(report.paused)
    assert b.world.find(due.ref) is due


@virtual
async def test_failures_are_counted_and_what_changed_is_none(b: Harness) -> None:
    b.ended("old")
    b.world.faults = Faults(refused=1)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert [one.result for one in report.failed] == [Result.REFUSED]
    assert b.lines(Passed)[0].failed == 1


@virtual
async def test_what_was_refused_is_explained_with_when_and_why_it_is_retried(b: Harness) -> None:
    """`explain` named it due, minutes ago, while the next try was minutes ahead."""
    old = b.ended("old")
    b.world.faults = Faults(refused=1)
    line = (await reclaim(b.keeper, b.platform, b.book)).failed[0]
    await asyncio.sleep(60)
    found = await find(b.keeper, b.book, "old")
    now = b.keeper.clock.now()
    one = await explained(b.keeper, b.book, found, await b.keeper.ledger.about(old.ref.uid))
    assert (one.decision.action, one.decision.due) == (Action.KEEP, line.at + BACK_OFF)
    assert f"was refused {in_words(now - line.at)} ago ({line.reason}), retried after 20m" in one.decision.reason
    assert [(step.action, step.at) for step in one.ahead] == [(Action.REMOVE, line.at + BACK_OFF)]


@virtual
async def test_only_what_is_narrowed_to_is_touched(b: Harness) -> None:
    mine, other = b.ended("mine"), b.ended("other", owner="bob")
    await reclaim(b.keeper, b.platform, b.book, narrow=Narrow(owner="ann"))
    assert b.world.find(mine.ref) is None
    assert b.world.find(other.ref) is other


@virtual
async def test_everything_that_vanished_is_forgotten_in_one_pass(b: Harness) -> None:
    things = [b.running(f"job-{n}", devices=()) for n in range(400)]
    await reclaim(b.keeper, b.platform, b.book)
    for thing in things:
        b.world.remove(thing)
    assert (await reclaim(b.keeper, b.platform, b.book)).plan.breaker is not None
    assert len(b.lines(Vanished)) == 400
    assert await b.ledger.present(b.platform.name, b.platform.place) == {}
    assert (await reclaim(b.keeper, b.platform, b.book)).plan.breaker is None


@virtual
async def test_looks_at_what_is_missing_are_bounded_in_each_pass(b: Harness) -> None:
    things = [b.running(f"job-{n}", devices=()) for n in range(MOST_READS + 10)]
    await reclaim(b.keeper, b.platform, b.book)
    for thing in things:
        b.world.remove(thing)
    await reclaim(b.keeper, b.platform, b.book)
    assert len(b.lines(Vanished)) == MOST_READS
    await reclaim(b.keeper, b.platform, b.book)
    assert len(b.lines(Vanished)) == MOST_READS + 10


@virtual
async def test_removals_that_the_platform_announced_open_no_breaker_and_are_accepted_at_once(b: Harness) -> None:
    class Announcing(SimulatedPlatform):
        async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
            return [Gone(ref, b.now(), announced=True) for ref in refs]

    platform = Announcing(b.world, b.platform._place)
    b.keeper.absences.patience = HOUR  # of a daemon
    things = [b.running(f"job-{n}", devices=()) for n in range(40)]
    await reclaim(b.keeper, platform, b.book)
    for thing in things:
        b.world.remove(thing)
    report = await reclaim(b.keeper, platform, b.book)
    assert (report.plan.breaker, report.survey.counts.vanished) == (None, 0)
    assert len(b.lines(Vanished)) == 40


@pytest.mark.parametrize("other", ["node-30", "node-3/rack", "node", "elsewhere"])
def test_a_pass_at_one_place_leaves_the_absences_of_others_as_they_are(other: str) -> None:
    """While the breaker is open, absence counts from when it was first noticed, whatever happens elsewhere."""

    async def story(b: Harness) -> None:
        absences = b.keeper.absences
        absences.patience = HOUR
        lost = Ref("docker", "node-3", "container", "eval", "1")
        there = SimulatedPlace("docker", other, ("GPU-0",), ("ann",))
        far = SimulatedPlatform(b.world, there)
        away = Ref("docker", other, "container", "train", "2")
        for platform, ref in ((b.platform, lost), (far, away)):
            await absences.record(b.keeper, platform, [ref], [Gone(ref, b.now())], believe=False)
        for minutes in (20, 40):
            await asyncio.sleep(minutes * 60)
            for platform, ref in ((b.platform, lost), (far, away)):
                assert b.lines(Vanished) == [] or minutes == 40
                await absences.record(b.keeper, platform, [ref], [Gone(ref, b.now())], believe=False)
        assert [line.ref for line in b.lines(Vanished)] == [lost, away]
        assert list(absences.keys()) == []

    virtual(story)()


@virtual
async def test_a_platform_that_cannot_confirm_what_is_missing_forgets_nothing(b: Harness) -> None:
    class Failing(SimulatedPlatform):
        async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
            raise PlatformError("no list could be made")

    platform = Failing(b.world, b.platform._place)
    things = [b.running(f"job-{n}", devices=()) for n in range(4)]
    await reclaim(b.keeper, platform, b.book)
    b.world.remove(things[0])
    report = await reclaim(b.keeper, platform, b.book)
    assert report.stopped is None
    assert b.lines(Vanished) == []
    assert len(await b.ledger.present(platform.name, platform.place)) == 4


@virtual
async def test_a_silent_place_is_recorded_as_unseen(b: Harness) -> None:
    b.world.faults = Faults(silent=1)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.lines(Passed)[0].unseen == ("docker/node-3: docker/node-3 did not answer within 10 s (3 tries)",)


@virtual
async def test_what_a_platform_lists_twice_is_acted_on_once_and_reported(b: Harness) -> None:
    class Twice(SimulatedPlatform):
        async def observe(self, scope: Any) -> Any:
            async for page in super().observe(scope):
                yield page
                yield page

    b.platform = Twice(b.world, HERE)
    b.ended("eval")
    report = await reclaim(b.keeper, b.platform, b.book)
    assert [one.result for one in report.outcomes] == [Result.RECLAIMED]
    (line,) = b.lines(Complaint)
    assert line.what.startswith("two decisions about docker/node-3/eval in one plan: remove by retention is not done")

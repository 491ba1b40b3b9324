"""Ways in which too much could be done, or nothing any more: found by reading the code as somebody who wants that."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.engine.act import take
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.verify import as_found
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Result, View
from gpukeeper.model.event import Noticed, Restored
from gpukeeper.model.fold import remember
from gpukeeper.model.policy import AtFinish, Breaker, ClassSettings, PlaceScope, Policy, Schedule
from gpukeeper.model.subject import EMPTY, Memory, Outcome, Ref, Seen, State, Stopped, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import BEGIN
from tests.unit.engine.harness import DAY, HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_loop import Exact, serve

REF = Ref("kubernetes", "lab", "jobset", "run-7", "uid-7", "team-a")


# Too much


@virtual
async def test_an_open_breaker_is_not_walked_around_one_hint_at_a_time(b: Harness) -> None:
    """Of one thing that a hint names never too much is due. What the look at everything found stands."""
    b.set_policy(breaker=Breaker(running=0.2, floor=1))
    things = [await b.overdue(f"train-{n}") for n in range(5)]
    b.platform = Exact(b.world, HERE)
    whole = await reclaim(b.keeper, b.platform, b.book)
    assert whole.plan.breaker is not None
    for thing in things:
        narrow = await reclaim(b.keeper, b.platform, b.book, only=[thing.ref])
        assert (narrow.plan.breaker, narrow.outcomes) == (whole.plan.breaker, [])
    assert all(thing.state is State.RUNNING for thing in things)


@virtual
async def test_a_breaker_that_closed_again_lets_narrow_passes_act(b: Harness) -> None:
    b.set_policy(breaker=Breaker(running=0.2, floor=1))
    things = [await b.overdue(f"train-{n}") for n in range(5)]
    b.platform = Exact(b.world, HERE)
    assert (await reclaim(b.keeper, b.platform, b.book)).plan.breaker is not None
    for thing in things[1:]:
        thing.started = b.now()
    assert (await reclaim(b.keeper, b.platform, b.book, act=False)).plan.breaker is None
    narrow = await reclaim(b.keeper, b.platform, b.book, only=[things[0].ref])
    assert [line.result for line in narrow.outcomes] == [Result.RECLAIMED]


@virtual
async def test_a_lease_that_is_lost_while_evidence_is_taken_ends_the_step(b: Harness) -> None:
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.keeper.permission.why_not = lambda: "another holds the lease"
    line = await take(b.keeper, b.platform, step, b.book, 1)
    assert (line.result, b.world.find(thing.ref)) == (Result.DEFERRED, thing)
    assert "another holds the lease" in line.reason


@virtual
async def test_a_lease_that_is_lost_after_the_intent_ends_the_step(b: Harness) -> None:
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    said = iter([None, "another holds the lease"])
    b.keeper.permission.why_not = lambda: next(said)
    line = await take(b.keeper, b.platform, step, b.book, 1)
    assert (line.result, b.world.find(thing.ref)) == (Result.DEFERRED, thing)
    assert await b.ledger.open_intents("docker", "node-3") == []


# Whose stop it was


def suspended(incarnation: str, state: State = State.SUSPENDED, **facts: Any) -> Subject:
    seen = Seen(REF, incarnation, "9", BEGIN)
    return Subject(seen=seen, state=state, class_="cluster", created=BEGIN - 9 * DAY, **facts)


STOPPED = Stopped("gpukeeper", "idle", BEGIN - 5 * DAY, "1")
CLASSES = {"cluster": ClassSettings(idle=HOUR, never_started=None)}
BOOK = Rulebook(Policy(scope={"kubernetes": PlaceScope()}, classes=CLASSES))


def test_what_we_stopped_goes_when_nobody_touched_it() -> None:
    memory = Memory(state="suspended", incarnation="1", stopped=STOPPED)
    assert decide(View(suspended("1"), memory=memory), BOOK, BEGIN + 30 * DAY).action is Action.REMOVE


def test_what_its_owner_resumed_and_suspended_again_is_not_ours_to_remove() -> None:
    """Nobody looked while it ran: another replica led, or none did."""
    memory = Memory(state="suspended", incarnation="1", stopped=STOPPED)
    line = Noticed(at=BEGIN, ref=REF, incarnation="1@9", state=State.SUSPENDED)
    after = remember(memory, line) or EMPTY
    assert decide(View(suspended("1@9"), memory=after), BOOK, BEGIN + 30 * DAY).action is Action.KEEP


def test_what_its_owner_resumed_and_let_finish_is_kept_as_long_as_its_outcome_says() -> None:
    """A suspended run ends only after somebody resumed it, seen or not."""
    memory = Memory(state="suspended", incarnation="1", stopped=STOPPED)
    ended = {"state": State.ENDED, "ended": BEGIN - HOUR, "outcome": Outcome.FAILED}
    line = Noticed(at=BEGIN, ref=REF, incarnation="1", **ended)
    after = remember(memory, line) or EMPTY
    assert after.stopped is None
    assert decide(View(suspended("1", **ended), memory=after), BOOK, BEGIN).action is Action.KEEP


def test_what_was_restored_was_not_stopped_by_us_any_more() -> None:
    memory = Memory(state="suspended", incarnation="1", stopped=STOPPED)
    assert remember(memory, Restored(at=BEGIN, ref=REF, evidence="", result="restored")).stopped is None
    kept = remember(memory, Restored(at=BEGIN, ref=REF, evidence="", result="it is not stopped"))
    assert kept is not None
    assert kept.stopped == STOPPED


# Too little


@virtual
async def test_a_hint_does_not_use_up_the_moment_of_a_schedule(b: Harness) -> None:
    """Something changes all the time in a cluster. A look at one thing at 02:00 must not cost everything its night."""
    thing, other = b.ended("eval"), b.running("train")
    b.platform = Exact(b.world, HERE)
    b.platform.named = tuple((30.0, other.ref) for _ in range(60))
    moment = (b.now() + 22 * MINUTE).astimezone()
    b.set_policy(schedule=Schedule(at=f"{moment.minute} {moment.hour} * * *"))
    await serve(b, 27 * MINUTE)
    assert b.world.find(thing.ref) is None


def test_what_is_evicted_and_still_ending_is_followed_and_not_called_still_running() -> None:
    """Most pods need more than a second to end: the stop came about, and its GPUs are back a little later."""
    going = suspended("1", State.REMOVING)
    result, words = as_found(Action.STOP, "1", going)
    assert (result, "followed" in words) == (Result.UNKNOWN, True)
    running = msgspec.structs.replace(going, state=State.RUNNING)
    assert as_found(Action.STOP, "1", running)[0] is Result.STILL_THERE


def test_a_set_whose_children_go_with_it_is_not_trimmed_without_effect_for_ever() -> None:
    """It has no gentler lever, so a step that is refused again and again would keep it."""
    policy = msgspec.structs.replace(BOOK.policy, at_finish=AtFinish.RUNNING)
    over = {"ended": BEGIN - 40 * DAY, "outcome": Outcome.STOPPED, "live_children": 2, "children_go_with_it": True}
    decision = decide(View(suspended("1", State.ENDED, **over)), Rulebook(policy), BEGIN)
    assert (decision.action, decision.then) == (Action.WARN, Action.REMOVE)
    unsure = over | {"live_children": Unknown("not listed")}
    assert decide(View(suspended("1", State.ENDED, **unsure)), Rulebook(policy), BEGIN).action is Action.KEEP

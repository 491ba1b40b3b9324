"""What happens in the windows between two awaits, after a crash, and when something goes wrong again and again."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.engine import requests
from gpukeeper.engine.loop import MISSING_FOR
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.model.decision import Action, Refused, Result
from gpukeeper.model.event import Closed, Intended, WarningSent
from gpukeeper.model.policy import Amount, AtFinish, Breaker, Budget, Mode, Retention
from gpukeeper.model.subject import Outcome, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import Thing
from tests.unit.engine.harness import DAY, HOUR, MINUTE, Harness, virtual


def open_intent(b: Harness, thing: Thing, action: Action, rule: str) -> Intended:
    return Intended(
        at=b.now(),
        ref=thing.ref,
        owner="ann",
        step="9.1",
        pass_id=9,
        action=action,
        rule=rule,
        reason="because",
        incarnation=thing.incarnation,
        running=action is Action.STOP,
    )


def holding(workload: str, span: timedelta, **more: Any) -> requests.Request:
    return requests.Request(verb="hold", workload=workload, seconds=span.total_seconds(), **more)


@virtual
async def test_the_owners_own_stop_after_a_crash_is_not_taken_for_ours(b: Harness) -> None:
    """Killed between intent and act; the owner stops it hours later. It must not go as "stopped because idle"."""
    thing = b.running("notebook", 3 * HOUR)
    await reclaim(b.keeper, b.platform, b.book, act=False)
    await b.ledger.append([open_intent(b, thing, Action.STOP, "idle")])
    await asyncio.sleep(2 * 3600)
    thing.end(b.now(), Outcome.STOPPED)
    await asyncio.sleep(60)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is thing


@virtual
async def test_a_hold_granted_while_signals_are_read_counts(b: Harness) -> None:
    thing = await b.overdue("train")
    await asyncio.sleep(900)
    read = b.signals.series

    async def slow(*given: Any) -> Any:
        b.signals.series = read  # type: ignore[method-assign]
        await requests.hold(b.keeper, b.book, "root", holding("train", HOUR, suspends=("*",)))
        return await read(*given)

    b.signals.series = slow  # type: ignore[method-assign]
    await reclaim(b.keeper, b.platform, b.book)
    assert thing.state is State.RUNNING


@virtual
async def test_a_hold_of_an_unknown_rule_is_refused(b: Harness) -> None:
    b.ended("old")
    wrong = requests.Request(verb="hold", workload="old", suspends=("retenton",))
    reply = await requests.fulfil(b.keeper, b.book, "root", wrong)
    assert not reply.done
    assert reply.words == 'there is no rule "retenton" to suspend. Did you mean "retention"?'


@virtual
async def test_what_is_refused_again_and_again_does_not_keep_the_rest_waiting(b: Harness) -> None:
    b.set_policy(budget=Budget(per_pass=Amount(count=2), per_hour=Amount(count=100)))
    for name in ("stuck-1", "stuck-2"):
        b.ended(name, ago=5 * HOUR)
    fine = b.ended("fine", ago=2 * HOUR)
    act = b.platform.act

    async def refusing(step: Any, fresh: Any) -> Any:
        return Refused("missing right") if fresh.ref.name.startswith("stuck") else await act(step, fresh)

    b.platform.act = refusing  # type: ignore[method-assign]
    for _ in range(3):
        await reclaim(b.keeper, b.platform, b.book)
        await asyncio.sleep(300)
    assert b.world.find(fine.ref) is None
    assert sum(line.result is Result.REFUSED for line in b.lines(Closed)) == 2


@virtual
async def test_children_of_a_later_run_are_warned_about_again(b: Harness) -> None:
    b.set_policy(at_finish=AtFinish.NONE)
    thing = b.ended("train", children=2)
    await reclaim(b.keeper, b.platform, b.book)
    assert len(b.lines(WarningSent)) == 1
    thing.start(b.now(), timedelta())
    thing.class_ = "api"
    await asyncio.sleep(20 * 86400)
    thing.end(b.now(), Outcome.SUCCEEDED)
    await asyncio.sleep(2 * 3600)
    await reclaim(b.keeper, b.platform, b.book)
    assert len(b.lines(WarningSent)) == 2
    assert b.world.find(thing.ref) is thing


@virtual
async def test_after_a_long_hold_people_are_warned_again(b: Harness) -> None:
    thing = await b.overdue("train")
    await requests.hold(b.keeper, b.book, "root", holding("train", 7 * DAY, suspends=("max_runtime", "idle")))
    await asyncio.sleep(7 * 86400 + 1)
    thing.busy_until = b.now() + DAY
    await reclaim(b.keeper, b.platform, b.book)
    assert thing.state is State.RUNNING


@virtual
async def test_a_pause_during_the_capture_stops_the_removal(b: Harness) -> None:
    thing = b.ended("old")
    capture = b.platform.capture

    async def slow(*given: Any) -> Any:
        taken = await capture(*given)
        await requests.pause(b.keeper, b.book, "root", "now")
        return taken

    b.platform.capture = slow  # type: ignore[method-assign]
    report = await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is thing
    assert [line.result for line in report.outcomes] == [Result.DEFERRED]
    assert b.lines(Intended) == []


@virtual
async def test_children_that_would_be_ended_count_for_the_breaker(b: Harness) -> None:
    for number in range(10):
        b.ended(f"train-{number}", ago=20 * MINUTE, children=3)
    b.set_policy(breaker=Breaker(running=0.2), retention=Retention(succeeded=DAY), at_finish=AtFinish.RUNNING)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert report.plan.breaker is not None
    assert report.outcomes == []


@virtual
async def test_a_daemon_does_not_believe_at_once_that_most_things_vanished(b: Harness) -> None:
    things = [b.ended(f"eval-{number}", ago=MINUTE) for number in range(10)]
    await reclaim(b.keeper, b.platform, b.book)
    for thing in things[:8]:
        b.world.remove(thing)
    b.keeper.absences.patience = MISSING_FOR
    await asyncio.sleep(600)
    assert (await reclaim(b.keeper, b.platform, b.book)).plan.breaker is not None
    await asyncio.sleep(5)
    assert (await reclaim(b.keeper, b.platform, b.book)).plan.breaker is not None
    await asyncio.sleep(MISSING_FOR.total_seconds())
    await reclaim(b.keeper, b.platform, b.book)
    assert (await reclaim(b.keeper, b.platform, b.book)).plan.breaker is None


@virtual
async def test_an_endless_hold_is_refused_in_words(b: Harness) -> None:
    b.running("notebook")
    for seconds in (1e300, 1e13):
        asked = requests.Request(verb="hold", workload="notebook", seconds=seconds)
        assert not (await requests.fulfil(b.keeper, b.book, "root", asked)).done


@virtual
async def test_a_request_waits_for_what_is_not_settled(b: Harness) -> None:
    thing = b.ended("old", ago=MINUTE)
    await b.ledger.append([open_intent(b, thing, Action.REMOVE, "retention")])
    read = b.platform.read

    async def blind(ref: Any) -> Any:
        b.platform.read = read  # type: ignore[method-assign]
        return Unknown("busy")

    b.platform.read = blind  # type: ignore[method-assign]
    reply = await requests.fulfil(b.keeper, b.book, "ann", requests.Request(verb="remove", workload="old"))
    assert "is still open" in reply.words
    assert b.world.find(thing.ref) is thing


@virtual
async def test_another_users_hold_stands_against_a_request(b: Harness) -> None:
    thing = b.ended("old")
    await requests.hold(b.keeper, b.book, "ann", holding("old", HOUR, reason="mine"))
    reply = await requests.fulfil(b.keeper, b.book, "root", requests.Request(verb="remove", workload="old"))
    assert "is held by ann (mine); release it first" in reply.words
    assert b.world.find(thing.ref) is thing


@virtual
async def test_in_mode_plan_a_request_needs_a_person(b: Harness) -> None:
    """Who is shown exactly what would be done; the yes counts once."""
    thing = b.ended("old")
    b.set_policy(mode=Mode.PLAN)
    asked = requests.Request(verb="remove", workload="old")
    shown = await requests.fulfil(b.keeper, b.book, "ann", asked)
    assert (shown.done, b.world.find(thing.ref)) == (False, thing)
    assert shown.words.startswith(f"remove docker/node-3/old ({thing.ref.uid}; owner ann")
    yes = msgspec.structs.replace(asked, token=shown.token)
    assert (await requests.fulfil(b.keeper, b.book, "ann", yes)).done
    assert b.world.find(thing.ref) is None

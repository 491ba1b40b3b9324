"""What a look afterwards says, and what becomes of intents that an interruption left open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.verify import as_found, settle
from gpukeeper.model.decision import Action, Evidence, Guard, Result
from gpukeeper.model.event import Captured, Closed, Intended
from gpukeeper.model.subject import Blocked, Gone, Outcome, Ref, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import CALM, Faults, Thing
from tests.unit.engine.harness import HERE, Harness, virtual
from tests.unit.lifecycle.examples import EVAL, NOW, ended, subject

LOST = Unknown("the platform did not answer")
STUCK = Blocked("somebody/cleanup", NOW, True, "nobody takes it off")


@pytest.mark.parametrize(
    ("action", "found", "result"),
    [
        (Action.REMOVE, Gone(EVAL, NOW), Result.RECLAIMED),
        (Action.STOP, Gone(EVAL, NOW), Result.RECLAIMED),
        (Action.TRIM, Gone(EVAL, NOW), Result.RECLAIMED),
        (Action.REMOVE, LOST, Result.UNKNOWN),
        (Action.REMOVE, ended(), Result.STILL_THERE),
        (Action.REMOVE, ended(state=State.REMOVING), Result.UNKNOWN),
        (Action.REMOVE, ended(state=State.REMOVING, blocked=STUCK), Result.STILL_THERE),
        (Action.RELEASE, Gone(EVAL, NOW), Result.RECLAIMED),
        (Action.RELEASE, ended(state=State.REMOVING, blocked=STUCK), Result.STILL_THERE),
        (Action.STOP, ended(), Result.RECLAIMED),
        (Action.STOP, subject(state=State.SUSPENDED), Result.RECLAIMED),
        (Action.STOP, subject(), Result.STILL_THERE),
        (Action.STOP, ended(incarnation="run-2"), Result.STILL_THERE),
        (Action.TRIM, ended(live_children=0), Result.RECLAIMED),
        (Action.TRIM, ended(live_children=1), Result.STILL_THERE),
        (Action.STOP, subject(state=LOST), Result.UNKNOWN),
        (Action.TRIM, ended(live_children=LOST), Result.UNKNOWN),
    ],
)
def test_reclaimed_is_only_what_was_seen_to_be_so(action: Action, found: Any, result: Result) -> None:
    assert as_found(action, "run-1", found)[0] is result


def test_a_removal_in_progress_is_reported() -> None:
    words = as_found(Action.REMOVE, "run-1", ended(state=State.REMOVING))[1]
    assert words == "its removal is in progress; it is followed until it ends"
    words = as_found(Action.REMOVE, "run-1", ended(state=State.REMOVING, blocked=STUCK))[1]
    assert words == "its removal is blocked by somebody/cleanup: nobody takes it off"


@pytest.mark.parametrize(("dead", "result"), [(0, Result.RECLAIMED), (2, Result.STILL_THERE), (LOST, Result.UNKNOWN)])
def test_trimming_what_ended_is_over_when_that_is_gone(dead: Any, result: Result) -> None:
    assert as_found(Action.TRIM, "run-1", ended(dead_children=dead), running=False)[0] is result


def intent(b: Harness, thing: Thing, action: Action = Action.STOP) -> Intended:
    return Intended(
        at=b.now(),
        ref=thing.ref,
        owner="ann",
        step="7.1",
        pass_id=7,
        action=action,
        rule="idle",
        reason="idle for 31m",
        incarnation=thing.incarnation,
    )


@virtual
async def test_an_open_intent_is_closed_as_found_and_never_replayed(b: Harness) -> None:
    thing = b.running("train")
    await b.ledger.append([intent(b, thing)])
    lines = await settle(b.keeper, b.platform)
    assert [(one.result, one.step) for one in lines] == [(Result.STILL_THERE, "7.1")]
    assert lines[0].reason == "idle for 31m; it is still running in a later pass"
    assert thing.state is State.RUNNING
    assert not [entry for entry in b.world.log if entry.kind == "act"]
    assert await b.ledger.open_intents("docker", "node-3") == []


@virtual
async def test_what_an_interrupted_stop_changed_on_the_way_is_taken_back(b: Harness) -> None:
    taken_back: list[tuple[str, Evidence]] = []

    class Careful(SimulatedPlatform):
        async def revert_stop(self, ref: Ref, evidence: Evidence) -> None:
            taken_back.append((ref.name, evidence))

    b.platform = Careful(b.world, HERE)
    running, ended = b.running("train"), b.running("eval")
    before = Evidence({"manifest.json": b"as it was"})
    for number, thing in enumerate((running, ended), start=7):
        name = await b.evidence.save(thing.ref, f"{number}.1", b.now(), before)
        step = msgspec.structs.replace(intent(b, thing), step=f"{number}.1")
        await b.ledger.append([Captured(at=b.now(), ref=thing.ref, step=f"{number}.1", evidence=str(name)), step])
    ended.end(b.now(), Outcome.STOPPED)
    await settle(b.keeper, b.platform)
    assert taken_back == [("train", before)]


@virtual
async def test_what_was_done_before_the_interruption_is_recorded(b: Harness) -> None:
    stopped, removed = b.running("train"), b.ended("eval")
    await b.ledger.append([intent(b, stopped)])
    stopped.end(b.now(), Outcome.STOPPED)
    assert [one.result for one in await settle(b.keeper, b.platform)] == [Result.RECLAIMED]
    await b.ledger.append([intent(b, removed, Action.REMOVE)])
    b.world.remove(removed, by="gpukeeper")
    line = (await settle(b.keeper, b.platform))[0]
    assert (line.result, line.rule) == (Result.RECLAIMED, "idle")
    assert isinstance(line.gpus_back, Unknown)


@virtual
async def test_what_cannot_be_read_stays_open_and_is_not_touched(b: Harness) -> None:
    thing = b.ended("eval")
    await b.ledger.append([intent(b, thing, Action.REMOVE)])
    b.world.faults = Faults(blind=1)
    assert await settle(b.keeper, b.platform) == []
    b.world.faults = CALM
    kept = (await b.decide())["eval"]
    assert kept.action is Action.KEEP
    assert "still open" in kept.reason
    assert b.lines(Closed) == []


def test_an_irreversible_verb_without_an_atomic_condition_is_a_bug() -> None:
    class Careless(SimulatedPlatform):
        guards = {Action.REMOVE: Guard.LOOKED}  # noqa: RUF012

    world: Any = None
    with pytest.raises(AssertionError, match="bug in gpukeeper: docker offers remove without"):
        Keeper((Careless(world, HERE),), *[world] * 4, clock=world)

"""Verify: read again until the result is confirmed. The outcome comes from here, never from the command's response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.model.decision import Action, Result, Step
from gpukeeper.model.event import Captured, Closed, Event, Intended
from gpukeeper.model.subject import OVER, Gone, State, Subject
from gpukeeper.model.unknown import Unknown

READS_AFTER = (0.0, 0.2, 1.0, 5.0, 30.0)  # seconds; then once more after the step's grace
FOLLOWED_AFTER, BLIND_AFTER = 1.0, 5.0  # seconds
_ENDS_IT = (Action.REMOVE, Action.RELEASE)


async def verify(platform: Platform, step: Step) -> tuple[Result, str]:
    decision = step.decision
    result, words = Result.UNKNOWN, "it could not be read afterwards"
    for seconds in (*READS_AFTER, decision.grace.total_seconds()):
        if seconds:
            await asyncio.sleep(seconds)
        found = await platform.read(decision.seen.ref)
        result, words = as_found(decision.action, decision.seen.incarnation, found, running=decision.running)
        anew = isinstance(found, Subject) and found.seen.incarnation != decision.seen.incarnation
        if result is Result.RECLAIMED or anew:
            break  # nothing will change that any more
        if seconds >= FOLLOWED_AFTER and isinstance(found, Subject) and found.state is State.REMOVING:
            break  # it takes its time; later passes follow it, and no step waits for it
        if seconds >= BLIND_AFTER and isinstance(found, Unknown) and decision.action in _ENDS_IT:
            break  # the same, while it cannot be read
    return result, words


def as_found(
    action: Action, incarnation: str, found: Subject | Gone | Unknown, *, running: bool = True
) -> tuple[Result, str]:
    """The result of an action on that incarnation, by a read afterwards. `running`: it or its children ran before."""
    if isinstance(found, Unknown):
        return Result.UNKNOWN, f"it could not be read afterwards ({found.why})"
    if isinstance(found, Gone):
        return Result.RECLAIMED, "verified: gone"
    if action in _ENDS_IT or (action is Action.STOP and found.state is State.REMOVING):  # what is evicted goes, too
        if found.state is not State.REMOVING:
            return Result.STILL_THERE, "it still exists"
        if found.blocked is None:
            return Result.UNKNOWN, "its removal is in progress; it is followed until it ends"
        return Result.STILL_THERE, f"its removal is blocked by {found.blocked.by}: {found.blocked.why}"
    if found.seen.incarnation != incarnation:
        return Result.STILL_THERE, "it was restarted"
    if action is Action.TRIM:
        left = found.live_children if running else found.dead_children
        if isinstance(left, Unknown):
            return Result.UNKNOWN, f"whether its children still exist is unknown ({left.why})"
        if left == 0:
            return Result.RECLAIMED, "its children are gone"
        return Result.STILL_THERE, "its children still exist"
    if isinstance(found.state, Unknown):
        return Result.UNKNOWN, f"its state is unknown afterwards ({found.state.why})"
    if found.state in OVER:
        return Result.RECLAIMED, "verified: stopped"
    return Result.STILL_THERE, "it is still running"


async def settle(keeper: Keeper, platform: Platform) -> list[Closed]:
    """After an interruption: read the object of every open intent first and close it as found. Nothing is replayed."""
    settled = []
    intents = await keeper.ledger.open_intents(platform.name, platform.place)
    keeper.followed.keep_only(key_of(platform), {intent.step for intent in intents})
    for intent in intents:
        assert intent.ref is not None
        found = await platform.read(intent.ref)
        result, words = as_found(intent.action, intent.incarnation, found, running=intent.running)
        if result is Result.UNKNOWN:
            continue  # stays open; nothing is done to it before it could be read
        if intent.action is Action.STOP and result is Result.STILL_THERE:
            await _revert_stop(keeper, platform, intent)
        line = _as_found_line(intent, result, f"{words} in a later pass", keeper)
        await keeper.ledger.append([line])
        settled.append(line)
    return settled


async def _revert_stop(keeper: Keeper, platform: Platform, intent: Intended) -> None:
    assert intent.ref is not None
    name = evidence_of(await keeper.ledger.about(intent.ref.uid), intent.step)
    evidence = await keeper.evidence.load(name) if name else None
    if evidence is not None and not isinstance(evidence, Unknown):
        await platform.revert_stop(intent.ref, evidence)


def evidence_of(lines: Sequence[Event], step: str) -> str:
    """Where the evidence of a step is; empty when there is none."""
    return next((one.evidence for one in lines if isinstance(one, Captured) and one.step == step), "")


def gpu_hours(gpus: int | Unknown, since: datetime | None, now: datetime) -> float | Unknown:
    """GPUs times the hours they were held from the beginning of the condition until it was seen to be over."""
    if isinstance(gpus, Unknown) or gpus == 0 or since is None:
        return gpus if isinstance(gpus, Unknown) else 0.0
    return gpus * max((now - since).total_seconds(), 0.0) / 3600


def _as_found_line(intent: Intended, result: Result, words: str, keeper: Keeper) -> Closed:
    """What the platform took from us in this very process, and what then needed its time, came back by us. After an
    interruption it is unknown: the command may never have been sent, so the lenient assumption is that others did
    it."""
    now, later = keeper.clock.now(), Unknown("settled in a later pass")
    ours = keeper.followed.take(intent.step)
    gpus, size = (ours.gpus, ours.size) if ours is not None and result is Result.RECLAIMED else (later, later)
    return Closed(
        at=now,
        ref=intent.ref,
        owner=intent.owner,
        by="somebody" if ours is None else "gpukeeper",
        step=intent.step,
        action=intent.action,
        rule=intent.rule,
        result=result,
        reason=f"{intent.reason}; {words}",
        incarnation=intent.incarnation,
        gpus_back=gpus,
        gpu_hours=gpu_hours(gpus, intent.since, now),
        bytes_back=size,
        owner_verified=intent.owner_verified,
        requested_by=intent.requested_by,
        via=intent.via,
    )

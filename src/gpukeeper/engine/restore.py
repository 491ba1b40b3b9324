"""Bring back what gpukeeper stopped or removed, from its evidence, and describe what came back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.verify import evidence_of
from gpukeeper.engine.view import find, read_subject
from gpukeeper.lifecycle.decide import NOT_HELD, decide
from gpukeeper.lifecycle.forecast import ahead, coming_in_words, next_steps
from gpukeeper.lifecycle.holds import granted_by_restore, is_admin, whom_to_ask
from gpukeeper.lifecycle.rules import max_runtime
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Evidence, Refused, Result
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import Closed, Event, Held, Restored
from gpukeeper.model.subject import EMPTY, Ref, State
from gpukeeper.model.unknown import Unknown


async def restore(keeper: Keeper, book: Rulebook, words: str, who: str) -> tuple[Ref, Action]:
    """Bring back what gpukeeper last stopped or removed under this name; and which of the two it was."""
    lines = await keeper.ledger.about(words)
    done = _reclaimed(lines)
    if not done:
        return await _restore_by_its_note(keeper, book, words, who)
    last, ref = _last_reclaimed(done, words)
    _may_restore(book, who, last.owner, ref, verified=last.owner_verified)
    platform = keeper.platform_at(ref)
    if platform is None:
        raise UsageError(f"{ref.platform}/{ref.place} is not reachable from here; nothing was restored")
    name = evidence_of(lines, last.step)
    if last.action is not Action.REMOVE:
        await _grant(keeper, book, who, last, ref)  # before it runs: a pass may find it at once
    answer = await platform.restore(ref, await _evidence(keeper, lines, last, ref, name))
    words = "restored" if isinstance(answer, Accepted) else answer.why
    await keeper.ledger.append(
        [Restored(at=keeper.clock.now(), ref=ref, owner=last.owner, by=who, evidence=name, result=words)]
    )
    if isinstance(answer, Refused | Unknown):
        raise UsageError(f"{ref.path} was not restored: {words}")
    undone = last.action
    if answer.resumed is not None:  # what was stopped by an eviction was removed, too
        undone = Action.STOP if answer.resumed else Action.REMOVE
    if Action.REMOVE in (undone, last.action):
        with suppress(KeeperError):  # it cannot be read yet; the reply says so
            await _keep_for_now(keeper, book, who, last, ref)
    return ref, undone


async def _restore_by_its_note(keeper: Keeper, book: Rulebook, words: str, who: str) -> tuple[Ref, Action]:
    """Another instance stopped it, so that this ledger has no line; its platform noted the stop on the object."""
    nothing = f'gpukeeper reclaimed nothing named "{words}". See: gpukeeper ledger list --type outcome'
    try:
        found = await find(keeper, book, words, acting=True)
    except KeeperError:
        raise UsageError(nothing) from None
    subject, ref = found.view.subject, found.view.subject.ref
    if subject.state is not State.SUSPENDED or not subject.suspended_by_stop:
        raise UsageError(nothing)
    owner = subject.owner if isinstance(subject.owner, str) else None
    _may_restore(book, who, owner, ref, verified=subject.owner_verified)
    answer = await found.platform.restore(ref, None)
    result = "restored" if isinstance(answer, Accepted) else answer.why
    await keeper.ledger.append(
        [Restored(at=keeper.clock.now(), ref=ref, owner=owner, by=who, evidence="", result=result)]
    )
    if isinstance(answer, Refused | Unknown):
        raise UsageError(f"{ref.path} was not restored: {result}")
    return ref, Action.STOP


async def _grant(keeper: Keeper, book: Rulebook, who: str, last: Closed, ref: Ref) -> None:
    """Raises UsageError: it would be stopped again at once."""
    now, memory = keeper.clock.now(), (await keeper.ledger.memories([ref.key])).get(ref.key, EMPTY)
    granted = granted_by_restore(memory, book, who, last.action, now)
    if granted is not None:
        await keeper.ledger.append([Held(at=now, ref=ref, owner=last.owner, by=who, hold=granted)])
    elif last.rule == max_runtime.NAME:
        raise UsageError(
            f"{ref.path} was not restored: it is stopped at its maximum runtime, and a restore has granted more "
            f"within the last day. {whom_to_ask(book)}: {_more_time(ref)}"
        )


def _more_time(ref: Ref) -> str:
    return f"gpukeeper workload hold {ref.path} --for 4h --suspends {max_runtime.NAME}"


async def _keep_for_now(keeper: Keeper, book: Rulebook, who: str, last: Closed, ref: Ref) -> None:
    """What was recreated has another uid."""
    view = (await find(keeper, book, ref.path, acting=True)).view
    now, subject = keeper.clock.now(), view.subject
    granted = granted_by_restore(view.memory, book, who, Action.REMOVE, now)
    if granted is not None:
        hold = msgspec.structs.replace(granted, lasting=subject.lasting or "")
        await keeper.ledger.append([Held(at=now, ref=subject.ref, owner=last.owner, by=who, hold=hold)])


def _reclaimed(lines: Sequence[Event]) -> list[Closed]:
    """What gpukeeper stopped or removed."""
    return [
        one
        for one in lines
        if isinstance(one, Closed) and one.result is Result.RECLAIMED and one.action is not Action.TRIM and one.ref
    ]


def _last_reclaimed(done: Sequence[Closed], words: str) -> tuple[Closed, Ref]:
    """Raises UsageError if that is not one object."""
    things = {(one.ref.path, one.owner): one for one in done if one.ref is not None}  # the newest of each
    if len(things) > 1:
        listed = "\n  ".join(_newest_of(one) for one in things.values())
        raise UsageError(f'"{words}" matches {len(things)} objects; use more of the path, or the uid:\n  {listed}')
    last = done[-1]
    assert last.ref is not None
    return last, last.ref


def _newest_of(one: Closed) -> str:
    assert one.ref is not None
    return f"{one.ref.path} ({one.ref.uid}, {one.owner or 'owner unknown'}, {one.at:%Y-%m-%d %H:%M})"


def _may_restore(book: Rulebook, who: str, owner: str | None, ref: Ref, *, verified: bool) -> None:
    """Raises UsageError: an admin may, and an owner whose ownership was verified."""
    if is_admin(book, who):
        return
    if owner != who:
        whose = f"belongs to {owner}" if owner else "has no known owner"
        raise UsageError(f"{ref.path} {whose}; {who} may not restore it")
    if not verified:
        raise UsageError(
            f"that {who} owns {ref.path} was only claimed, or not recorded as verified; "
            f"nothing was restored. {whom_to_ask(book)}"
        )


async def _evidence(keeper: Keeper, lines: Sequence[Event], last: Closed, ref: Ref, name: str) -> Evidence | None:
    """None: nothing was captured."""
    evidence = await keeper.evidence.load(name) if name else None
    if isinstance(evidence, Unknown):
        raise UsageError(f"the evidence {name} cannot be read ({evidence.why}); nothing was restored")
    if evidence is not None and last.action is Action.REMOVE:
        return Evidence({**await _before_the_stop(keeper, lines, ref), **evidence.files})
    return evidence


async def _before_the_stop(keeper: Keeper, lines: Sequence[Event], ref: Ref) -> dict[str, bytes]:
    """What gpukeeper stopped before it removed it was still as its owner had made it when that stop was prepared."""
    stops = [one for one in lines if isinstance(one, Closed) and one.action is Action.STOP and one.ref == ref]
    name = evidence_of(lines, stops[-1].step) if stops else ""
    found = await keeper.evidence.load(name) if name else None
    return {} if found is None or isinstance(found, Unknown) else {f"stop/{k}": v for k, v in found.files.items()}


async def restored_in_words(keeper: Keeper, book: Rulebook, ref: Ref, undone: Action) -> str:
    stays, hold_it = await _stays(keeper, book, ref, undone)
    if undone is Action.REMOVE:
        made = "was restored from what was captured, without data written inside it"
        start = "If it does not run yet, start it soon; on a cluster run `gpukeeper restore` again"
        return f"{ref.path} {made}. {start}. {stays}. {hold_it}"
    return f"{ref.path} was restored and runs again. {stays}. {hold_it}"


async def _stays(keeper: Keeper, book: Rulebook, ref: Ref, undone: Action) -> tuple[str, str]:
    """In what state it came back, and what comes next by which rule; and how to keep it. What was recreated has another
    uid."""
    hold_it = f"Keep it: gpukeeper workload hold {ref.path}"
    try:
        found = await read_subject(keeper, book, ref) if undone is not Action.REMOVE else None
        found = found or await find(keeper, book, ref.path, acting=True)
    except KeeperError as problem:
        return f"It could not be read yet ({problem})", hold_it
    now, state = keeper.clock.now(), found.view.subject.state
    is_now = f"Its state is unknown ({state.why})" if isinstance(state, Unknown) else f"It is {state}"
    coming = ahead(found.view, book, now, found.platform.guards, opening(book.policy.schedule))
    if not coming:
        why = decide(found.view, book, now).reason
        return f"{is_now} now; no action is scheduled for it: {why}", hold_it
    ends = next((one for one in coming if one.action is not Action.WARN), coming[-1])
    if ends.rule in NOT_HELD:
        hold_it = f"A hold does not prevent {ends.rule}. {whom_to_ask(book)}: {_more_time(ref)}"
    return f"{is_now} now. What comes next: {coming_in_words(next_steps(coming, now), now)} ({ends.rule})", hold_it

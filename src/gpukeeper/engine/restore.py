"""Bring back what gpukeeper stopped or removed, from its evidence, and describe what came back."""

from __future__ import annotations

from collections.abc import Sequence

from gpukeeper.engine.find import find, read_subject
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.verify import evidence_of
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.forecast import ahead
from gpukeeper.lifecycle.holds import is_admin, whom_to_ask
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Evidence, Refused, Result
from gpukeeper.model.durations import due_in_words
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import Closed, Event, Restored
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown


async def restore(keeper: Keeper, book: Rulebook, words: str, who: str) -> tuple[Ref, Action]:
    """Bring back what gpukeeper last stopped or removed under this name; and which of the two it was."""
    lines = await keeper.ledger.about(words)
    last, ref = _last_reclaimed(lines, words)
    _may_restore(book, who, last, ref)
    platform = keeper.platform_at(ref)
    if platform is None:
        raise UsageError(f"{ref.platform}/{ref.place} is not reachable from here; nothing was restored")
    name = evidence_of(lines, last.step)
    answer = await platform.restore(ref, await _evidence(keeper, lines, last, ref, name))
    words = "restored" if isinstance(answer, Accepted) else answer.why
    await keeper.ledger.append(
        [Restored(at=keeper.clock.now(), ref=ref, owner=last.owner, by=who, evidence=name, result=words)]
    )
    if isinstance(answer, Refused | Unknown):
        raise UsageError(f"{ref.path} was not restored: {words}")
    return ref, Action.STOP if isinstance(answer, Accepted) and answer.resumed else last.action


def _last_reclaimed(lines: Sequence[Event], words: str) -> tuple[Closed, Ref]:
    """What gpukeeper last stopped or removed under this name. Raises UsageError if that is not one object."""
    done = [
        one
        for one in lines
        if isinstance(one, Closed) and one.result is Result.RECLAIMED and one.action is not Action.TRIM
    ]
    things = {(one.ref.path, one.owner): one for one in done if one.ref is not None}  # the newest of each
    if len(things) > 1:
        listed = "\n  ".join(_newest_of(one) for one in things.values())
        raise UsageError(f'"{words}" matches {len(things)} objects; use more of the path, or the uid:\n  {listed}')
    if not done or done[-1].ref is None:
        raise UsageError(f'gpukeeper reclaimed nothing named "{words}". See: gpukeeper ledger list --type outcome')
    return done[-1], done[-1].ref


def _newest_of(one: Closed) -> str:
    assert one.ref is not None
    return f"{one.ref.path} ({one.ref.uid}, {one.owner or 'owner unknown'}, {one.at:%Y-%m-%d %H:%M})"


def _may_restore(book: Rulebook, who: str, last: Closed, ref: Ref) -> None:
    """Raises UsageError: an admin may, and an owner whose ownership was verified."""
    if is_admin(book, who):
        return
    if last.owner != who:
        whose = f"belongs to {last.owner}" if last.owner else "has no known owner"
        raise UsageError(f"{ref.path} {whose}; {who} may not restore it")
    if not last.owner_verified:
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
    hold_it = f"Keep it: gpukeeper workload hold {ref.path}"
    stays = await _stays(keeper, book, ref, undone)
    if undone is Action.REMOVE:
        made = "was restored from what was captured, without data written inside it"
        start = "If it does not run yet, start it soon; on a cluster run `gpukeeper restore` again"
        return f"{ref.path} {made}. {start}. {stays}. {hold_it}"
    return f"{ref.path} was restored and runs again. {stays}. {hold_it}"


async def _stays(keeper: Keeper, book: Rulebook, ref: Ref, undone: Action) -> str:
    """In what state it came back, and what comes next by which rule. What was recreated has another uid."""
    try:
        found = await read_subject(keeper, book, ref) if undone is not Action.REMOVE else None
        found = found or await find(keeper, book, ref.path, acting=True)
    except KeeperError as problem:
        return f"It could not be read yet ({problem})"
    now, state = keeper.clock.now(), found.view.subject.state
    is_now = f"Its state is unknown ({state.why})" if isinstance(state, Unknown) else f"It is {state}"
    coming = ahead(found.view, book, now, found.platform.guards, opening(book.policy.schedule))
    if not coming:
        why = decide(found.view, book, now).reason
        return f"{is_now} now; no action is scheduled for it: {why}"
    steps = [f"{one.action} by {one.rule} {due_in_words(one.at, now)}" for one in (coming[0], coming[-1])]
    return f"{is_now} now. If nothing changes: {', then '.join(dict.fromkeys(steps))}"

"""Who may hold what, and for how long. Pure; shared by the daemon and the command line."""

from __future__ import annotations

from datetime import datetime, timedelta
from difflib import get_close_matches

import msgspec

from gpukeeper.lifecycle.decide import RULES
from gpukeeper.lifecycle.rules import (
    build_cache,
    leftover_tree,
    max_runtime,
    never_started,
    own_ttl,
    retention,
    temporary_tree,
    unused_image,
    unused_network,
    unused_volume,
)
from gpukeeper.lifecycle.rules.hold import left_to_hold, mark_until
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.subject import RESTORE, Hold, Memory
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NEVER = 9000  # a year that means no end
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
REMOVALS = (
    never_started.NAME,
    own_ttl.NAME,
    retention.NAME,
    leftover_tree.NAME,
    temporary_tree.NAME,
    unused_image.NAME,
    build_cache.NAME,
    unused_volume.NAME,
    unused_network.NAME,
)
SUSPENDABLE = frozenset({rule.name for rule in RULES if rule.acts} | {"*"})


class NotAllowed(msgspec.Struct, frozen=True):
    why: str


def is_admin(book: Rulebook, who: str) -> bool:
    return who in book.policy.admins


def whom_to_ask(book: Rulebook) -> str:
    return f"Ask an admin: {', '.join(book.policy.admins)}"


def may_act(view: View, book: Rulebook, who: str) -> NotAllowed | None:
    """To stop or remove it: the verified owner, or an admin. A claim is not enough: a label that every user can
    write, also into an image that others use, must not give power over the work of others."""
    refused = may_touch(view, book, who)
    if refused is not None or is_admin(book, who) or view.subject.owner_verified:
        return refused
    why = f" ({'; '.join(view.subject.evidence[:2])})" if view.subject.evidence else ""
    return NotAllowed(
        f"that {who} owns {view.subject.ref.path} is only claimed{why}. A claimed owner may hold it, but not stop "
        f"or remove it; nothing was done. {whom_to_ask(book)}"
    )


def may_touch(view: View, book: Rulebook, who: str) -> NotAllowed | None:
    """To hold or release: one's own workloads, claimed ones included, or any for an admin."""
    owner = view.subject.owner
    if is_admin(book, who) or owner == who:
        return None
    whose = f"belongs to {owner}" if isinstance(owner, str) else "has no known owner"
    return NotAllowed(f"{view.subject.ref.path} {whose}; {who} may not change it. Ask its owner or an admin.")


def may_hold(
    view: View,
    book: Rulebook,
    who: str,
    requested: timedelta | None,
    now: datetime,
    *,
    reason: str = "",
    suspends: tuple[str, ...] = (),
) -> Hold | NotAllowed:
    """The hold that is granted, or why not. A user's holds are limited each, and together within a rolling time."""
    refused = may_touch(view, book, who)
    if refused is not None:
        return refused
    if view.subject.root is not None:
        return NotAllowed(f"{view.subject.ref.path} is part of {view.subject.root}, and only the root can be held")
    limits = book.settings(view.subject).limits
    longest = limits.hold if not isinstance(limits, Unknown) else timedelta(days=1)
    span = requested if requested is not None else longest
    if span <= timedelta():
        return NotAllowed("a hold needs a length such as 2h or 1d")
    unknown = next((name for name in suspends if name not in SUSPENDABLE), None)
    if unknown is not None:
        near = get_close_matches(unknown, SUSPENDABLE, 1)
        hint = f'Did you mean "{near[0]}"?' if near else f"Rules: {', '.join(sorted(SUSPENDABLE))}"
        return NotAllowed(f'there is no rule "{unknown}" to suspend. {hint}')
    if is_admin(book, who):
        return Hold(who, now, now + span, reason, admin=True, suspends=suspends)
    if suspends:
        return NotAllowed("only an admin may choose what a hold suspends")
    if span > longest:
        return NotAllowed(f"a hold may last {in_words(longest)} at most; {in_words(span)} was requested")
    left = left_to_hold(view, book.policy, now)
    if isinstance(left, str):
        return NotAllowed(left)
    devices = view.subject.devices if isinstance(view.subject.devices, tuple) else ()
    return Hold(who, now, now + min(span, left), reason, devices=devices)


def granted_by_restore(memory: Memory, book: Rulebook, who: str, undone: Action, now: datetime) -> Hold | None:
    """The hold that comes with a restore, so that what came back is not taken again at once: from what was stopped its
    maximum runtime, from what was removed every removal. None: one was granted within the last day; else restoring it
    again and again would make work immortal."""
    recent = any(one.by == RESTORE and one.at > now - DAY for one in memory.holds)
    if recent and not is_admin(book, who):
        return None
    removed = undone is Action.REMOVE
    span = DAY if removed else max(HOUR, book.policy.warnings.lead)
    suspends = REMOVALS if removed else (max_runtime.NAME,)
    return Hold(RESTORE, now, now + span, f"restored by {who}", admin=True, suspends=suspends)


class ReleasedHolds(msgspec.Struct, frozen=True):
    words: tuple[str, ...] = ()  # what a release ends
    mark: str = ""  # why the workload's own mark, which it ends too, could not be read


def release_of(
    view: View, book: Rulebook, who: str, now: datetime, *, own: bool = False
) -> tuple[ReleasedHolds, tuple[str, ...]]:
    """What a release by `who` ends now, and sentences about what still holds afterwards. `own`: only their own."""
    active = [one for one in view.memory.holds if one.until > now]
    theirs = [one for one in active if one.by in (who, RESTORE) or not (one.admin or own)]
    ended = [f"the hold of {one.by}" for one in theirs]
    left = [f"by {one.by} until {_time(one.until)}; {one.by} can release it" for one in active if one not in theirs]
    mark, until = view.subject.marks.hold_until, mark_until(view, book.settings(view.subject))
    if until is None or until <= now:
        return ReleasedHolds(tuple(dict.fromkeys(ended))), tuple(left)
    if isinstance(mark, Unknown) and is_admin(book, who):
        ended.append("its own mark, which cannot be read")
        return ReleasedHolds(tuple(dict.fromkeys(ended)), mark.why), tuple(left)
    how = view.subject.marks.unhold or "remove or fix the mark on the workload"
    what = f"by its own mark, which cannot be read ({mark.why})" if isinstance(mark, Unknown) else "by its own mark"
    admins = ", or ask an admin to release it" if isinstance(mark, Unknown) else ""
    left.append(f"{what} until {_time(until)}; to end it: {how}{admins}")
    return ReleasedHolds(tuple(dict.fromkeys(ended))), tuple(left)


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC" if at.year < NEVER else "it is removed"

"""A user or admin holds it: by `workload hold`, or by a mark on the workload. Always with a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial

from gpukeeper.lifecycle.rule import Evaluator, Rule, not_holdable
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import EVERY_RULE, Answer, Verdict, View
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import KEEP_ALIVE, Hold, Shape
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.model.words import in_words

NAME = "hold"

YEAR = timedelta(days=365)
NAMED_MAX = 2  # rules
_NONE = Answer(NAME, Verdict.SILENT, "it is not held")


def evaluator(rules: Sequence[Rule]) -> Evaluator:
    return partial(evaluate, not_held=not_holdable(rules))


def evaluate(view: View, settings: Settings, now: datetime, not_held: frozenset[str] = frozenset()) -> Answer:
    """`not_held`: rules that a hold suspends only when an admin's names them."""
    mark = view.subject.marks.hold_until
    if mark is None and not view.memory.holds:
        return _NONE
    # A keep-alive lease has a rule of its own, which warns before its end.
    held = [hold for hold in view.memory.holds if hold.by != KEEP_ALIVE and end_of(hold, settings) > now]
    until = mark_until(view, settings)
    own = [Hold("its own mark", now, until, view.subject.marks.hold_by)] if until is not None and until > now else []
    suspends, spares = _suspended([*held, *own], not_held)
    complaint = None
    if isinstance(mark, Unknown) and own:
        # It counts, but it neither hides nor shortens a hold that can be read.
        complaint = f"its hold mark cannot be read ({mark.why}); {_kept_until(own[0].until, now)}"
        if not held:
            return Answer(NAME, Verdict.UNKNOWN, complaint, suspends=suspends, spares=spares, complaint=complaint)
    else:
        held += own
    if not held:
        return _NONE
    longest = max(held, key=precedence)
    left = end_of(longest, settings) - now
    reason = f"held by {longest.by} " + (f"for {in_words(left)} more" if left < YEAR else "until it is released")
    reason += f" (suspends {only_in_words(only_of(longest))} only)" if only_of(longest) else ""
    reason += f": {longest.reason}" if longest.reason else ""
    return Answer(NAME, Verdict.PROTECT, reason, suspends=suspends, spares=spares, complaint=complaint)


RULE = Rule(
    name=NAME,
    summary="A user's hold suspends idle and every removal, never max runtime; an admin's hold names what it suspends.",
    shapes=tuple(Shape),
    acts=False,
    while_removed=True,
    evaluate=evaluate,
    evaluator=evaluator,
)


def only_of(hold: Hold) -> tuple[str, ...]:
    """The rules that it suspends, if it suspends no others. Only an admin's hold names rules."""
    return hold.suspends if hold.admin and "*" not in hold.suspends else ()


def only_in_words(rules: Sequence[str]) -> str:
    return ", ".join(rules) if len(rules) <= NAMED_MAX else f"{len(rules)} rules"


def precedence(hold: Hold) -> tuple[bool, datetime]:
    """Of several, the last one is named; first one that names no rules: nobody shall rely on the others."""
    return not only_of(hold), hold.until


def mark_until(view: View, settings: Settings) -> datetime | None:
    """When its own mark ends at the latest; one that cannot be read ends there, unless an admin released it."""
    mark = view.subject.marks.hold_until
    if mark is None or (isinstance(mark, Unknown) and mark.why == view.memory.released_mark):
        return None
    latest = _latest(view, settings)
    return latest if isinstance(mark, Unknown) else min(mark, latest)


def end_of(hold: Hold, settings: Settings) -> datetime:
    """A user's hold never outlasts the class's limit, whatever was written."""
    if hold.admin or isinstance(settings.limits, Unknown):
        return hold.until
    return min(hold.until, hold.at + settings.limits.hold) if hold.by != "its own mark" else hold.until


def last_end(rule: str, view: View, settings: Settings, now: datetime, *, holdable: bool = True) -> datetime | None:
    """When the newest hold that suspended this rule expired or was released. None: there was none.

    A hold shorter than the lead does not count: a minute now and then would otherwise renew every warning, and keep
    idle work for ever within the limits of holds.
    """
    ends = [
        end
        for hold in view.memory.holds
        if (end := end_of(hold, settings)) <= now
        and end - hold.at >= settings.policy.warnings.lead
        and suspends(hold, rule, holdable=holdable)
    ]
    mark = mark_until(view, settings) if holdable else None
    if mark is not None and mark <= now:
        ends.append(mark)
    return max(ends, default=None)


def suspends(hold: Hold, rule: str, *, holdable: bool) -> bool:
    """`holdable`: a user's hold suspends the rule; otherwise only an admin's that names it."""
    if hold.admin and hold.suspends:
        return rule in hold.suspends or "*" in hold.suspends
    return holdable


def _suspended(held: list[Hold], not_held: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """What all holds together suspend, and what they spare. Only an admin's hold can name rules."""
    named = frozenset(rule for hold in held if hold.admin for rule in hold.suspends)
    if "*" in named:
        return EVERY_RULE, frozenset()
    if all(hold.admin and hold.suspends for hold in held):
        return named, frozenset()
    if named >= not_held:
        return EVERY_RULE, frozenset()
    return EVERY_RULE, not_held


def _kept_until(until: datetime, now: datetime) -> str:
    bound = (
        f"kept for {in_words(until - now)} more"
        if until - now < YEAR
        else "kept, because there is no time to count from"
    )
    return f"{bound}; fix or remove the mark, or ask an admin to release it"


def _latest(view: View, settings: Settings) -> datetime:
    """A mark on the object can be renewed by anyone who may write it; retention.max after its end bounds it."""
    subject = view.subject
    longest = settings.retention.max if is_known(settings.retention) else timedelta(days=3650)
    ended = subject.ended
    if isinstance(ended, Unknown) and view.memory.first_seen_ended is not None:
        ended = view.memory.first_seen_ended
    begun = next((at for at in (ended, subject.started, subject.created) if at is not None), None)
    # The time that bounds it is unknown, so nothing bounds it.
    return begun + longest if isinstance(begun, datetime) else datetime.max.replace(tzinfo=subject.seen.at.tzinfo)


def left_to_hold(view: View, policy: Policy, now: datetime) -> timedelta | str:
    """What is left of the total; a sentence when nothing is.

    Counted on one workload, and of one GPU over all workloads of a user, so that a new workload does not begin a new
    count.
    """
    used, what = _held_already(view, policy, now)
    left = policy.hold_total - used
    if left > timedelta():
        return left
    return (
        f"{what} was held for {in_words(used)} of the last {in_words(policy.hold_within)}, and "
        f"{in_words(policy.hold_total)} is the limit. Use it, or ask an admin."
    )


def held_within(holds: Iterable[Hold], since: datetime, now: datetime) -> timedelta:
    """Time between `since` and now that users' holds covered; overlapping holds count once."""
    spans = sorted((max(h.at, since), min(h.until, now)) for h in holds if not h.admin and h.until > since)
    total, reached = timedelta(), since
    for begin, end in spans:
        begin = max(begin, reached)  # noqa: PLW2901 - the part not counted yet
        if end > begin:
            total, reached = total + (end - begin), end
    return total


def _held_already(view: View, policy: Policy, now: datetime) -> tuple[timedelta, str]:
    """The longest of: this workload, each of its GPUs."""
    own, since = view.memory.holds, now - policy.hold_within
    longest, what = held_within(own, since, now), "it"
    devices = view.subject.devices
    for device in devices if isinstance(devices, tuple) else ():
        shared = [hold for hold in view.elsewhere if device in hold.devices]
        together = held_within((*own, *shared), since, now) if shared else timedelta()
        if together > longest:
            longest, what = together, f"GPU {device}, counted over all workloads of its owner,"
    return longest, what

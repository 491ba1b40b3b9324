"""What rules have in common: what one declares besides its answers (see the table at `evaluator_of`), when work ended
and how, and how much may be held, by command or by a keep-alive file. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from types import ModuleType

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Answer, View
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Hold, State, Subject
from gpukeeper.model.words import in_words

Evaluator = Callable[[View, Settings, datetime], Answer]


class Turn(IntEnum):
    """Work first, since hundreds of leftovers, due for weeks, must not keep a GPU from coming back; then full disks."""

    WORK = 0
    TREES = 1  # they end no work, and a thousand may have to go before a disk is usable: counted by `budget.trees`
    STORAGE = 2  # images, build cache, volumes, networks


def evaluator_of(rule: ModuleType, rules: Sequence[ModuleType]) -> Evaluator:
    """A rule whose answer depends on what others declare has `evaluator(rules)`, which returns its bound `evaluate`.
    What else a rule declares, and what holds where it declares nothing:

    | name | meaning | default |
    |---|---|---|
    | NAME, SUMMARY, FOR, ACTS | see docs/how-to/extend.md | required |
    | IN | the states in which it is evaluated | every state |
    | YIELDS_TO | rules that suspend it while they protect | none |
    | HOLDABLE | a user's hold suspends it | True |
    | WHILE_REMOVED | it is evaluated for what is being removed already | False |
    | TURN | when its steps come, and which budget they count for | Turn.WORK |
    | COUNTED_ONCE | what ended together counts once for the breaker | False |
    """
    evaluator: Callable[[Sequence[ModuleType]], Evaluator] | None = getattr(rule, "evaluator", None)
    evaluate: Evaluator = rule.evaluate
    return evaluate if evaluator is None else evaluator(rules)


def states_of(rule: ModuleType) -> Iterable[State]:
    states: Iterable[State] = getattr(rule, "IN", State)
    return states


def yielding(rules: Sequence[ModuleType], to: str) -> tuple[ModuleType, ...]:
    """Those that it suspends while it protects, in their order."""
    return tuple(rule for rule in rules if to in getattr(rule, "YIELDS_TO", ()))


def suspended_by(name: str, rules: Sequence[ModuleType]) -> frozenset[str]:
    return frozenset(rule.NAME for rule in yielding(rules, name))


def not_holdable(rules: Sequence[ModuleType]) -> frozenset[str]:
    return frozenset(rule.NAME for rule in rules if not getattr(rule, "HOLDABLE", True))


def evaluated_while_removed(rules: Sequence[ModuleType]) -> frozenset[str]:
    return frozenset(rule.NAME for rule in rules if getattr(rule, "WHILE_REMOVED", False))


def turn_of(rule: ModuleType) -> Turn:
    turn: Turn = getattr(rule, "TURN", Turn.WORK)
    return turn


def is_counted_once(rule: ModuleType) -> bool:
    return bool(getattr(rule, "COUNTED_ONCE", False))


AGAIN = 2  # ends under one identity
REMOVE = "gpukeeper workload remove"


def comes_back(view: View) -> str:
    """A clause about what ends and runs again under one identity: each end starts a new count, so no time can be
    given."""
    ends = view.memory.ends_seen
    if not view.subject.ends_for_good or ends < AGAIN:
        return ""
    what = f"it ended {ends} times and was restarted, so this time may never come"
    return f"; {what}. Remove it: {REMOVE} {view.subject.ref.path}"


def finish_of(view: View, now: datetime) -> datetime:
    if isinstance(view.subject.ended, datetime):
        return view.subject.ended
    return view.memory.first_seen_ended or now


def ended_in_words(subject: Subject, word: str, ended: datetime, now: datetime) -> str:
    """succeeded 2d ago; failed with exit code 137, out of memory, 2d ago"""
    how = f" with {subject.ended_with}," if subject.ended_with else ""
    return f"{word}{how} {in_words(now - ended)} ago"


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

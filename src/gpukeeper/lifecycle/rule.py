"""What a rule is, who yields to whom, and what rules have in common: when work ended and how. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from enum import IntEnum

import msgspec

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Answer, View
from gpukeeper.model.subject import Shape, State, Subject
from gpukeeper.model.words import in_words

Evaluator = Callable[[View, Settings, datetime], Answer]


class Turn(IntEnum):
    """Work first, since hundreds of leftovers, due for weeks, must not keep a GPU from coming back; then full disks."""

    WORK = 0
    TREES = 1  # they end no work, and a thousand may have to go before a disk is usable: counted by `budget.trees`
    STORAGE = 2  # images, build cache, volumes, networks


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """See docs/how-to/extend.md. The order of rules, which is their precedence, is in decide.py."""

    name: str
    summary: str  # a sentence for the reference
    shapes: tuple[Shape, ...]
    states: tuple[State, ...] = tuple(State)  # it is not evaluated in others
    acts: bool  # False: it only protects
    yields_to: tuple[str, ...] = ()  # rules that suspend it while they protect
    holdable: bool = True  # a user's hold suspends it
    while_removed: bool = False  # it is evaluated for what is being removed already
    turn: Turn = Turn.WORK  # when its steps come, and which budget they count for
    counted_once: bool = False  # what ended together counts once for the breaker
    evaluate: Evaluator
    evaluator: Callable[[Sequence[Rule]], Evaluator] | None = None  # if its answer depends on what other rules are

    def among(self, rules: Sequence[Rule]) -> Evaluator:
        return self.evaluate if self.evaluator is None else self.evaluator(rules)


def yielding(rules: Sequence[Rule], to: str) -> tuple[Rule, ...]:
    """Those that it suspends while it protects, in their order."""
    return tuple(rule for rule in rules if to in rule.yields_to)


def suspended_by(name: str, rules: Sequence[Rule]) -> frozenset[str]:
    return frozenset(rule.name for rule in yielding(rules, name))


def not_holdable(rules: Sequence[Rule]) -> frozenset[str]:
    return frozenset(rule.name for rule in rules if not rule.holdable)


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

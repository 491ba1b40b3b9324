"""What a rule declares besides its answers, and what holds where it declares nothing. Pure.

| name | meaning | default |
|---|---|---|
| NAME, SUMMARY, FOR, ACTS | see docs/how-to/add-a-rule.md | required |
| IN | the states in which it is evaluated | every state |
| YIELDS_TO | rules that suspend it while they protect | none |
| HOLDABLE | a user's hold suspends it | True |
| WHILE_REMOVED | it is evaluated for what is being removed already | False |
| TURN | when its steps come, and which budget they count for | Turn.WORK |
| COUNTED_ONCE | what ended together counts once for the breaker | False |

A rule whose answer depends on what others declare has `evaluator(rules)`, which returns its bound `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import IntEnum
from types import ModuleType

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Answer, View
from gpukeeper.model.subject import State

Evaluator = Callable[[View, Settings, datetime], Answer]


class Turn(IntEnum):
    """Work first, since hundreds of leftovers, due for weeks, must not keep a GPU from coming back; then full disks."""

    WORK = 0
    TREES = 1  # they end no work, and a thousand may have to go before a disk is usable: counted by `budget.trees`
    STORAGE = 2  # images, build cache, volumes, networks


def evaluator_of(rule: ModuleType, rules: Sequence[ModuleType]) -> Evaluator:
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

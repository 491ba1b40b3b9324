"""What rules declare: to whom they yield, what a hold does not suspend, when their steps come."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from gpukeeper.lifecycle import decide
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.lifecycle.decide import EVALUATORS, NOT_HELD, RULES
from gpukeeper.lifecycle.declared import (
    Turn,
    evaluated_while_removed,
    evaluator_of,
    states_of,
    suspended_by,
    turn_of,
    yielding,
)
from gpukeeper.lifecycle.rules import keep_alive
from gpukeeper.model.decision import Answer, Verdict
from gpukeeper.model.subject import Shape, State

NAMES = {rule.NAME for rule in RULES}
# The rules that these tests are about. A new one is free in what it declares.
KNOWN = {
    *("target", "exemption", "hold", "stuck_removal", "stop_hold", "max_runtime", "keep_alive", "restart_loop"),
    *("live_children", "taken_gpu", "idle", "never_started", "own_ttl", "retention", "orphan", "leftover_tree"),
    *("temporary_tree", "unused_image", "build_cache"),
}
DECLARED = {
    *("NAME", "SUMMARY", "FOR", "ACTS", "IN"),
    *("YIELDS_TO", "HOLDABLE", "WHILE_REMOVED", "TURN", "COUNTED_ONCE"),
}


def rule(name: str, **declared: Any) -> ModuleType:
    made = ModuleType(name)
    known = {"NAME": name, "SUMMARY": "", "FOR": tuple(Shape), "ACTS": True}
    known["evaluate"] = lambda view, settings, now: Answer(name, Verdict.SILENT, "")
    made.__dict__.update(known | declared)
    return made


def test_who_suspends_whom() -> None:
    """Precedence as it was decided (ADR 11), whatever file it is declared in."""
    assert KNOWN <= NAMES
    assert {name: found for name in KNOWN if (found := suspended_by(name, RULES) & KNOWN)} == {
        "stop_hold": {"idle", "own_ttl", "retention"},
        "live_children": {"own_ttl", "retention"},
        "own_ttl": {"retention"},
        "keep_alive": {
            *("stop_hold", "restart_loop", "live_children", "idle", "never_started", "own_ttl", "retention"),
        },
    }
    assert {"max_runtime"} == NOT_HELD & KNOWN
    assert evaluated_while_removed(RULES) & KNOWN == {"exemption", "hold", "stuck_removal"}


def test_the_turn_of_each_rule() -> None:
    turns = {one.NAME: turn_of(one) for one in RULES if turn_of(one) is not Turn.WORK and one.NAME in KNOWN}
    assert turns == {
        "leftover_tree": Turn.TREES,
        "temporary_tree": Turn.TREES,
        "unused_image": Turn.STORAGE,
        "build_cache": Turn.STORAGE,
    }
    assert {"leftover_tree", "temporary_tree"} == TREES & KNOWN


@pytest.mark.parametrize("one", RULES, ids=lambda one: str(one.NAME))
def test_a_rule_yields_to_rules_that_take_it_into_account(one: ModuleType) -> None:
    for name in getattr(one, "YIELDS_TO", ()):
        assert name in NAMES, f"{one.NAME} yields to {name}, which is no rule"
        (other,) = [rule for rule in RULES if name == rule.NAME]
        assert hasattr(other, "evaluator"), f"{name} has no evaluator(), so that {one.NAME} would not be suspended"


@pytest.mark.parametrize("one", RULES, ids=lambda one: str(one.NAME))
def test_a_rule_declares_nothing_that_has_no_meaning(one: ModuleType) -> None:
    shouting = {name for name in vars(one) if name.isupper() and not name.startswith("_")}
    assert {name for name in shouting if name in DECLARED or isinstance(vars(one)[name], bool)} <= DECLARED


def test_a_new_rule_is_suspended_by_what_it_yields_to_and_by_nothing_else() -> None:
    made = rule("too_large", YIELDS_TO=("stop_hold", "keep_alive"))
    rules = (*RULES, made)
    assert "too_large" in suspended_by("stop_hold", rules)
    assert "too_large" not in suspended_by("own_ttl", rules)
    assert yielding(rules, keep_alive.NAME)[-1] is made
    bound: Any = evaluator_of(keep_alive, rules)
    assert [name for name, _ in bound.keywords["others"]][-1] == "too_large"


def test_what_a_rule_leaves_out() -> None:
    made = rule("too_large")
    assert (tuple(states_of(made)), turn_of(made), evaluator_of(made, (made,))) == (
        tuple(State),
        Turn.WORK,
        made.evaluate,
    )


def test_every_rule_is_evaluated_with_what_others_declare() -> None:
    assert EVALUATORS.keys() == NAMES
    assert decide._APPLICABLE[Shape.WORKLOAD, State.ENDED] == tuple(
        (one.NAME, EVALUATORS[one.NAME]) for one in RULES if Shape.WORKLOAD in one.FOR and State.ENDED in states_of(one)
    )

"""What rules declare: to whom they yield, what a hold does not suspend, when their steps come."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.lifecycle import decide
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.lifecycle.decide import EVALUATORS, NOT_HELD, RULES
from gpukeeper.lifecycle.rule import Rule, Turn, suspended_by, yielding
from gpukeeper.lifecycle.rules import keep_alive
from gpukeeper.model.decision import Answer, Verdict
from gpukeeper.model.subject import Shape, State

NAMES = {rule.name for rule in RULES}
# The rules that these tests are about. A new one is free in what it declares.
KNOWN = {
    *("target", "exemption", "hold", "stuck_removal", "stop_hold", "max_runtime", "keep_alive", "restart_loop"),
    *("live_children", "taken_gpu", "idle", "never_started", "own_ttl", "retention", "orphan", "leftover_tree"),
    *("temporary_tree", "unused_image", "build_cache"),
}


def made(**declared: Any) -> Rule:
    return Rule(
        name="too_large",
        summary="",
        shapes=tuple(Shape),
        acts=True,
        evaluate=lambda view, settings, now: Answer("too_large", Verdict.SILENT, ""),
        **declared,
    )


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
    assert {rule.name for rule in RULES if rule.while_removed} & KNOWN == {"exemption", "hold", "stuck_removal"}


def test_the_turn_of_each_rule() -> None:
    turns = {rule.name: rule.turn for rule in RULES if rule.turn is not Turn.WORK and rule.name in KNOWN}
    assert turns == {
        "leftover_tree": Turn.TREES,
        "temporary_tree": Turn.TREES,
        "unused_image": Turn.STORAGE,
        "build_cache": Turn.STORAGE,
    }
    assert {"leftover_tree", "temporary_tree"} == TREES & KNOWN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
def test_a_rule_yields_to_rules_that_take_it_into_account(rule: Rule) -> None:
    for name in rule.yields_to:
        assert name in NAMES, f"{rule.name} yields to {name}, which is no rule"
        (other,) = [one for one in RULES if name == one.name]
        assert other.evaluator is not None, f"{name} has no evaluator, so that {rule.name} would not be suspended"


def test_a_new_rule_is_suspended_by_what_it_yields_to_and_by_nothing_else() -> None:
    new = made(yields_to=("stop_hold", "keep_alive"))
    rules = (*RULES, new)
    assert "too_large" in suspended_by("stop_hold", rules)
    assert "too_large" not in suspended_by("own_ttl", rules)
    assert yielding(rules, keep_alive.NAME)[-1] is new
    bound: Any = keep_alive.RULE.among(rules)
    assert [name for name, _ in bound.keywords["others"]][-1] == "too_large"


def test_what_a_rule_leaves_out() -> None:
    new = made()
    assert (new.states, new.turn, new.among((new,))) == (tuple(State), Turn.WORK, new.evaluate)


def test_every_rule_is_evaluated_with_what_others_declare() -> None:
    assert EVALUATORS.keys() == NAMES
    assert decide._APPLICABLE[Shape.WORKLOAD, State.ENDED] == tuple(
        (rule.name, EVALUATORS[rule.name])
        for rule in RULES
        if Shape.WORKLOAD in rule.shapes and State.ENDED in rule.states
    )

"""All checkers over one run: one invariant, one checker file."""

from __future__ import annotations

from tests.simulation.checkers import (
    budget_and_breaker,
    due_is_reclaimed,
    evidence_first,
    holds_and_scope,
    ledger_tells_the_truth,
    only_what_was_seen,
    paused_means_paused,
    roots_only,
    trees_are_free,
    unknown_keeps,
    warned_first,
)
from tests.simulation.harness import Run

CHECKERS = (
    unknown_keeps,
    holds_and_scope,
    only_what_was_seen,
    budget_and_breaker,
    evidence_first,
    ledger_tells_the_truth,
    due_is_reclaimed,
    roots_only,
    trees_are_free,
    warned_first,
    paused_means_paused,
)


def broken_promises(run: Run) -> list[str]:
    return [f"{name_of(checker)}: {said}" for checker in CHECKERS for said in checker.violations(run)]


def name_of(checker: object) -> str:
    return str(getattr(checker, "__name__", checker)).rsplit(".", 1)[-1]

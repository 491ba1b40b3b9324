"""All checkers over one run: one invariant, one checker file."""

from __future__ import annotations

from tests.simulation.acceptance import AcceptanceRun, simulate_acceptance
from tests.simulation.checkers import (
    budget_and_breaker,
    clock_is_right,
    could_not_test,
    due_is_reclaimed,
    evidence_first,
    forecasts_come_true,
    holds_and_scope,
    ledger_tells_the_truth,
    only_what_was_seen,
    paused_means_paused,
    roots_only,
    trees_are_free,
    unknown_keeps,
    warned_first,
)
from tests.simulation.harness import Run, simulate

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
    clock_is_right,
    forecasts_come_true,
)
ALL_CHECKERS = (*CHECKERS, could_not_test)


def broken_promises(run: Run) -> list[str]:
    return [f"{name_of(checker)}: {said}" for checker in CHECKERS for said in checker.violations(run)]


def broken_in_acceptance(run: AcceptanceRun) -> list[str]:
    return [f"{name_of(could_not_test)}: {said}" for said in could_not_test.violations(run)]


def broken_with(seed: int, checker: str) -> list[str]:
    """What happens with this seed in the world that the checker of that name looks at."""
    if checker == name_of(could_not_test):
        return broken_in_acceptance(simulate_acceptance(seed))
    return broken_promises(simulate(seed))


def name_of(checker: object) -> str:
    return str(getattr(checker, "__name__", checker)).rsplit(".", 1)[-1]

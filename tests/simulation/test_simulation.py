"""The promises hold in a moving, failing world. A seed repeats any failure: make simulate SEED=n."""

from __future__ import annotations

import os

import pytest

from tests.simulation.checkers import (
    budget_and_breaker,
    due_is_reclaimed,
    evidence_first,
    holds_and_scope,
    ledger_tells_the_truth,
    only_what_was_seen,
    paused_means_paused,
    roots_only,
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
    warned_first,
    paused_means_paused,
)


def broken_promises(run: Run) -> list[str]:
    return [f"{c.__name__.rsplit('.', 1)[-1]}: {said}" for c in CHECKERS for said in c.violations(run)]

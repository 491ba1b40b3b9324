"""A test of the tests: every planted bug is caught, by the checker of the promise it breaks."""

from __future__ import annotations

import pytest

from tests.simulation import planted_acceptance  # noqa: F401 - registers its bugs
from tests.simulation.planted import PLANTED
from tests.simulation.promises import broken_with

pytestmark = pytest.mark.slow

ENOUGH = 300  # seeds; most bugs show within the first ten
# The first seed that shows a bug, if others come before it: tried first, to save time. If it no longer shows the bug
# (a change of the engine or the world changes every story), the others are searched as before; then update it.
FIRST_SHOWN = {
    "delete_what_was_opened_since_the_look": 79,
    "drop_the_condition": 66,
    "exceed_the_budget": 30,
    "forecast_with_the_limits_of_others": 27,
    "forget_a_keep_alive_lease": 18,
    "forget_an_interrupted_removal": 14,
    "forget_that_the_clock_jumped": 92,
    "forget_when_a_tree_was_moved_here": 41,
    "ignore_owners_that_do_not_control": 13,
    "ignore_the_breaker": 30,
    "keep_warnings_across_a_gap": 27,
    "keep_warnings_across_a_hold": 25,
    "let_a_full_disk_shrink_conditions": 14,
    "never_write_a_keep_alive_lease_down": 43,
    "remove_without_an_atomic_guard": 66,
    "treat_an_unknown_outcome_as_success": 216,
    "treat_files_that_could_not_be_seen_as_closed": 247,
    "treat_unmeasured_as_idle": 249,
}


@pytest.mark.planted
@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_planted_bug_is_caught(bug: str) -> None:
    caught_by, plant = PLANTED[bug]
    with plant():
        for seed in sorted(range(ENOUGH), key=lambda seed: seed != FIRST_SHOWN.get(bug)):
            if any(said.startswith(caught_by) for said in broken_with(seed, caught_by)):
                return
    pytest.fail(f"{bug} ran through {ENOUGH} seeds and {caught_by} noticed nothing")


def test_planted_bugs_cover_every_checker() -> None:
    from tests.simulation.promises import ALL_CHECKERS, name_of

    assert {caught_by for caught_by, _ in PLANTED.values()} == {name_of(checker) for checker in ALL_CHECKERS}
    assert len(PLANTED) >= 12


def test_the_first_seeds_are_of_planted_bugs_and_within_the_search() -> None:
    assert set(FIRST_SHOWN) <= set(PLANTED)
    assert set(FIRST_SHOWN.values()) <= set(range(ENOUGH))

"""A test of the tests: every planted bug is caught, by the checker of the promise it breaks."""

from __future__ import annotations

import pytest

from tests.simulation import planted_acceptance  # noqa: F401 - registers its bugs
from tests.simulation.planted import PLANTED
from tests.simulation.promises import broken_with

ENOUGH = 300  # seeds; most bugs show within the first ten


@pytest.mark.planted
@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_planted_bug_is_caught(bug: str) -> None:
    caught_by, plant = PLANTED[bug]
    with plant():
        for seed in range(ENOUGH):
            if any(said.startswith(caught_by) for said in broken_with(seed, caught_by)):
                return
    pytest.fail(f"{bug} ran through {ENOUGH} seeds and {caught_by} noticed nothing")


def test_planted_bugs_cover_every_checker() -> None:
    from tests.simulation.promises import ALL_CHECKERS, name_of

    assert {caught_by for caught_by, _ in PLANTED.values()} == {name_of(checker) for checker in ALL_CHECKERS}
    assert len(PLANTED) >= 12

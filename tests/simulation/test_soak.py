"""A month without growth: what gpukeeper holds follows what is there. Longer: make simulate."""

from __future__ import annotations

import pytest

from tests.simulation.soak import Soak, grown, soak

pytestmark = pytest.mark.slow

DAYS = 30


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return soak(tmp_path_factory.mktemp("soak"), DAYS)


def test_a_month_of_churn_and_restarts_leaves_nothing_behind(month: Soak) -> None:
    assert grown(month.held) == []


def test_the_month_was_not_a_quiet_one(month: Soak) -> None:
    """Else it proves little."""
    assert len(month.held) == DAYS
    assert month.lives > 2
    assert month.passes > 500
    assert month.created > 10 * max(one.things for one in month.held)

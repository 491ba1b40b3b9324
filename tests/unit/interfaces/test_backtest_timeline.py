"""The bars of a timeline: the highest use of each part of the time, and gaps."""

from __future__ import annotations

import pytest

from gpukeeper.interfaces.terminal.backtest import COLUMNS, highest
from tests.unit.backtest.traces import GAP, MINUTE, T0, run


def test_a_bar_is_the_highest_use_of_its_time_and_a_gap_without_use_is_not_zero() -> None:
    one = run((COLUMNS * MINUTE, 0.0), (COLUMNS * MINUTE, 80.0), (COLUMNS * MINUTE, GAP))
    bars = highest(one, T0, T0 + 3 * COLUMNS * MINUTE)
    assert len(bars) == COLUMNS
    assert bars[0] == 0.0
    assert bars[COLUMNS // 2] == 80.0
    assert bars[-1] is None


@pytest.mark.parametrize("minutes", [1, 3, COLUMNS - 1, COLUMNS + 1])
def test_short_runs_have_all_bars(minutes: int) -> None:
    bars = highest(run((minutes * MINUTE, 50.0)), T0, T0 + minutes * MINUTE)
    assert bars == [50.0] * COLUMNS

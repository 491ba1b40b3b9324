"""A trace in two parts: every minute is in exactly one of them."""

from __future__ import annotations

from gpukeeper.lifecycle.replay import earlier, later, middle
from tests.unit.backtest.traces import DAY, END, HOUR, MINUTE, T0, run


def test_a_run_over_the_split_is_in_both_parts_and_none_of_its_minutes_twice() -> None:
    one = run((2 * HOUR, 90.0), (3 * HOUR, 0.0))
    split = T0 + 3 * HOUR
    before, after = earlier(one, split), later(one, split)
    assert before is not None
    assert after is not None
    assert (before.ended, after.started, after.first_start) == (None, split, T0)
    assert before.series[0].minutes + after.series[0].minutes == one.series[0].minutes
    assert after.series[0].start == split


def test_a_run_on_one_side_is_in_one_part() -> None:
    one = run((2 * HOUR, 90.0))
    assert earlier(one, T0 + DAY) == one
    assert later(one, T0 + DAY) is None
    assert earlier(one, T0) is None
    assert later(one, T0) == one


def test_the_split_is_a_whole_minute() -> None:
    assert middle(T0, END, 2 / 3) == T0 + 6 * DAY + 16 * HOUR
    assert middle(T0, T0 + 5 * MINUTE, 0.5) == T0 + 2 * MINUTE

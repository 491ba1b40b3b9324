"""Won, regret, censored, unknowable: runs whose answer is calculated by hand.

Every run is used for two hours; the stop comes at 3:05 (idle for an hour; the warnings take until the pass after it).
"""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.lifecycle.replay_outcome import Afterwards, JudgedStop, Judging
from tests.unit.backtest.traces import DAY, GAP, HOUR, JUDGING, MINUTE, T0, judged, run

STOP = T0 + 3 * HOUR + 5 * MINUTE
BUSY = (2 * HOUR, 90.0)


def stop_of(*parts: object, **more: object) -> JudgedStop:
    found = judged(run(BUSY, *parts, **more)).stop  # type: ignore[arg-type]
    assert found is not None
    assert found.at == STOP
    return found


def test_what_was_never_used_again_is_won_until_it_ended() -> None:
    found = stop_of((10 * HOUR, 0.0), gpus=2)
    assert found.afterwards is Afterwards.UNUSED
    assert found.won == pytest.approx(2 * (12 - 3 - 5 / 60))
    assert (found.used_again, found.cost) == (None, 0.0)


def test_what_was_used_again_is_a_regret_and_won_only_until_then() -> None:
    found = stop_of((4 * HOUR, 0.0), (HOUR, 50.0), (10 * HOUR, 0.0), gpus=2)
    assert found.afterwards is Afterwards.REGRET
    assert found.used_again == T0 + 6 * HOUR
    assert found.won == pytest.approx(2 * (6 - 3 - 5 / 60)), "the ten hours after that are not won, or won twice"
    assert found.cost == pytest.approx(2 * 1.0)


def test_a_regretted_stop_can_win_more_than_was_held_after_the_last_use() -> None:
    """So the second figure is no limit of the first, and is not printed as one."""
    found = judged(run(BUSY, (4 * HOUR, 0.0), (HOUR, 50.0), (HOUR, 0.0)))
    assert found.stop is not None
    assert found.stop.won == pytest.approx(3 - 5 / 60)
    assert found.unused_tail == pytest.approx(1.0)


def test_use_after_the_horizon_is_a_new_beginning() -> None:
    found = stop_of((3 * DAY, 0.0), (HOUR, 50.0))
    assert found.afterwards is Afterwards.UNUSED
    assert found.won == pytest.approx(3 * 24 + 2 - 3 - 5 / 60)


def test_a_trace_that_ends_before_the_horizon_leaves_it_open() -> None:
    found = judged(run(BUSY, (DAY, 0.0), ended=False), end=T0 + 2 * HOUR + DAY).stop
    assert found is not None
    assert found.afterwards is Afterwards.CENSORED
    assert found.won == pytest.approx(24 + 2 - 3 - 5 / 60)


def test_a_gap_afterwards_makes_it_unknowable_and_is_not_won() -> None:
    found = stop_of((4 * HOUR, 0.0), (HOUR, GAP), (5 * HOUR, 0.0))
    assert found.afterwards is Afterwards.UNKNOWABLE
    assert found.won == pytest.approx(12 - 3 - 5 / 60 - 1)


def test_use_seen_after_a_gap_is_a_regret_all_the_same() -> None:
    found = stop_of((4 * HOUR, 0.0), (HOUR, GAP), (HOUR, 90.0))
    assert found.afterwards is Afterwards.REGRET


def test_a_run_without_a_stop_has_its_hours() -> None:
    found = judged(run(BUSY, (30 * MINUTE, 0.0), (30 * MINUTE, GAP), gpus=4))
    assert found.stop is None
    assert (found.held, found.measured) == (pytest.approx(12.0), pytest.approx(10.0))
    assert found.unused_tail == pytest.approx(2.0), "of what was measured"


def test_the_tail_of_what_was_never_used_is_all_of_it() -> None:
    assert judged(run((HOUR, 0.0))).unused_tail == pytest.approx(1.0)


def test_a_gpu_that_was_not_measured_makes_the_run_not_measured() -> None:
    one = run((HOUR, 0.0), gpus=2)
    found = judged(msgspec.structs.replace(one, series=one.series[:1]))
    assert (found.held, found.measured) == (pytest.approx(2.0), 0.0)


def test_the_threshold_of_use_is_that_of_the_comparison() -> None:
    one = run(BUSY, (4 * HOUR, 0.0), (HOUR, 3.0), (5 * HOUR, 0.0))
    assert judged(one).stop is not None
    strict = judged(one, judging=Judging(threshold=2.0, horizon=JUDGING.horizon)).stop
    assert strict is not None
    assert strict.afterwards is Afterwards.REGRET


def test_warnings_after_which_it_was_used_are_counted() -> None:
    found = judged(run(BUSY, (50 * MINUTE, 0.0), (10 * MINUTE, 90.0), (50 * MINUTE, 0.0), (10 * MINUTE, 90.0)))
    assert (found.warned, found.came_back, found.stop) == (2, 2, None)
    assert judged(run(BUSY, (5 * HOUR, 0.0))).came_back == 0


def test_only_time_within_the_trace_counts() -> None:
    old = msgspec.structs.replace(run(BUSY), started=T0 - DAY)
    assert judged(old).held == pytest.approx(2.0)

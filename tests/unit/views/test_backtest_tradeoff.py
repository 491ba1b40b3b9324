"""The recorded comparison: which limit is best, and the sentence of each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.ledger.meta import BacktestPoint, BacktestRecord
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.views.backtest import LimitRow, limit_rows, points_of, report
from tests.unit.views.test_backtest import FACTS, some

T0 = datetime(2026, 3, 2, tzinfo=UTC)
HOUR = timedelta(hours=1)


def point(window: timedelta | None, *, unused: int, regrets: int, open_: int = 0, **more: float) -> BacktestPoint:
    return BacktestPoint(
        window=window,
        threshold=more.get("threshold"),
        stops=unused + regrets + open_,
        unused=unused,
        regrets=regrets,
        censored=open_,
        unknowable=0,
        won=more.get("won", 310.0),
    )


def rows(*points: BacktestPoint, regret_max: float = 0.05, horizon: timedelta | None = 72 * HOUR) -> list[LimitRow]:
    return list(limit_rows(recorded(points, horizon), regret_max))


def recorded(points: tuple[BacktestPoint, ...], horizon: timedelta | None) -> BacktestRecord:
    return BacktestRecord(
        at=T0,
        source="ledger",
        begin=T0,
        end=T0,
        runs=120,
        stops=1,
        known=1,
        regrets=0,
        won=1.0,
        horizon=horizon,
        points=points,
    )


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            point(2 * HOUR, unused=11, regrets=3),
            "An idle limit of 2h would have stopped 14 of 120 workloads here and won 310 GPU-hours; "
            "3 of the 14 (21%) would have used their GPUs again within 3d.",
        ),
        (
            point(2 * HOUR, unused=9, regrets=3, open_=2),
            "An idle limit of 2h would have stopped 14 of 120 workloads here and won 310 GPU-hours; of the 12 whose "
            "end is known, 3 (25%) would have used their GPUs again within 3d; of 2 it is not known.",
        ),
        (
            point(2 * HOUR, unused=0, regrets=0, open_=5),
            "An idle limit of 2h would have stopped 5 of 120 workloads here and won 310 GPU-hours; whether any of the "
            "5 would have used their GPUs again within 3d is not known.",
        ),
        (
            point(2 * HOUR, unused=0, regrets=0, open_=1),
            "An idle limit of 2h would have stopped 1 of 120 workloads here and won 310 GPU-hours; whether it would "
            "have used its GPUs again within 3d is not known.",
        ),
        (
            point(6 * HOUR, unused=0, regrets=0, threshold=2.5),
            "An idle limit of 6h, with GPU use below 2.5% counted as idle, would have stopped none of the 120 "
            "workloads here.",
        ),
        (
            point(None, unused=0, regrets=0, threshold=2.5),
            "With GPU use below 2.5% counted as idle, the policy would have stopped none of the 120 workloads here.",
        ),
        (point(None, unused=0, regrets=0), "The policy itself would have stopped none of the 120 workloads here."),
    ],
)
def test_the_sentence_of_a_limit(one: BacktestPoint, words: str) -> None:
    assert rows(one)[0].sentence == words


def test_a_horizon_that_was_not_recorded_is_not_named() -> None:
    assert rows(point(HOUR, unused=3, regrets=1), horizon=None)[0].sentence.endswith("their GPUs again.")


def test_the_best_wins_most_of_those_whose_regret_is_surely_allowed() -> None:
    given = point(None, unused=500, regrets=0, won=50.0)
    short = point(HOUR, unused=250, regrets=250, won=900.0)
    middle = point(2 * HOUR, unused=485, regrets=15, won=300.0)  # 3.0 %, at most 4.9 %
    long = point(6 * HOUR, unused=480, regrets=0, won=200.0)  # at most 0.8 %
    few = point(8 * HOUR, unused=12, regrets=0, won=4000.0)  # at most 24 %
    unknown = point(9 * HOUR, unused=0, regrets=0, open_=4, won=5000.0)
    every = (given, short, middle, long, few, unknown)

    def best(regret_max: float) -> list[timedelta | None]:
        found = rows(*every, regret_max=regret_max)
        assert not any(one.likely for one in found)
        return [one.row.variant.window for one in found if one.best]

    assert best(0.05) == [2 * HOUR]
    assert best(0.01) == [6 * HOUR]
    assert best(1.0) == [8 * HOUR], "what is not known is never the best"
    assert [(one.best, one.likely) for one in rows(short, regret_max=0.05)] == [(False, False)]
    assert [one.best for one in rows(given, unknown)] == [True, False], "the policy itself may be"


def test_few_stops_prove_nothing_and_are_called_likely() -> None:
    few, fewer = point(HOUR, unused=12, regrets=0, won=300.0), point(2 * HOUR, unused=3, regrets=0, won=100.0)
    assert [(one.best, one.likely) for one in rows(few, fewer)] == [(False, True), (False, False)]


def test_the_interval_contains_the_share_and_is_missing_where_nothing_is_known() -> None:
    known, unknown = rows(point(HOUR, unused=9, regrets=3), point(HOUR, unused=0, regrets=0, open_=3))
    assert known.between is not None
    assert known.between.low < 0.25 < known.between.high
    assert (unknown.between, unknown.row.regret) == (None, None)


def test_the_points_of_a_report_give_its_rows_again() -> None:
    made = report("", "", FACTS, Judging(), {GIVEN: some(3, 1), Variant(HOUR, 5.0): some(4, 2)})
    found = rows(*points_of(made.curve))
    for before, after in zip(made.curve, found, strict=True):
        assert after.row.variant == before.variant
        assert (after.row.regret, after.row.regret_high) == (before.regret, before.regret_high)
        assert (after.row.tally.stops, after.row.tally.won) == (before.tally.stops, before.tally.won)

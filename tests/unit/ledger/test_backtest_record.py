"""The recorded backtests: round trip, what older versions wrote, and the bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

from gpukeeper.ledger import tables
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.meta import (
    KEPT_BACKTESTS,
    KEPT_POINTS,
    MOST_POINTS,
    BacktestPoint,
    BacktestRecord,
    backtest_record,
    newest_backtest,
    record_backtest,
)

T0 = datetime(2026, 3, 2, tzinfo=UTC)
HOUR = timedelta(hours=1)
POINT = BacktestPoint(
    window=2 * HOUR, threshold=5.0, stops=14, unused=9, regrets=3, censored=1, unknowable=1, won=310.5
)
RECORD = BacktestRecord(
    at=T0,
    source="ledger",
    begin=T0 - 30 * 24 * HOUR,
    end=T0,
    runs=120,
    stops=14,
    known=12,
    regrets=3,
    won=310.5,
    horizon=72 * HOUR,
    points=(structs.replace(POINT, window=None, threshold=None), POINT),
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    tmp_path.chmod(0o700)
    made = open_ledger(tmp_path / "ledger.db", write=True)
    yield made
    made.close()


def test_a_record_with_its_points_is_read_as_it_was_written(ledger: SqliteLedger) -> None:
    async def both() -> tuple[BacktestRecord | None, BacktestRecord | None]:
        await record_backtest(ledger, "abc", RECORD)
        return await backtest_record(ledger, "abc"), await backtest_record(ledger, "other")

    assert asyncio.run(both()) == (RECORD, None)


def test_a_record_of_an_earlier_version_has_no_points(ledger: SqliteLedger) -> None:
    old = {
        "at": "2026-03-01T00:00:00Z",
        "source": "ledger",
        "begin": "2026-02-01T00:00:00Z",
        "end": "2026-03-01T00:00:00Z",
        "runs": 9,
        "stops": 4,
        "known": 4,
        "regrets": 1,
        "won": 12.5,
    }

    async def read() -> tuple[BacktestRecord | None, BacktestRecord | None]:
        await ledger.change(lambda c: tables.set_meta(c, "backtests", json.dumps({"old": old})))
        await record_backtest(ledger, "new", RECORD)
        return await backtest_record(ledger, "old"), await newest_backtest(ledger)

    found, newest = asyncio.run(read())
    assert found is not None
    assert (found.runs, found.won, found.horizon, found.points) == (9, 12.5, None, ())
    assert newest == RECORD


def test_only_the_newest_records_keep_their_points(ledger: SqliteLedger) -> None:
    async def write() -> list[BacktestRecord | None]:
        for number in range(KEPT_BACKTESTS + 2):
            await record_backtest(ledger, f"p{number}", structs.replace(RECORD, at=T0 + number * HOUR))
        await record_backtest(ledger, "plain", structs.replace(RECORD, at=T0 + 99 * HOUR, points=()))
        return [await backtest_record(ledger, f"p{number}") for number in range(KEPT_BACKTESTS + 2)]

    found = asyncio.run(write())
    kept = [one for one in found if one is not None]
    assert found[:3] == [None, None, None]
    assert len(kept) == KEPT_BACKTESTS - 1, "and the plain one"
    assert [bool(one.points) for one in kept] == [False] * (KEPT_BACKTESTS - 1 - KEPT_POINTS) + [True] * KEPT_POINTS


@pytest.mark.slow
def test_the_row_is_bounded(ledger: SqliteLedger) -> None:
    full = structs.replace(RECORD, points=(POINT,) * MOST_POINTS)

    async def size() -> int:
        for number in range(KEPT_BACKTESTS):
            await record_backtest(ledger, f"{number:064}", structs.replace(full, at=T0 + number * HOUR))
        return len(str(await ledger.read(lambda c: tables.meta(c, "backtests"))))

    assert asyncio.run(size()) < 200_000
    too_many = structs.replace(full, points=(POINT,) * (MOST_POINTS + 1))
    with pytest.raises(AssertionError):
        asyncio.run(record_backtest(ledger, "x", too_many))


def test_nothing_is_on_record_at_first(ledger: SqliteLedger) -> None:
    assert asyncio.run(newest_backtest(ledger)) is None

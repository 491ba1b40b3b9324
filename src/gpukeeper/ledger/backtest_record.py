"""Which policies were backtested on this machine's records, and with what result: one row of the table `meta`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial

import msgspec
from msgspec import structs

from gpukeeper.ledger import state
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.model import reading

KEPT = 50  # policies, the newest
KEPT_POINTS = 4  # policies with points, the newest
MOST_POINTS = 256  # of one policy; larger than all usual idle times and thresholds together
_NAME = "backtests"


class BacktestPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of a comparison; only stops of idle work. `window` and `threshold` (percent): None as in the recorded
    policy, so that the point without both is that policy."""

    window: timedelta | None = None
    threshold: float | None = None
    stops: int
    unused: int
    regrets: int
    censored: int
    unknowable: int
    won: float  # hours times GPUs


class BacktestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`known`: stops of which it is known whether they would have been regretted; `regrets` of these were. `points`: of
    a comparison, with the recorded policy first; none without `--sweep`, and in records of earlier versions."""

    at: datetime
    source: str
    begin: datetime
    end: datetime
    runs: int
    stops: int
    known: int
    regrets: int
    won: float  # hours times GPUs
    horizon: timedelta | None = None  # use within it after a stop is a regret
    points: tuple[BacktestPoint, ...] = ()


async def backtest_record(ledger: SqliteLedger, digest: str) -> BacktestRecord | None:
    """`digest`: of the policy in any mode. None: it was not backtested, or that was not recorded."""
    return (await ledger.read(_read)).get(digest)


async def newest_backtest(ledger: SqliteLedger) -> BacktestRecord | None:
    """Of any policy."""
    return max((await ledger.read(_read)).values(), key=lambda one: one.at, default=None)


async def record_backtest(ledger: SqliteLedger, digest: str, record: BacktestRecord) -> None:
    await ledger.change(partial(_record, digest=digest, record=record))


def _record(c: sqlite3.Connection, *, digest: str, record: BacktestRecord) -> None:
    assert len(record.points) <= MOST_POINTS, "it was checked before the backtest"
    found = {**_read(c), digest: record}
    newest = sorted(found.items(), key=lambda pair: pair[1].at)[-KEPT:]
    with_points = [name for name, one in newest if one.points][-KEPT_POINTS:]
    kept = {name: one if name in with_points else structs.replace(one, points=()) for name, one in newest}
    state.set_meta(c, _NAME, msgspec.json.encode(kept).decode())


def _read(c: sqlite3.Connection) -> Mapping[str, BacktestRecord]:
    found = state.meta(c, _NAME)
    if found is None:
        return {}
    try:
        return reading.decode(str(found).encode(), type=dict[str, BacktestRecord])
    except (msgspec.MsgspecError, ValueError):
        return {}  # of another version

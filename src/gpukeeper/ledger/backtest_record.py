"""Which policies were backtested on this machine's records, and with what result: one row of the table `meta`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import datetime
from functools import partial

import msgspec

from gpukeeper.ledger import state
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.model import reading

KEPT = 50  # policies, the newest
_NAME = "backtests"


class BacktestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`known`: stops of which it is known whether they would have been regretted; `regrets` of these were."""

    at: datetime
    source: str
    begin: datetime
    end: datetime
    runs: int
    stops: int
    known: int
    regrets: int
    won: float  # hours times GPUs


async def backtest_record(ledger: SqliteLedger, digest: str) -> BacktestRecord | None:
    """`digest`: of the policy in any mode. None: it was not backtested, or that was not recorded."""
    return (await ledger.read(_read)).get(digest)


async def record_backtest(ledger: SqliteLedger, digest: str, record: BacktestRecord) -> None:
    await ledger.change(partial(_record, digest=digest, record=record))


def _record(c: sqlite3.Connection, *, digest: str, record: BacktestRecord) -> None:
    found = {**_read(c), digest: record}
    newest = sorted(found.items(), key=lambda pair: pair[1].at)[-KEPT:]
    state.set_meta(c, _NAME, msgspec.json.encode(dict(newest)).decode())


def _read(c: sqlite3.Connection) -> Mapping[str, BacktestRecord]:
    found = state.meta(c, _NAME)
    if found is None:
        return {}
    try:
        return reading.decode(str(found).encode(), type=dict[str, BacktestRecord])
    except (msgspec.MsgspecError, ValueError):
        return {}  # of another version

"""Single records beside the journal, rows of the table `meta`: which policy was in effect last (so that a change is
noticed that was made while no daemon ran), which policies were backtested, which ledger this is and how far it was
copied, and which requests came by the copy. No line of the journal depends on them.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial

import msgspec
from msgspec import structs

from gpukeeper.ledger import tables
from gpukeeper.ledger.files import archive_folder
from gpukeeper.ledger.journal import SqliteLedger, append
from gpukeeper.ledger.lines import micros
from gpukeeper.model import reading
from gpukeeper.model.event import PolicyChange, PolicyChanged

_POLICY = "policy"


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`values`: every setting in words. `last`: None: it has not changed since recording began."""

    digest: str
    since: datetime
    values: Mapping[str, str]
    last: PolicyChanged | None = None


async def policy_record(ledger: SqliteLedger) -> PolicyRecord | None:
    """None: no daemon has run on this ledger, or only one that did not record it."""
    return await ledger.read(_read_policy)


async def record_policy(
    ledger: SqliteLedger, digest: str, source: str, values: Mapping[str, str], now: datetime
) -> PolicyChanged | None:
    """Writes a line if it is another policy than the last one. The first one that is recorded is no change."""
    line = await ledger.change(partial(_record_policy, digest=digest, source=source, values=values, now=now))
    if line is not None:
        ledger.on_append((line,))
    return line


def _record_policy(
    c: sqlite3.Connection, *, digest: str, source: str, values: Mapping[str, str], now: datetime
) -> PolicyChanged | None:
    before = _read_policy(c)
    if before is not None and before.digest == digest:
        return None
    line = None
    if before is not None:
        line = PolicyChanged(
            at=now, digest=digest, before=before.digest, source=source, changes=differences(before.values, values)
        )
        append(c, [line])
    record = PolicyRecord(digest=digest, since=now, values=values, last=line)
    tables.set_meta(c, _POLICY, msgspec.json.encode(record).decode())
    return line


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[PolicyChange, ...]:
    """In the order of the policy's reference; what was taken out comes last."""
    names = dict.fromkeys((*after, *before))
    return tuple(
        PolicyChange(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )


def _read_policy(c: sqlite3.Connection) -> PolicyRecord | None:
    found = tables.meta(c, _POLICY)
    if found is None:
        return None
    try:
        return reading.decode(str(found).encode(), type=PolicyRecord)
    except (msgspec.MsgspecError, ValueError):
        return None  # of another version: recording begins again


KEPT_BACKTESTS = 50  # policies, the newest
KEPT_POINTS = 4  # policies with points, the newest
MOST_POINTS = 256  # of one policy; larger than all usual idle times and thresholds together
_BACKTESTS = "backtests"


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
    return (await ledger.read(_read_backtests)).get(digest)


async def newest_backtest(ledger: SqliteLedger) -> BacktestRecord | None:
    """Of any policy."""
    return max((await ledger.read(_read_backtests)).values(), key=lambda one: one.at, default=None)


async def record_backtest(ledger: SqliteLedger, digest: str, record: BacktestRecord) -> None:
    await ledger.change(partial(_record_backtest, digest=digest, record=record))


def _record_backtest(c: sqlite3.Connection, *, digest: str, record: BacktestRecord) -> None:
    assert len(record.points) <= MOST_POINTS, "it was checked before the backtest"
    found = {**_read_backtests(c), digest: record}
    newest = sorted(found.items(), key=lambda pair: pair[1].at)[-KEPT_BACKTESTS:]
    with_points = [name for name, one in newest if one.points][-KEPT_POINTS:]
    kept = {name: one if name in with_points else structs.replace(one, points=()) for name, one in newest}
    tables.set_meta(c, _BACKTESTS, msgspec.json.encode(kept).decode())


def _read_backtests(c: sqlite3.Connection) -> Mapping[str, BacktestRecord]:
    found = tables.meta(c, _BACKTESTS)
    if found is None:
        return {}
    try:
        return reading.decode(str(found).encode(), type=dict[str, BacktestRecord])
    except (msgspec.MsgspecError, ValueError):
        return {}  # of another version


_ID, _FOREIGN, _SHIPPED, _NONCE = "copy_id", "copy_foreign", "copy_shipped", "copy_nonce:"
_LONGER = timedelta(hours=1)  # a nonce is remembered beyond its request's expiry: clocks differ


class Identity(msgspec.Struct, frozen=True):
    """`foreign`: names of archives that were there before this ledger was, so that their lines are not of it."""

    id: str
    foreign: tuple[str, ...] = ()


async def ensure_identity(ledger: SqliteLedger) -> None:
    """A ledger gets its id once. The number of a line alone does not say which ledger it was."""

    def do(c: sqlite3.Connection) -> None:
        if tables.meta(c, _ID) is None:
            is_new = c.execute("SELECT 1 FROM journal LIMIT 1").fetchone() is None
            is_new = is_new and tables.meta(c, "archived_until") is None
            foreign = sorted(path.name for path in archive_folder(ledger.path).glob("*.gz")) if is_new else []
            tables.set_meta(c, _ID, str(uuid.uuid4()))
            tables.set_meta(c, _FOREIGN, "\n".join(foreign))

    if await ledger.read(read_identity) is None:
        await ledger.change(do)


def read_identity(c: sqlite3.Connection) -> Identity | None:
    found = tables.meta(c, _ID)
    return None if found is None else Identity(str(found), tuple(str(tables.meta(c, _FOREIGN) or "").splitlines()))


async def remember_shipped(ledger: SqliteLedger, line: int) -> None:
    """For rotation, which keeps what was not shipped. A number that is too small only keeps more."""
    await ledger.change(lambda c: tables.set_meta(c, _SHIPPED, line))


def shipped(c: sqlite3.Connection) -> int:
    return int(tables.meta(c, _SHIPPED) or 0)


async def take_nonce(ledger: SqliteLedger, nonce: str, expires: datetime, now: datetime) -> bool:
    """False: a request with it was taken before. Durable, so that a restart does not allow a replay."""

    def do(c: sqlite3.Connection) -> bool:
        until = micros(expires + _LONGER)
        c.execute("DELETE FROM meta WHERE substr(name, 1, ?) = ? AND value < ?", (len(_NONCE), _NONCE, micros(now)))
        added = c.execute("INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)", (f"{_NONCE}{nonce}", until))
        return added.rowcount == 1

    return await ledger.change(do)

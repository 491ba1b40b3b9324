"""What was measured, in SQLite: one-minute buckets with sum and count. Prunable; losing the last minute is harmless.
How older days are stored: `minutes.py`.

Own connection and thread with synchronous=NORMAL, so that samples cost no fsync and journal lines do not wait for them.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from math import isnan
from pathlib import Path
from typing import TypeVar

from gpukeeper.ledger.database import is_full, open_for_reading, open_for_writing, transaction, translated
from gpukeeper.ledger.lines import text
from gpukeeper.ledger.minutes import DAY, delete_minutes, read_means, unpack_day
from gpukeeper.model.series import NOT_MEASURED, Sample, Series, Signal, unbroken
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def open_signals(path: Path, *, write: bool) -> SqliteSignals:
    """`path` is the ledger's. For reading nothing is created or changed."""
    return SqliteSignals(path, open_for_writing(path, "NORMAL") if write else open_for_reading(path))


class SqliteSignals:
    """Made by `open_signals`. Samples that a full disk did not take are not measured."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="signals")

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def add(self, samples: Sequence[Sample]) -> None:
        if samples:
            await self._do(lambda c: self._add(c, tuple(samples)))

    async def series(self, keys: Sequence[str], since: datetime, until: datetime) -> Mapping[str, tuple[Series, ...]]:
        """A signal that was ever read is in the answer; without a reading in this window it is all not measured."""
        wanted = tuple(keys)
        return await self._do(lambda c: _all_series(c, wanted, since, until))

    async def prune(self, before: datetime) -> int:
        def do(c: sqlite3.Connection) -> int:
            with transaction(c):
                return prune(c, before)

        return await self._do(do)

    def _add(self, c: sqlite3.Connection, samples: Sequence[Sample]) -> None:
        try:
            with transaction(c):
                for sample in samples:
                    _add(c, sample)
        except sqlite3.OperationalError as error:
            if not is_full(error):
                raise
            # The reserve is for outcomes. What was not stored was not measured, and unmeasured keeps.

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def do() -> T:
            with translated(self.path):
                return work(self._connection)

        return await asyncio.wrap_future(self._thread.submit(do))


def prune(c: sqlite3.Connection, before: datetime) -> int:
    """Within a transaction. How many buckets went. A workload that was not measured since then is forgotten."""
    minute = _minute(before)
    gone = delete_minutes(c, minute)
    c.execute("DELETE FROM series WHERE newest < ?", (minute,))
    c.execute("DELETE FROM absent WHERE newest < ?", (minute,))
    return gone


def _add(c: sqlite3.Connection, sample: Sample) -> None:
    key, minute = text(sample.key), _minute(sample.at)
    if not isinstance(sample.value, Unknown):
        series = _series_id(c, (key, sample.signal.value, text(sample.device), int(sample.slice)), minute)
        if not isnan(sample.value):
            _measure(c, series, sample)
        # NaN is stored as NULL, and NULL + x is NULL: a minute with a reading that is no number is not measured.
        c.execute(
            "INSERT INTO buckets (series, minute, sum, count) VALUES (?, ?, ?, 1) "
            "ON CONFLICT DO UPDATE SET sum = sum + excluded.sum, count = count + 1",
            (series, minute, float(sample.in_one_minute(sample.value))),
        )
    elif sample.value.by_design:
        c.execute(
            "INSERT INTO absent (key, signal, why, newest) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET why = excluded.why, newest = max(newest, excluded.newest)",
            (key, sample.signal.value, text(sample.value.why), minute),
        )


def _series_id(c: sqlite3.Connection, names: tuple[str, str, str, int], minute: int) -> int:
    found = c.execute(
        "SELECT id, newest, EXISTS (SELECT 1 FROM days WHERE series = id AND day = ?) FROM series "
        "WHERE key = ? AND signal = ? AND device = ? AND slice = ?",
        (minute // DAY, *names),
    ).fetchone()
    if found is None:
        made = c.execute(
            "INSERT INTO series (key, signal, device, slice, newest) VALUES (?, ?, ?, ?, ?)", (*names, minute)
        )
        return int(made.lastrowid or 0)
    if found[2]:
        unpack_day(c, found[0], minute // DAY)
    if found[1] < minute:
        c.execute("UPDATE series SET newest = ? WHERE id = ?", (minute, found[0]))
    return int(found[0])


def _measure(c: sqlite3.Connection, series: int, sample: Sample) -> None:
    found = c.execute("SELECT since, until FROM series WHERE id = ?", (series,)).fetchone()
    before = (_moment(found[0]), _moment(found[1])) if found[1] is not None else None
    since, until = unbroken(before, sample)
    c.execute("UPDATE series SET since = ?, until = ? WHERE id = ?", (_micros(since), _micros(until), series))


def _all_series(
    c: sqlite3.Connection, keys: Sequence[str], since: datetime, until: datetime
) -> Mapping[str, tuple[Series, ...]]:
    first, last = _minute(since), _minute(until)
    start = datetime.fromtimestamp(first * 60, until.tzinfo)
    found: dict[str, tuple[Series, ...]] = {}
    for key in keys:
        if series := (*_read(c, text(key), start, (first, last)), *_absent(c, text(key), start)):
            found[key] = series
    return found


def _read(c: sqlite3.Connection, key: str, start: datetime, window: tuple[int, int]) -> list[Series]:
    found = []
    rows = c.execute("SELECT id, signal, device, slice, since, until FROM series WHERE key = ? ORDER BY id", (key,))
    for number, signal, device, part, since, until in rows.fetchall():
        times = (None, None) if until is None else (_moment(since), _moment(until))  # None: no reading was a number
        minutes = _minutes(c, number, *window)
        found.append(Series(Signal(signal), device, start, minutes, bool(part), since=times[0], until=times[1]))
    return found


def _minutes(c: sqlite3.Connection, series: int, first: int, last: int) -> tuple[float, ...]:
    means = [NOT_MEASURED] * (last - first + 1)
    for minute, mean in read_means(c, series, first, last):
        if mean is not None:
            means[minute - first] = mean
    return tuple(means)


def _absent(c: sqlite3.Connection, key: str, start: datetime) -> list[Series]:
    rows = c.execute("SELECT signal, why FROM absent WHERE key = ? ORDER BY id", (key,))
    return [Series(Signal(signal), "", start, (), missing=Unknown(why, by_design=True)) for signal, why in rows]


def _micros(at: datetime) -> int:
    """Exactly: a reading begins at the very moment at which the one before it ended."""
    return (at - EPOCH) // timedelta(microseconds=1)


def _moment(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def _minute(at: datetime) -> int:
    return int(at.timestamp()) // 60

"""What was measured, in SQLite: one-minute buckets with sum and count. Prunable; losing the last minute is harmless.
New minutes are a row each (`buckets`), older days of a series a row each (`days`), never both: a reading that comes
late takes its day out again, so what is read never depends on whether a day was packed. An own connection and thread
with synchronous=NORMAL: samples cost no fsync, and journal lines do not wait.
"""

from __future__ import annotations

import asyncio
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from itertools import accumulate, pairwise
from math import isnan
from pathlib import Path
from typing import Final, TypeVar

from gpukeeper.ledger.database import is_full, open_for_reading, open_for_writing, shrink_file, transaction, translated
from gpukeeper.ledger.lines import text
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.series import MINUTE, NOT_MEASURED, Sample, Series, Signal, minute_of, unbroken
from gpukeeper.model.unknown import Unknown

Minute = tuple[int, float | None, int]
"""Minute, sum and count. Without a sum a reading of that minute was no number."""

DAY_FORMAT: Final = 1
_HEAD = struct.Struct("<BHH")
_NOT_A_NUMBER = float("nan")  # stored for no sum: a sum is never NaN, SQLite makes it NULL
_STEP, _COUNT, _SUM, _PLACE = "H", "I", "Q", "H"


def encode(minutes: Sequence[Minute], begin: int = 0) -> bytes:
    """At least one minute, in order; `begin` is the first one of the day.

    The measured minutes of one series and day as one value: exact, in columns that compress well.

    Format 1: version, number of minutes, number of different sums; then, as zlib, the columns: from each minute to
    the next, counts, the different sums in the order of their bits, each as the difference to the one before, and
    which of them each minute has. A column has the lowest byte of every number first, then the next one: equal bytes
    side by side.
    """
    numbers, sums, counts = zip(*minutes, strict=True)
    bits = _bits(sums)
    different = sorted(set(bits))
    place = {one: number for number, one in enumerate(different)}
    columns = (
        (_STEP, _steps(numbers, begin)),
        (_COUNT, counts),
        (_SUM, _steps(different, 0)),
        (_PLACE, [place[one] for one in bits]),
    )
    body = b"".join(_column(kind, values) for kind, values in columns)
    return _HEAD.pack(DAY_FORMAT, len(minutes), len(different)) + zlib.compress(body)


def decode(stored: bytes, begin: int = 0) -> list[Minute]:
    """What was encoded. ValueError: it is damaged, or of another version."""
    minutes, counts, sums, places = _columns(stored, begin)
    return list(zip(minutes, [sums[place] for place in places], counts, strict=True))


def decode_means(stored: bytes, begin: int = 0) -> list[tuple[int, float | None]]:
    """The same as means."""
    minutes, counts, sums, places = _columns(stored, begin)
    if min(counts) == max(counts):  # usually: each sum is divided once
        by_place = [None if total is None else total / counts[0] for total in sums]
        return list(zip(minutes, [by_place[place] for place in places], strict=True))
    return [(minute, None if total is None else total / count) for minute, total, count in decode(stored, begin)]


def minutes_packed(stored: bytes) -> int:
    """How many minutes it has, from its first three bytes."""
    return int.from_bytes(stored[1:3], "little")


def _columns(stored: bytes, begin: int) -> tuple[Sequence[int], Sequence[int], Sequence[float | None], Sequence[int]]:
    """Minutes, counts, the different sums, and which of them each minute has."""
    try:
        version, minutes, different = _HEAD.unpack_from(stored)
        if version != DAY_FORMAT:
            raise ValueError(f"format {version}, this gpukeeper reads {DAY_FORMAT}")
        body, parts = zlib.decompress(stored[_HEAD.size :]), []
        for kind, length in ((_STEP, minutes), (_COUNT, minutes), (_SUM, different), (_PLACE, minutes)):
            size = length * struct.calcsize(f"<{kind}")
            parts.append(_numbers(kind, body[:size], length))
            body = body[size:]
    except (struct.error, zlib.error) as error:
        raise ValueError(str(error)) from None
    steps, counts, sum_steps, places = parts
    if not minutes or max(places) >= different:
        raise ValueError("its columns do not fit together")
    return tuple(accumulate((begin + steps[0], *steps[1:]))), counts, _sums(tuple(accumulate(sum_steps))), places


def _bits(sums: Sequence[float | None]) -> tuple[int, ...]:
    """Bits and not values: -0.0 equals 0.0, and NaN not even itself."""
    numbers = (_NOT_A_NUMBER if one is None else one for one in sums)
    return struct.unpack(f"<{len(sums)}Q", struct.pack(f"<{len(sums)}d", *numbers))


def _sums(bits: Sequence[int]) -> list[float | None]:
    numbers = struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}Q", *bits))
    return [one if one == one else None for one in numbers]  # noqa: PLR0124  NaN


def _steps(rising: Sequence[int], begin: int) -> Iterator[int]:
    return (after - before for before, after in pairwise((begin, *rising)))


def _column(kind: str, values: Sequence[int] | Iterator[int]) -> bytes:
    numbers = tuple(values)
    raw, width = struct.pack(f"<{len(numbers)}{kind}", *numbers), struct.calcsize(f"<{kind}")
    return b"".join(raw[byte::width] for byte in range(width))


def _numbers(kind: str, column: bytes, length: int) -> tuple[int, ...]:
    raw, width = bytearray(len(column)), struct.calcsize(f"<{kind}")
    for byte in range(width):
        raw[byte::width] = column[byte * length : (byte + 1) * length]
    return struct.unpack(f"<{length}{kind}", raw)


_M = TypeVar("_M", Minute, tuple[int, float | None])
DAY: Final = timedelta(days=1) // MINUTE
# What passes read and write all the time, and what comes late, stays a row each: windows of a few hours, histories of
# Prometheus, minutes that wait for the fleet database.
YOUNG: Final = timedelta(days=2)
SLICE: Final = 10  # days of series that are packed in one transaction: others wait this long, about 0.1 s
_PAGES: Final = 128  # free pages in one transaction, more than a slice leaves

_BUCKETS = "FROM buckets WHERE series = ? AND minute BETWEEN ? AND ?"
_PACKED = "SELECT day, minutes FROM days WHERE series = ? AND day BETWEEN ? AND ?"
# A day has a minute, so of two the second has one that is not before `since`.
_FIRST = """
SELECT min(minute), NULL FROM buckets WHERE series = :series AND minute >= :since
UNION ALL SELECT * FROM (SELECT day, minutes FROM days WHERE series = :series AND day >= :day ORDER BY day LIMIT 2)
"""
_OLDEST = """
SELECT id, (SELECT min(minute) FROM buckets WHERE series = id) AS oldest FROM series
WHERE id >= ? AND oldest < ? ORDER BY id LIMIT 1
"""
# By series: a day has no index of its own.
_DAYS = "FROM series s CROSS JOIN days d ON d.series = s.id WHERE d.day"


def read_minutes(c: sqlite3.Connection, series: int, first: int, last: int) -> list[Minute]:
    """Of this window, in minutes since 1970; in no order."""
    return _read_packed(c, f"SELECT minute, sum, count {_BUCKETS}", decode, (series, first, last))


def read_means(c: sqlite3.Connection, series: int, first: int, last: int) -> list[tuple[int, float | None]]:
    """The same as means. None: a reading of that minute was no number."""
    return _read_packed(c, f"SELECT minute, sum / count {_BUCKETS}", decode_means, (series, first, last))


def first_minute(c: sqlite3.Connection, series: int, since: int = 0) -> int | None:
    """The first that was measured and is not before `since`."""
    firsts = []
    for at, packed in c.execute(_FIRST, {"series": series, "since": since, "day": since // DAY}):
        if packed is not None:
            firsts += [minute for minute, _sum, _count in _unpacked(packed, series, at, decode) if minute >= since][:1]
        elif at is not None:
            firsts.append(at)
    return min(firsts, default=None)


def pack_days(c: sqlite3.Connection, now: datetime, start: int = 0, most: int = SLICE) -> int | None:
    """Within a transaction: one slice, beginning with the series `start`. Where the next one begins; None: done."""
    young = (int((now - YOUNG).timestamp()) // 60) // DAY
    following: int | None = start
    for _ in range(most):
        found = c.execute(_OLDEST, (following, young * DAY)).fetchone()
        if found is None:
            following = None
            break
        following = int(found[0])
        _pack(c, following, found[1] // DAY)
    shrink_file(c, _PAGES)
    return following


def unpack_day(c: sqlite3.Connection, series: int, day: int) -> None:
    """Within a transaction.

    Sums are added in the order in which they came.
    """
    found = c.execute("SELECT minutes FROM days WHERE series = ? AND day = ?", (series, day)).fetchone()
    if found is not None:
        c.executemany(
            "INSERT INTO buckets (series, minute, sum, count) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET sum = sum + excluded.sum, count = count + excluded.count",
            ((series, *minute) for minute in _unpacked(found[0], series, day, decode)),
        )
        c.execute("DELETE FROM days WHERE series = ? AND day = ?", (series, day))


def delete_minutes(c: sqlite3.Connection, before: int) -> int:
    """Within a transaction. How many were deleted."""
    gone = c.execute("DELETE FROM buckets WHERE minute < ?", (before,)).rowcount
    day, offset = divmod(before, DAY)
    whole = f"{_DAYS} < ?"
    gone += sum(minutes_packed(head) for (head,) in c.execute(f"SELECT substr(d.minutes, 1, 3) {whole}", (day,)))
    c.execute(f"DELETE FROM days WHERE rowid IN (SELECT d.rowid {whole})", (day,))  # noqa: S608
    for series, packed in c.execute(f"SELECT d.series, d.minutes {_DAYS} = ?", (day,)).fetchall() if offset else ():
        minutes = _unpacked(packed, series, day, decode)
        kept = [minute for minute in minutes if minute[0] >= before]
        gone += len(minutes) - len(kept)
        c.execute("DELETE FROM days WHERE series = ? AND day = ?", (series, day))
        if kept:
            _insert(c, series, day, kept)
    return gone


def unreadable_days(c: sqlite3.Connection) -> list[str]:
    """A sentence for each."""
    found = []
    for series, day, packed in c.execute("SELECT series, day, minutes FROM days"):
        try:
            _unpacked(packed, series, day, decode)
        except LedgerError as problem:
            found.append(str(problem))
    return found


def _pack(c: sqlite3.Connection, series: int, day: int) -> None:
    unpack_day(c, series, day)  # only after an older gpukeeper ran on, and stored late readings by itself
    window = (series, day * DAY, day * DAY + DAY - 1)
    _insert(c, series, day, c.execute(f"SELECT minute, sum, count {_BUCKETS} ORDER BY minute", window).fetchall())
    c.execute(f"DELETE {_BUCKETS}", window)


def _insert(c: sqlite3.Connection, series: int, day: int, minutes: list[Minute]) -> None:
    c.execute("INSERT INTO days (series, day, minutes) VALUES (?, ?, ?)", (series, day, encode(minutes, day * DAY)))


def _read_packed(
    c: sqlite3.Connection, question: str, unpack: Callable[[bytes, int], list[_M]], window: tuple[int, int, int]
) -> list[_M]:
    series, first, last = window
    with _one_state(c):
        found: list[_M] = c.execute(question, window).fetchall()
        days = c.execute(_PACKED, (series, first // DAY, last // DAY)).fetchall()
    for day, packed in days:
        minutes = _unpacked(packed, series, day, unpack)
        whole = first <= day * DAY and (day + 1) * DAY <= last + 1
        found += minutes if whole else [one for one in minutes if first <= one[0] <= last]
    return found


@contextmanager
def _one_state(c: sqlite3.Connection) -> Iterator[None]:
    """Of both tables, while another process packs a day."""
    if c.in_transaction:
        yield
        return
    c.execute("BEGIN")
    try:
        yield
    finally:
        c.execute("COMMIT")


def _unpacked(packed: bytes, series: int, day: int, unpack: Callable[[bytes, int], list[_M]]) -> list[_M]:
    """In minutes since 1970."""
    try:
        return unpack(packed, day * DAY)
    except ValueError as error:
        on = date(1970, 1, 1) + timedelta(days=day)
        raise LedgerError(
            f"The measurements of series {series} on {on} in the ledger cannot be read ({error}). They were not used. "
            "Restore a backup with `gpukeeper ledger restore FILE`."
        ) from error


T = TypeVar("T")


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
    minute = minute_of(before)
    gone = delete_minutes(c, minute)
    c.execute("DELETE FROM series WHERE newest < ?", (minute,))
    c.execute("DELETE FROM absent WHERE newest < ?", (minute,))
    return gone


def _add(c: sqlite3.Connection, sample: Sample) -> None:
    key, minute = text(sample.key), minute_of(sample.at)
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
    first, last = minute_of(since), minute_of(until)
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

"""The measured minutes of a series in SQLite: new ones a row each (`buckets`), older days a row each (`days`).

A day of a series is in one of the two. A reading that comes late takes its day out again, so sums are added in the
order in which they came, and what is read never depends on whether a day was packed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from typing import Final, TypeVar

from gpukeeper.ledger.database import shrink_file
from gpukeeper.ledger.days import Minute, decode, decode_means, encode, how_many
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.series import MINUTE

T = TypeVar("T", Minute, tuple[int, float | None])
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
    return _read(c, f"SELECT minute, sum, count {_BUCKETS}", decode, (series, first, last))


def read_means(c: sqlite3.Connection, series: int, first: int, last: int) -> list[tuple[int, float | None]]:
    """The same as means. None: a reading of that minute was no number."""
    return _read(c, f"SELECT minute, sum / count {_BUCKETS}", decode_means, (series, first, last))


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
    """Within a transaction."""
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
    gone += sum(how_many(head) for (head,) in c.execute(f"SELECT substr(d.minutes, 1, 3) {whole}", (day,)))
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


def _read(
    c: sqlite3.Connection, question: str, unpack: Callable[[bytes, int], list[T]], window: tuple[int, int, int]
) -> list[T]:
    series, first, last = window
    with _one_state(c):
        found: list[T] = c.execute(question, window).fetchall()
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


def _unpacked(packed: bytes, series: int, day: int, unpack: Callable[[bytes, int], list[T]]) -> list[T]:
    """In minutes since 1970."""
    try:
        return unpack(packed, day * DAY)
    except ValueError as error:
        on = date(1970, 1, 1) + timedelta(days=day)
        raise LedgerError(
            f"The measurements of series {series} on {on} in the ledger cannot be read ({error}). They were not used. "
            "Restore a backup with `gpukeeper ledger restore FILE`."
        ) from error

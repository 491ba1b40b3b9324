"""Rows that come in any order, kept in a temporary file and read again workload by workload.

Memory grows with the number of workloads, not with the length of the trace. The file is SQLite in a private directory
below TMPDIR, and is removed when the spool is no longer used; each process that reads it has its own connection.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from gpukeeper.model.errors import KeeperError
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.series import (
    MINUTE,
    NOT_MEASURED,
    BadRow,
    MadePasses,
    RecordedRun,
    RecordedSeries,
    Signal,
    moment_of,
)
from gpukeeper.model.subject import PlaceKey

CHUNK = 500_000  # points in memory before they are written
BAD_KEPT = 100

_TABLE = "CREATE TABLE chunks (series INTEGER NOT NULL, minutes BLOB NOT NULL, points BLOB NOT NULL)"

Span: TypeAlias = tuple[datetime | None, datetime | None]  # started, ended
Points: TypeAlias = "tuple[array[int], array[float]]"  # minutes since the epoch, in order; values


class BadRows:
    """Counts all, keeps the first. `unit`: what the numbers count."""

    def __init__(self) -> None:
        self.unit = "line"
        self.count = 0
        self.kept: list[BadRow] = []

    def add(self, line: int, why: str) -> None:
        self.count += 1
        if len(self.kept) < BAD_KEPT:
            self.kept.append(BadRow(line, why[:300], self.unit))


class Workload(msgspec.Struct, kw_only=True):
    """What is known of one besides its measurements. `gpus`: how many it had, if no measurement names them."""

    name: str
    owner: str | None = None
    class_: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = {}
    spans: dict[Span, None] = {}  # in their order, each once
    gpus: int = 0
    series: list[Column] = []


class Column(msgspec.Struct):
    """One signal of one device of a workload, and what of it is not yet written."""

    number: int
    signal: Signal
    device: str
    slice: bool
    minutes: array[int]
    points: array[float]
    filled: bool = False


class Stamp(NamedTuple):
    """What all runs of a trace have in common."""

    source: str
    platform: str
    kind: str
    place: str = "trace"
    new_run_after: timedelta = timedelta(days=1)


class Spool:
    """Rows are added, then `trace` closes it for more."""

    def __init__(self) -> None:
        self.workloads: dict[str, Workload] = {}
        self.bad = BadRows()
        self.rows = 0
        self.first: int | None = None
        self.last: int | None = None
        self._series: dict[tuple[str, Signal, str, bool], Column] = {}
        self._waiting = 0
        self._connections: dict[int, sqlite3.Connection] = {}
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="gpukeeper-trace-"))
        except OSError as error:
            raise _no_room(error) from error
        self.close = weakref.finalize(self, _remove, self._folder, os.getpid(), self._connections)
        self._do("PRAGMA journal_mode = OFF")
        self._do("PRAGMA synchronous = OFF")
        self._do(_TABLE)

    def workload(self, name: str) -> Workload:
        found = self.workloads.get(name)
        if found is None:
            found = self.workloads[name] = Workload(name=name, spans={}, series=[])
        return found

    def column(self, workload: Workload, signal: Signal, device: str, *, part: bool = False) -> Column:
        series = self._series.get((workload.name, signal, device, part))
        if series is None:
            series = Column(len(self._series), signal, device, part, array("i"), array("f"))
            self._series[workload.name, signal, device, part] = series
            workload.series.append(series)
        return series

    def add(self, column: Column, minute: int, value: float) -> None:
        """One measured minute, which `reach` includes. Several of the same minute become their mean."""
        column.minutes.append(minute)
        column.points.append(value)
        self._waiting += 1
        if self._waiting >= CHUNK:
            self._flush()

    def reach(self, first: int, last: int) -> None:
        """These minutes belong to the trace."""
        self.first = first if self.first is None else min(first, self.first)
        self.last = last if self.last is None else max(last, self.last)

    def finish(self) -> None:
        self._flush()
        self._do("CREATE INDEX chunks_series ON chunks (series)")

    def points(self, series: Column) -> Points:
        """In the order of time, one value for each minute."""
        minutes, values = array("i"), array("f")
        for some, more in self._do("SELECT minutes, points FROM chunks WHERE series = ? ORDER BY rowid", series.number):
            minutes.frombytes(some)
            values.frombytes(more)
        return _in_order(minutes, values)

    def _flush(self) -> None:
        rows = [
            (one.number, one.minutes.tobytes(), one.points.tobytes()) for one in self._series.values() if one.minutes
        ]
        try:
            with self._connection() as connection:
                connection.executemany("INSERT INTO chunks VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise _no_room(error) from error
        for one in self._series.values():
            one.filled = one.filled or bool(one.minutes)
            del one.minutes[:], one.points[:]
        self._waiting = 0

    def _connection(self) -> sqlite3.Connection:
        """A connection must not be used in two processes."""
        found = self._connections.get(os.getpid())
        if found is None:
            found = sqlite3.connect(self._folder / "spool.db", check_same_thread=False)
            self._connections[os.getpid()] = found
        return found

    def _do(self, statement: str, *values: int) -> sqlite3.Cursor:
        try:
            return self._connection().execute(statement, values)
        except sqlite3.Error as error:
            raise _no_room(error) from error


class SpooledTrace:
    """The Trace of a spool that has all rows."""

    def __init__(self, spool: Spool, stamp: Stamp) -> None:
        spool.finish()
        self._spool, self._stamp = spool, stamp

    @property
    def source(self) -> str:
        return self._stamp.source

    @property
    def begin(self) -> datetime:
        return moment_of(self._spool.first or 0)

    @property
    def end(self) -> datetime:
        """When the last measured minute was over."""
        return EPOCH if self._spool.last is None else moment_of(self._spool.last + 1)

    @property
    def signals(self) -> frozenset[Signal]:
        """What one workload has, a daemon would have measured of all."""
        columns = (one for workload in self._spool.workloads.values() for one in workload.series)
        return frozenset(one.signal for one in columns if one.filled)

    @property
    def rows(self) -> int:
        return self._spool.rows

    @property
    def bad_count(self) -> int:
        return self._spool.bad.count

    @property
    def bad(self) -> tuple[BadRow, ...]:
        return tuple(self._spool.bad.kept)

    @property
    def made(self) -> Mapping[PlaceKey, MadePasses]:
        return {}

    def close(self) -> None:
        self._spool.close()

    def runs(self) -> Iterator[RecordedRun]:
        taken = set(self._spool.workloads)  # a workload may be called like the second run of another
        for workload in self._spool.workloads.values():
            measured = [(one, *self._spool.points(one)) for one in workload.series]
            spans = self._spans(workload, [minutes for _series, minutes, _values in measured])
            for number, (started, ended) in enumerate(spans):
                name = unique(workload.name, taken, number + 1) if number else workload.name
                yield self._run(workload, measured, (started, ended), name, spans[0][0])

    def _spans(self, workload: Workload, columns: list[array[int]]) -> list[tuple[datetime, datetime | None]]:
        """Start and end of each run: as the source has it, or from gaps in what was measured."""
        given = sorted(
            {(started, ended) for started, ended in workload.spans if started is not None},
            key=lambda one: (one[0], one[1] or self.end),
        )
        if given:
            known = dict(given)  # an end that became known later wins
            known |= {started: ended for started, ended in given if ended is not None}
            found = [(started, self._over(ended)) for started, ended in known.items()]
            return [one for one in found if one[0] < self.end and (one[1] is None or one[1] > self.begin)]
        limit = self._stamp.new_run_after // MINUTE
        pieces: list[tuple[int, int]] = []
        for first, last in sorted(piece for minutes in columns for piece in _pieces(minutes, limit)):
            if pieces and first - pieces[-1][1] <= limit:
                pieces[-1] = (pieces[-1][0], max(pieces[-1][1], last))
            else:
                pieces.append((first, last))
        ends = [ended for _started, ended in workload.spans if ended is not None]
        after = max(ends, default=None)
        final = self._spool.last or 0
        found = [(moment_of(first), moment_of(last + 1) if final - last > limit else None) for first, last in pieces]
        if after is not None and found and found[-1][0] < after:
            found[-1] = (found[-1][0], self._over(after))
        return found

    def _over(self, ended: datetime | None) -> datetime | None:
        return None if ended is None or ended > self.end else ended

    def _run(
        self,
        workload: Workload,
        measured: list[tuple[Column, array[int], array[float]]],
        span: tuple[datetime, datetime | None],
        name: str,
        first_start: datetime,
    ) -> RecordedRun:
        begin, end = max(span[0], self.begin), span[1] or self.end
        first, last = _minute(begin), _minute(end - timedelta(microseconds=1))
        series = tuple(
            RecordedSeries(one.signal, one.device, moment_of(first), dense, one.slice)
            for one, minutes, values in measured
            if (dense := _dense(minutes, values, first, last)) is not None
        )
        devices = dict.fromkeys(one.device for one in series if one.signal is Signal.GPU)
        return RecordedRun(
            name=name,
            started=span[0],
            ended=span[1],
            devices=tuple(devices) or tuple(f"{workload.name}/{number}" for number in range(workload.gpus)),
            series=series,
            owner=workload.owner,
            class_=workload.class_ or "unknown",
            platform=self._stamp.platform,
            place=self._stamp.place,
            namespace=workload.namespace,
            kind=self._stamp.kind,
            labels=workload.labels,
            first_start=first_start if first_start < span[0] else None,
        )


def unique(name: str, taken: set[str], first: int = 2) -> str:
    """`name`, `name#2`, `name#3`. `first`: the lowest number that may be free."""
    found, number = name, first - 1
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    taken.add(found)
    return found


def _in_order(minutes: array[int], values: array[float]) -> Points:
    if not minutes or minutes == array("i", range(minutes[0], minutes[0] + len(minutes))):
        return minutes, values
    sums: dict[int, tuple[float, int]] = {}
    for minute, value in zip(minutes, values, strict=True):
        total, count = sums.get(minute, (0.0, 0))
        sums[minute] = (total + value, count + 1)
    order = sorted(sums)
    return array("i", order), array("f", (sums[minute][0] / sums[minute][1] for minute in order))


def _pieces(minutes: array[int], limit: int) -> Iterator[tuple[int, int]]:
    """First and last minute of each part without a gap that is longer than the limit."""
    if not minutes:
        return
    first = minutes[0]
    if minutes[-1] - first >= len(minutes):  # otherwise there is no gap
        for before, after in pairwise(minutes):
            if after - before > limit:
                yield first, before
                first = after
    yield first, minutes[-1]


def _dense(minutes: array[int], values: array[float], first: int, last: int) -> array[float] | None:
    """One value for each minute from `first` to `last`. None: nothing was measured there."""
    begin, end = bisect_left(minutes, first), bisect_right(minutes, last)
    if begin == end:
        return None
    some, dense = values[begin:end], array("f", (NOT_MEASURED,)) * (last - first + 1)
    if minutes[end - 1] - minutes[begin] == end - begin - 1:
        dense[minutes[begin] - first : minutes[end - 1] - first + 1] = some
    else:
        for minute, value in zip(minutes[begin:end], some, strict=True):
            dense[minute - first] = value
    return dense


def _minute(at: datetime) -> int:
    return (at - EPOCH) // MINUTE


def _no_room(error: Exception) -> KeeperError:
    return KeeperError(
        f"The temporary file for the trace in {tempfile.gettempdir()} cannot be used: {error}. Nothing was replayed. "
        "Free some space there, or name another directory with TMPDIR."
    )


def _remove(folder: Path, owner: int, connections: dict[int, sqlite3.Connection]) -> None:
    """Not in a child: its parent still reads it."""
    mine = connections.pop(os.getpid(), None)
    if mine is not None:
        mine.close()
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)

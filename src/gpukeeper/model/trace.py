"""Recorded work: one run of a workload from its start to its end, and what was measured of it, minute by minute.

NaN is "not measured". A source never makes a value for a minute of which it has no row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from gpukeeper.model.identity import PlaceKey
from gpukeeper.model.memory import Hold
from gpukeeper.model.series import Signal


class RecordedSeries(msgspec.Struct, frozen=True):
    """`minutes[0]` is the minute that begins at `start`, a whole minute in UTC. Means of minutes; `array("f")`."""

    signal: Signal
    device: str
    start: datetime
    minutes: array[float]
    slice: bool = False  # a part of a GPU


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `name` is unique in its trace. `ended` None: it still ran when the trace ended."""

    name: str
    started: datetime
    ended: datetime | None
    devices: tuple[str, ...]
    series: tuple[RecordedSeries, ...]
    owner: str | None = None
    class_: str = "unknown"  # as its platform would recognize it; `match` of the policy is applied to the rest
    platform: str = "trace"  # a source that knows better says so
    place: str = "trace"
    namespace: str = ""
    kind: str = "workload"
    labels: Mapping[str, str] = {}
    holds: tuple[Hold, ...] = ()
    first_start: datetime | None = None  # of its workload, if this run is a later one
    absent: tuple[Signal, ...] = ()  # signals that it cannot have, such as a terminal
    stopped: bool = False  # gpukeeper stopped it at `ended`: what it would have done afterwards is not known
    reachable: bool = True  # False: warnings did not reach its owner


class MadePasses(msgspec.Struct, frozen=True):
    """The passes that a daemon made at one place, in order, with how much it saw there, how much of that ran (0: not
    recorded), and how many steps it took on what is no run of the trace. `scarce`: when GPUs there became scarce, and
    when they were not any more, in turn."""

    at: tuple[datetime, ...] = ()
    seen: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    scarce: tuple[datetime, ...] = ()


class TraceTime(msgspec.Struct, frozen=True):
    """From when to when was recorded. Runs may be older, and may go on."""

    begin: datetime
    end: datetime


class BadRow(msgspec.Struct, frozen=True):
    """A row that was not used. `line` counts from 1, with the header; a file without lines counts rows (`unit`)."""

    line: int
    why: str
    unit: str = "line"

    @property
    def words(self) -> str:
        return f"{self.unit} {self.line}: {self.why}"


class Trace(Protocol):
    """Opened by a source. `begin`, `end` and `signals` are known before the first run is read; `bad` is complete after
    the last. `runs` can be called more than once, and gives the runs in the same order each time."""

    @property
    def source(self) -> str: ...
    @property
    def begin(self) -> datetime: ...
    @property
    def end(self) -> datetime: ...
    @property
    def signals(self) -> frozenset[Signal]: ...  # recorded of every run: where one is missing, it was not measured
    @property
    def rows(self) -> int: ...
    @property
    def bad_count(self) -> int: ...
    @property
    def bad(self) -> tuple[BadRow, ...]: ...  # the first hundred
    @property
    def made(self) -> Mapping[PlaceKey, MadePasses]: ...  # empty unless a daemon recorded it
    def runs(self) -> Iterator[RecordedRun]: ...

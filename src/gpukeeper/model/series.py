"""What was measured over time, policy-free: signals in one-minute buckets, recorded runs of workloads, hours of GPUs.

NaN is "not measured", and NaN is never below a threshold; no value is made for a minute that was not measured. A
bucket with a value may have been measured for five of its sixty seconds. So each reading has the start of its
interval, and a series has the time since when it was measured without a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Protocol

import msgspec

from gpukeeper.model.subject import Hold, PlaceKey
from gpukeeper.model.unknown import Unknown, direct

NOT_MEASURED = float("nan")
MINUTE = timedelta(minutes=1)
# Two readings of a counter prove what happened between them only as a mean. Over a longer time they are two beginnings.
BRIDGED_MAX = 2 * MINUTE
_NOTHING = timedelta()


@direct
class Signal(StrEnum):
    GPU = "gpu"  # percent of time with work on the device
    CPU = "cpu"  # percent of one core
    NETWORK = "network"  # bytes per second
    DISK = "disk"  # bytes per second
    TERMINAL = "terminal"  # 1 in a minute with keyboard input


class Series(msgspec.Struct, frozen=True, gc=False):
    """One signal of one workload. `minutes[0]` is the minute beginning at `start`; the last is the newest.

    Measured without a gap from `since` to `until`. Without them every bucket that has a value was measured in full.
    """

    signal: Signal
    device: str
    start: datetime
    minutes: tuple[float, ...]
    slice: bool = False  # a part of a GPU: it has a threshold of its own
    missing: Unknown | None = None  # by_design: skipped and named; otherwise the read failed and blocks
    since: datetime | None = None
    until: datetime | None = None


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One reading of one signal, kept as the mean (GPU: the maximum of means) of its minute."""

    key: str
    signal: Signal
    device: str
    at: datetime
    value: float | Unknown
    slice: bool = False
    since: datetime | None = None  # the value is the mean from then to `at`; None: of this moment only

    @property
    def span(self) -> timedelta:
        """The time it covers. Zero if the clock was set meanwhile, or if that is too long for a proof."""
        if self.since is None:
            return _NOTHING
        span = self.at - self.since
        return span if _NOTHING <= span <= BRIDGED_MAX else _NOTHING

    def in_one_minute(self, value: float) -> float:
        """What `value` is at most in any minute that it covers: all of it may have happened in that one."""
        span = self.span
        if span <= MINUTE:
            return value
        worst = value * (span / MINUTE)
        return min(worst, max(value, 100.0)) if self.signal is Signal.GPU else worst


def unbroken(before: tuple[datetime, datetime] | None, sample: Sample) -> tuple[datetime, datetime]:
    """Since when and until when there was no gap, with one more reading. One that is older than the newest (the clock
    was set back, or history is read again) starts again."""
    begin = sample.at - sample.span
    if before is None or begin > before[1] or sample.at < before[1]:
        return begin, sample.at
    return before[0], sample.at


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


WHOLE_HOUR = (1 << 60) - 1
OUTSIDE = "outside"  # the class of a device that is held by processes which are no workload
QUARANTINE = "quarantine"  # the class of a device that must not be used


class Holder(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What had a device. Empty: unknown, or none. Without a key no workload had it."""

    key: str = ""
    path: str = ""
    owner: str = ""
    class_: str = ""
    group: str = ""


FREE = Holder()


class HourUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One hour of one device and one holder. `hour`: hours since 1970, UTC. `unknown`: held, and its use was not
    measured. `free`: only without a holder.

    One bit stands for one minute (bit 0: the first of the hour). So the same minutes can be recorded again without
    being counted twice, and what two holders share is still visible.
    """

    hour: int
    place: str
    device: str
    holder: Holder = FREE
    active: int = 0
    idle: int = 0
    unknown: int = 0
    free: int = 0

    @property
    def minutes(self) -> int:
        """Every minute it has something about."""
        return self.active | self.idle | self.unknown | self.free


class DevicePresence(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A device from `since` to `until` (minutes since 1970). `listed`: in the inventory of its place, so that a minute
    about which nothing is recorded is a minute that was not measured. `share`: of a whole GPU; None: a slice of unknown
    size."""

    place: str
    device: str
    since: int
    until: int
    model: str = ""
    share: float | None = 1.0
    listed: bool = True

    def in_hour(self, hour: int) -> int:
        """The minutes of that hour in which it was there."""
        first, last = max(self.since - hour * 60, 0), min(self.until - hour * 60, 60)
        return (1 << last) - (1 << first) if first < last else 0


class UsageFold(msgspec.Struct, frozen=True, kw_only=True):
    """What one reading of signals and claims adds. `absent`: place and uuid of devices that are provably not there."""

    devices: tuple[DevicePresence, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    hours: tuple[HourUse, ...] = ()


class RecordedHour(msgspec.Struct, frozen=True, gc=False):
    """All that is known about one device in one hour."""

    hour: int
    device: DevicePresence
    uses: tuple[HourUse, ...]


def merged_uses(before: HourUse, added: HourUse) -> HourUse:
    """Of the same hour, device and holder. The newest measurement of a minute counts; what was not measured replaces
    no measurement."""
    measured = added.active | added.idle | added.free
    kept = before.active | before.idle | before.free
    return msgspec.structs.replace(
        before,
        active=before.active & ~measured | added.active,
        idle=before.idle & ~measured | added.idle,
        free=before.free & ~measured | added.free,
        unknown=(before.unknown | added.unknown) & ~(measured | kept),
    )


def minute_of(at: datetime) -> int:
    return int(at.timestamp()) // 60


def moment_of(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)

"""Signals over time, policy-free: one-minute buckets. NaN is "not measured", and NaN is never below a threshold.

A bucket with a value may have been measured for five of its sixty seconds. So each reading has the start of its
interval, and a series has the time since when it was measured without a gap.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpukeeper.model.direct import direct
from gpukeeper.model.unknown import Unknown

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

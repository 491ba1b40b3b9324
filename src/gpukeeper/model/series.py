"""Signals over time, policy-free: one-minute buckets. NaN is "not measured", and NaN is never below a threshold."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from gpukeeper.model.direct import direct
from gpukeeper.model.unknown import Unknown

NOT_MEASURED = float("nan")


@direct
class Signal(StrEnum):
    GPU = "gpu"  # percent of time with work on the device
    CPU = "cpu"  # percent of one core
    NETWORK = "network"  # bytes per second
    DISK = "disk"  # bytes per second
    TERMINAL = "terminal"  # 1 in a minute in which somebody typed


class Series(msgspec.Struct, frozen=True):
    """One signal of one workload. `minutes[0]` is the minute beginning at `start`; the last is the newest."""

    signal: Signal
    device: str
    start: datetime
    minutes: tuple[float, ...]
    slice: bool = False  # a part of a GPU: it has a threshold of its own
    missing: Unknown | None = None  # by_design: skipped and named; otherwise the read failed and blocks


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One reading of one signal, kept as the mean (GPU: the maximum of means) of its minute."""

    key: str
    signal: Signal
    device: str
    at: datetime
    value: float | Unknown
    slice: bool = False

"""What is to be read of one workload, what was reported of it so far, and what is needed of a Prometheus for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeAlias

import msgspec

from gpukeeper.devices.prometheus import SeriesSelector, TimeSeries
from gpukeeper.model.series import Signal
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.minutes import Pod, Share

AT_ONCE, LETTERS_MAX = 64, 1500  # of names in one query: a URL must not grow too long

Run: TypeAlias = tuple[str, str]  # of which object, in which incarnation


class History(Protocol):
    """What is needed of a Prometheus; implemented by devices/prometheus.py."""

    async def clock(self) -> datetime | Unknown: ...
    async def label_names(self, name: str, since: datetime, until: datetime) -> frozenset[str] | Unknown: ...
    async def series(
        self, wheres: Sequence[SeriesSelector], since: datetime, until: datetime
    ) -> list[Mapping[str, str]] | Unknown: ...
    async def raw(self, where: SeriesSelector, since: datetime, until: datetime) -> list[TimeSeries] | Unknown: ...
    async def range(
        self, query: str, since: datetime, until: datetime, step: timedelta
    ) -> list[TimeSeries] | Unknown: ...


class RunningPod(msgspec.Struct, frozen=True, gc=False):
    """A living pod. A former pod with its name had another uid and started earlier."""

    uid: str
    started: datetime | None = None


class PendingMeasurement(msgspec.Struct, frozen=True):
    """What is to be read of one workload: its GPUs by pod, and from which minute on each pod's readings are its own."""

    subject: Subject
    devices: Mapping[Pod, tuple[str, ...]]
    begins: Mapping[Pod, int]
    uids: Mapping[Pod, str]
    first: int

    @property
    def run(self) -> Run:
        return self.subject.ref.uid, self.subject.seen.incarnation


class RunProgress(msgspec.Struct):
    """What was reported for one run so far."""

    read: datetime
    done: int | None = None  # the last minute that is settled
    shares: dict[Pod, dict[Share, tuple[str, int]]] = {}  # which device each series is, and when it was last seen
    early: dict[tuple[str, int], float] = {}  # busy minutes that were reported before their end
    counted: set[tuple[Pod, Signal]] = set()  # what was ever measured of each pod


def batches(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """As many names as fit into one query."""
    batch: list[str] = []
    for name in names:
        if batch and (len(batch) >= AT_ONCE or sum(map(len, batch)) + len(name) > LETTERS_MAX):
            yield tuple(batch)
            batch = []
        batch.append(name)
    if batch:
        yield tuple(batch)

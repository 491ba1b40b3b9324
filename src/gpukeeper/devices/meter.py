"""Readings of what workloads on this machine do: their GPUs, and everything else by counters that grow.

A device that several share is busy for all of them: whose work it is cannot be told everywhere, and busy keeps.
Counters are compared with those of the reading before; a first reading takes a short window of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from gpukeeper.devices.busy import Use
from gpukeeper.devices.counters import Counters, rates
from gpukeeper.devices.usage import GpuUsage
from gpukeeper.engine.blocking import in_thread
from gpukeeper.engine.ports import Clock, Meter
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown

WINDOW = 2.0  # seconds, where there is no reading before
READING = timedelta(seconds=20)
FORGOTTEN = 600.0  # seconds: what was not read for this long begins anew
SECONDARY = (Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL)
NOT_READ = Unknown("its processes could not be looked at")
Run: TypeAlias = tuple[str, str]  # of which thing, in which incarnation
Reading: TypeAlias = tuple[float, Counters]


class Meters:
    """Several meters as one. Each speaks of the workloads it knows."""

    def __init__(self, *meters: Meter) -> None:
        self._meters = meters

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        readings = await asyncio.gather(*(meter.read(subjects) for meter in self._meters))
        return [sample for reading in readings for sample in reading]


class GpuMeter:
    """`platforms`: those whose workloads run on this very machine."""

    def __init__(self, usage: GpuUsage, clock: Clock, platforms: Collection[str]) -> None:
        self._usage, self._clock, self._platforms = usage, clock, frozenset(platforms)

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        here = [one for one in subjects if one.ref.platform in self._platforms]
        if not here:
            return ()
        use = await self._usage.read()
        now = self._clock.now()
        return [sample for one in here for sample in samples(one, use, now)]


class CounterMeter:
    """`count` reads the counters of one workload, in a thread; None: it could not be found."""

    def __init__(
        self,
        platform: str,
        clock: Clock,
        count: Callable[[Subject], Counters | None],
        *,
        window: float = WINDOW,
        deadline: timedelta = READING,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._platform, self._clock, self._count, self._window, self._ticks = platform, clock, count, window, ticks
        self._deadline = deadline
        self._before: dict[Run, Reading] = {}
        self._hangs: threading.Event | None = None  # set once the reading that took too long has ended

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        mine = [one for one in subjects if one.ref.platform == self._platform]
        new = [one for one in mine if _run(one) not in self._before]
        if new:
            self._before |= await self._read_all(new)
            await asyncio.sleep(self._window)
        after = await self._read_all(mine) if mine else {}
        now = self._clock.now()
        samples = [sample for one in mine for sample in self._compare(one, after, now)]
        steady = self._ticks()
        kept = {run: one for run, one in self._before.items() if steady - one[0] < FORGOTTEN}
        self._before = kept | after
        return samples

    def _compare(self, subject: Subject, after: Mapping[Run, Reading], now: datetime) -> list[Sample]:
        key, run = subject.ref.key, _run(subject)
        if run not in self._before or run not in after:
            return [Sample(key, signal, "", now, NOT_READ) for signal in SECONDARY]
        (begin, old), (end, new) = self._before[run], after[run]
        return [Sample(key, signal, "", now, value) for signal, value in rates(old, new, end - begin).items()]

    async def _read_all(self, subjects: Sequence[Subject]) -> dict[Run, Reading]:
        ended = threading.Event()

        def read() -> dict[Run, Reading]:
            try:
                found = ((one, self._count(one)) for one in subjects)
                return {_run(one): (self._ticks(), counters) for one, counters in found if counters is not None}
            finally:
                ended.set()

        if self._hangs is not None and not self._hangs.is_set():
            return {}  # an earlier reading still hangs, and each costs a thread
        try:
            return await in_thread(read, self._deadline)
        except TimeoutError:
            self._hangs = ended
        except OSError:
            pass
        return {}  # not measured, and not measured keeps


def _run(subject: Subject) -> Run:
    return subject.ref.uid, subject.seen.incarnation


def samples(subject: Subject, use: Mapping[str, Use] | Unknown, now: datetime) -> list[Sample]:
    if isinstance(subject.devices, Unknown):
        return []
    return [_sample(subject.ref.key, uuid, use, now) for uuid in subject.devices]


def _sample(key: str, uuid: str, use: Mapping[str, Use] | Unknown, now: datetime) -> Sample:
    if isinstance(use, Unknown) or uuid not in use:
        why = use if isinstance(use, Unknown) else Unknown(f"the driver says nothing of {uuid}")
        return Sample(key, Signal.GPU, uuid, now, why)
    return Sample(key, Signal.GPU, uuid, now, use[uuid].busy, slice=use[uuid].slice)

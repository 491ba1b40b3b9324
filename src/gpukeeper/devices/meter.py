"""Readings of what workloads on this machine do: how busy each GPU is, read through one process that keeps the driver
open, and everything else by counters that grow.

A device that several share counts as busy for all of them: it cannot always be attributed, and busy means keep.
While GPUs are read the driver has one client more, and no GPU can be reset: close() it before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.prometheus import fetch_dcgm
from gpukeeper.devices.busy import Export, GpuUse, UsageJudge
from gpukeeper.devices.counters import Counters, rates
from gpukeeper.devices.driver.client import CHILD, DRIVER_LOADED, TO_OPEN, DriverClient, gpus_in
from gpukeeper.devices.driver.facts import DriverReply
from gpukeeper.model.ports import Clock, Meter
from gpukeeper.model.series import BRIDGED_MAX, Sample, Signal
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

DRIVER_DEADLINE = timedelta(seconds=10)
FIRST_PAUSE = timedelta(seconds=5)

FetchExport: TypeAlias = Callable[[str, timedelta], Awaitable[Export | Unknown]]


class GpuUsage:
    def __init__(
        self,
        clock: Clock,
        *,
        exporter: str | None = None,  # address of a DCGM exporter
        deadline: timedelta = DRIVER_DEADLINE,
        child: Sequence[str] = CHILD,
        driver: str = DRIVER_LOADED,
        ticks: Callable[[], float] = time.monotonic,
        fetch: FetchExport = fetch_dcgm,
    ) -> None:
        self._clock, self._exporter, self._deadline, self._fetch = clock, exporter, deadline, fetch
        self._driver = Path(driver)
        self._client = DriverClient(child, deadline, to_open=TO_OPEN, pause=FIRST_PAUSE, ticks=ticks)
        self._judge = UsageJudge()

    async def read(self) -> Mapping[str, GpuUse] | Unknown:
        """Since the previous reading, by uuid. A GPU or slice that is not included is unknown."""
        # The driver is queried last and nothing is awaited afterwards: so readings are judged in the order they were
        # made.
        exported = await self._exported()
        gpus = gpus_in(await self._query(), self._driver.exists())
        return gpus if isinstance(gpus, Unknown) else self._judge.judge(gpus, self._clock.now(), exported)

    def close(self) -> None:
        """Ends the process and so closes the driver. The next reading starts another."""
        self._client.close()

    async def _query(self) -> DriverReply | Unknown:
        longest = self._client.longest
        try:
            return await in_thread(lambda: self._client.query("usage"), longest)
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(longest)}")

    async def _exported(self) -> Export | Unknown | None:
        return None if self._exporter is None else await self._fetch(self._exporter, self._deadline)


WINDOW = 2.0  # seconds, if there is no previous reading
READING = timedelta(seconds=20)
READING_VARIES = timedelta(seconds=5)  # the driver's response time is in no window
FORGOTTEN = 600.0  # seconds: after such a gap readings start again
SECONDARY = (Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL)
NOT_READ = Unknown("its processes could not be read")
Run: TypeAlias = tuple[str, str]  # of which subject, in which incarnation
Reading: TypeAlias = tuple[float, datetime, Counters]  # by the monotonic clock, by the wall clock


class Meters:
    """Several meters as one. Each returns the workloads it knows."""

    def __init__(self, *meters: Meter) -> None:
        self._meters = meters

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        readings = await asyncio.gather(*(meter.read(subjects) for meter in self._meters))
        return [sample for reading in readings for sample in reading]


class GpuMeter:
    """`platforms`: those whose workloads run on this machine.

    A query of the driver ends the window of every GPU, also of those that were not requested. So readings are kept
    until each workload was given all of them.
    """

    def __init__(self, usage: GpuUsage, clock: Clock, platforms: Collection[str]) -> None:
        self._usage, self._clock, self._platforms = usage, clock, frozenset(platforms)
        self._read: dict[str, list[BusyInterval]] = {}  # by uuid: without a gap, oldest first
        self._given: dict[tuple[str, str], datetime] = {}  # by key and uuid: up to when

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        here = [one for one in subjects if one.ref.platform in self._platforms]
        if not here:
            return ()
        use, now = await self.measure()
        self._given = {which: at for which, at in self._given.items() if now - at <= BRIDGED_MAX}
        return [self._sample(one.ref.key, uuid, use, now) for one in here for uuid in devices_of(one)]

    async def measure(self) -> tuple[Mapping[str, GpuUse] | Unknown, datetime]:
        """Reads all GPUs now. Workloads are given this reading with their next one."""
        use = await self._usage.read()
        now = self._clock.now()
        found = {} if isinstance(use, Unknown) else use
        self._read = {uuid: self._joined(uuid, one, now) for uuid, one in found.items()}
        return use, now

    def busiest(self, uuid: str, since: datetime) -> float | None:
        """The largest reading after `since`, of those up to now without a gap."""
        return max((one.percent for one in self._read.get(uuid, ()) if one.at > since), default=None)

    def _joined(self, uuid: str, use: GpuUse, now: datetime) -> list[BusyInterval]:
        """The readings of a GPU that continue without a gap, with this one."""
        if isinstance(use.busy, Unknown):
            return []
        before = [one for one in self._read.get(uuid, ()) if now - BRIDGED_MAX <= one.at <= now]
        since = now - timedelta(seconds=use.covered_s)
        if before and since - before[-1].at <= READING_VARIES:
            return [*before, BusyInterval(before[-1].at, now, use.busy)]
        return [BusyInterval(since, now, use.busy)]

    def _sample(self, key: str, uuid: str, use: Mapping[str, GpuUse] | Unknown, now: datetime) -> Sample:
        if isinstance(use, Unknown) or uuid not in use:
            why = use if isinstance(use, Unknown) else Unknown(f"the driver does not report {uuid}")
            return Sample(key, Signal.GPU, uuid, now, why)
        found, busy = use[uuid], use[uuid].busy
        if isinstance(busy, Unknown):
            return Sample(key, Signal.GPU, uuid, now, busy, slice=found.slice)
        given, self._given[key, uuid] = self._given.get((key, uuid)), now
        new = [one for one in self._read[uuid] if given is not None and one.at > given] or self._read[uuid][-1:]
        busiest = max(one.percent for one in new)
        return Sample(key, Signal.GPU, uuid, now, busiest, slice=found.slice, since=new[0].since)


class BusyInterval(msgspec.Struct, frozen=True, gc=False):
    """How busy a GPU was from `since` to `at`."""

    since: datetime
    at: datetime
    percent: float


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
        (begin, since, old), (end, at, new) = self._before[run], after[run]
        rated = rates(old, new, end - begin).items()
        return [Sample(key, signal, "", at, value, since=since) for signal, value in rated]

    async def _read_all(self, subjects: Sequence[Subject]) -> dict[Run, Reading]:
        ended = threading.Event()

        def read() -> dict[Run, Reading]:
            try:
                found = ((one, self._count(one)) for one in subjects)
                return {
                    _run(one): (self._ticks(), self._clock.now(), counters)
                    for one, counters in found
                    if counters is not None
                }
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
        return {}  # not measured, which means keep


def _run(subject: Subject) -> Run:
    return subject.ref.uid, subject.seen.incarnation


def devices_of(subject: Subject) -> tuple[str, ...]:
    return () if isinstance(subject.devices, Unknown) else subject.devices

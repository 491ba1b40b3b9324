"""History of a Prometheus as a trace: GPUs of pods from DCGM exporters (old and new names) or our agents, read in
slices; without them the GPUs of hosts that `serve --metrics` exported.

A minute is judged as the idle rule judges it (platforms/kubernetes/minutes.py): what is implausible is not measured.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from math import isfinite
from typing import TypeVar

from gpukeeper.clients.prometheus import Prometheus, SeriesSelector, TimeSeries
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.series import MINUTE, NOT_MEASURED, Signal, minute_of, moment_of
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import plain
from gpukeeper.platforms.kubernetes.minutes import (
    LOOK_BACK,
    NAMES,
    Share,
    Trace,
    minutes_of_devices,
    source_of,
    trace,
)
from gpukeeper.traces.spool import Spool, SpooledTrace, Stamp, Workload, unique

SLICE = timedelta(hours=6)
TRIES = 4
FIRST_PAUSE = 1.0  # seconds; doubled after each try
INSTANCES = 16  # exporters in one query
HOST_NAME = "gpukeeper_gpu_use_ratio"
NEW_RUN_AFTER = timedelta(hours=1)

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]


async def read_prometheus(
    history: Prometheus, url: str, since: datetime, until: datetime, *, sleep: Sleep = asyncio.sleep
) -> SpooledTrace:
    """`url` is only shown. PlatformError if a slice cannot be read: a trace with a hole that was not there is worse
    than none."""
    reader = _Reader(history, sleep)
    first, last = minute_of(since), minute_of(until) - 1
    if first > last:
        raise UsageError("The time to read from Prometheus is shorter than a minute. Nothing was read. Name more days.")
    await reader.read(first, last, NAMES, reader.add_work)
    kind = ("kubernetes", "pod")
    if reader.spool.last is None:
        await reader.read(first, last, (HOST_NAME,), reader.add_hosts)
        kind = ("host", "gpu")
    if reader.spool.last is None:
        reader.spool.close()
        raise UsageError(
            f"Prometheus at {url} has no use of GPUs between {since:%Y-%m-%d %H:%M} and {until:%Y-%m-%d %H:%M} UTC: "
            f"neither series of a DCGM exporter with the label pod nor {HOST_NAME}. Nothing was replayed. Check the "
            "address, the days, and whether dcgm-exporter runs with DCGM_EXPORTER_KUBERNETES=true."
        )
    return SpooledTrace(reader.spool, Stamp(f"prometheus {url}", *kind, new_run_after=NEW_RUN_AFTER))


class _Reader:
    def __init__(self, history: Prometheus, sleep: Sleep) -> None:
        self.spool = Spool()
        self._history, self._sleep = history, sleep
        self._names: dict[tuple[str, str, str], str] = {}
        self._taken: set[str] = set()

    async def read(
        self,
        first: int,
        last: int,
        names: tuple[str, ...],
        add: Callable[[list[TimeSeries], int, int], None],
    ) -> None:
        step = SLICE // MINUTE
        for begin in range(first, last + 1, step):
            end = min(begin + step - 1, last)
            since, until = moment_of(begin - LOOK_BACK), moment_of(end + 1)
            everything = SeriesSelector(names, "__name__", names)
            labels = await self._retried(partial(self._history.series, (everything,), since, until))
            instances = sorted({one.get("instance", "") for one in labels})
            for at in range(0, len(instances), INSTANCES):
                some = SeriesSelector(names, "instance", tuple(instances[at : at + INSTANCES]))
                found = await self._retried(partial(self._history.raw, some, since, until))
                await asyncio.to_thread(add, found, begin, end)

    async def _retried(self, ask: Callable[[], Awaitable[T | Unknown]]) -> T:
        pause = FIRST_PAUSE
        for _try in range(TRIES - 1):
            found = await ask()
            if not isinstance(found, Unknown):
                return found
            await self._sleep(pause)
            pause *= 2
        found = await ask()
        if isinstance(found, Unknown):
            self.spool.close()
            raise PlatformError(
                f"{found.why}. It was asked {TRIES} times. Nothing was replayed. Try again, or read fewer days."
            )
        return found

    def add_work(self, lines: list[TimeSeries], first: int, last: int) -> None:
        traces = [one for one in map(_trace, lines) if one is not None]
        by_device = minutes_of_devices(traces, first, last)
        present: dict[tuple[str, str, str], dict[Share, set[int]]] = defaultdict(lambda: defaultdict(set))
        doubtful = {_work(one) for one in traces if one.mps}  # under MPS the use of each process is not known
        for one in traces:
            if one.pod is not None:
                found = {int(at) // 60 for at, _value in one.points}
                present[_work(one)][one.share] |= {minute for minute in found if first <= minute <= last}
        for work, shares in present.items():
            for share, minutes in shares.items():
                device = by_device.get(share[:2])
                values = {} if device is None or work in doubtful else device.minutes
                part = device is not None and device.slice
                self._add(self._workload(work), _device(share), minutes, values, part)

    def add_hosts(self, lines: list[TimeSeries], first: int, last: int) -> None:
        for line in lines:
            place, gpu = plain(line.labels.get("place", "")), plain(line.labels.get("gpu", ""))
            values: dict[int, float | Unknown] = {}
            for at, value in line.points:
                minute = int(at) // 60
                if first <= minute <= last and isfinite(value) and 0 <= value <= 1:
                    values[minute] = max(100 * value, _known(values.get(minute)))
            name = f"{place}/{gpu}" if place else gpu
            self._add(self.spool.workload(name), plain(line.labels.get("uuid", "")) or name, set(values), values, False)

    def _add(
        self, workload: Workload, device: str, minutes: set[int], values: Mapping[int, float | Unknown], part: bool
    ) -> None:
        column = self.spool.column(workload, Signal.GPU, device, part=part)
        for minute in sorted(minutes):
            value = values.get(minute, NOT_MEASURED)
            self.spool.rows += 1
            self.spool.reach(minute, minute)
            self.spool.add(column, minute, NOT_MEASURED if isinstance(value, Unknown) else value)

    def _workload(self, work: tuple[str, str, str]) -> Workload:
        """A namesake with another uid is another workload."""
        namespace, name, _uid = work
        if work not in self._names:
            shown = f"{namespace}/{name}" if namespace else name
            self._names[work] = unique(plain(shown), self._taken)
        workload = self.spool.workload(self._names[work])
        workload.namespace, workload.class_ = plain(namespace), "cluster"
        return workload


def _trace(line: TimeSeries) -> Trace | None:
    return trace(line.labels, line.labels.get("__name__", ""), line.points, source_of(line.labels))


def _work(one: Trace) -> tuple[str, str, str]:
    namespace, name = one.pod or ("", "")
    return namespace, name, one.uid


def _device(share: Share) -> str:
    uuid, instance, replica = share
    return plain("/".join(filter(None, (uuid, "" if instance is None else str(instance), replica))))


def _known(value: float | Unknown | None) -> float:
    return value if isinstance(value, float) else 0.0

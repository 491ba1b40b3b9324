"""How busy the GPUs of this Kubernetes node were, with the pods that have them. Reads only: the driver, the kubelet's
files, cgroups of processes; neither the API server nor the kubelet itself.

A reading is valid for a short time: what could not be read again is published no longer, and absent means unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders
from gpukeeper.devices.busy import GpuUse
from gpukeeper.devices.meter import GpuMeter
from gpukeeper.devices.occupancy import WALLED
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.node_pods import (
    GONE,
    Assigned,
    PodGpus,
    PodName,
    assigned,
    pod_names,
    pod_uid,
    pods_of_gpus,
)

EVERY = timedelta(seconds=15)
VALID = timedelta(seconds=45)
WINDOW = timedelta(minutes=1)  # the largest reading in it counts, so that a scrape misses no short work
FILES = timedelta(seconds=10)
RECORD_MAX = 16 * 1024 * 1024
NOT_READ_YET = Unknown("nothing was read yet")


class KubeletFiles(msgspec.Struct, frozen=True):
    record: str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"  # which pod got which device
    logs: str = "/var/log/pods"  # its directories have the names of pods
    proc: str = "/proc"


DEFAULT_FILES = KubeletFiles()


class PodUse(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. `busiest`: percent, of each GPU and slice whose use is known."""

    at: datetime
    uses: Mapping[str, GpuUse] | Unknown
    busiest: Mapping[str, float] = {}
    pods: PodGpus = PodGpus()
    assigned: Unknown | None = None  # why the kubelet's record is missing
    named: Unknown | None = None  # why the names of pods are missing
    walled: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        """In sentences, for the log."""
        found = [one.why for one in (self.uses, self.assigned, self.named) if isinstance(one, Unknown)]
        return (*found, WALLED) if self.walled else tuple(found)


class PodUseReader:
    def __init__(self, meter: GpuMeter, files: KubeletFiles = DEFAULT_FILES) -> None:
        self._meter, self._files = meter, files
        self._last: PodUse | None = None

    async def read(self) -> PodUse:
        uses, now = await self._meter.measure()
        if isinstance(uses, Unknown):
            self._last = PodUse(at=now, uses=uses)
            return self._last
        pids = {pid for one in uses.values() if not isinstance(one.pids, Unknown) for pid in one.pids}
        try:
            found = await in_thread(lambda: _read(self._files, pids), FILES)
        except TimeoutError as error:
            self._last = PodUse(at=now, uses=Unknown(f"the kubelet's files could not be read: {error}"))
            return self._last
        known = {uuid: one for uuid, one in uses.items() if not isinstance(one.busy, Unknown)}
        busiest = {uuid: self._meter.busiest(uuid, now - WINDOW) for uuid in known}
        given, names = found.assigned, found.names
        self._last = PodUse(
            at=now,
            uses=uses,
            busiest={uuid: value for uuid, value in busiest.items() if value is not None},
            pods=pods_of_gpus(
                uses,
                () if isinstance(given, Unknown) else given,
                {} if isinstance(names, Unknown) else names,
                found.uid_of,
            ),
            assigned=given if isinstance(given, Unknown) else None,
            named=names if isinstance(names, Unknown) else None,
            walled=found.walled,
        )
        return self._last

    def latest(self, now: datetime) -> PodUse:
        """Without values if it is too old: a driver that hangs must not look as it did before."""
        if self._last is None:
            return PodUse(at=now, uses=NOT_READ_YET)
        if not now - VALID <= self._last.at <= now + VALID:
            return PodUse(at=now, uses=Unknown("the GPUs were not read for too long"))
        return self._last

    async def run(self, log: Callable[[str], None]) -> None:
        """Until it is cancelled. Problems are logged when they change."""
        before: tuple[str, ...] = ()
        while True:
            problems = (await self.read()).problems
            if problems != before:
                log(f"GPU use of pods: {'; '.join(problems) or 'everything is read again'}")
            before = problems
            await asyncio.sleep(EVERY.total_seconds())


class _Files(msgspec.Struct, frozen=True):
    assigned: tuple[Assigned, ...] | Unknown
    names: Mapping[str, PodName] | Unknown
    uid_of: Mapping[int, str | Unknown | None]
    walled: bool


def _read(files: KubeletFiles, pids: Iterable[int]) -> _Files:
    """The names last: a pod that came meanwhile has one."""
    walled = holders.is_walled(files.proc)
    hidden = Unknown(WALLED)
    uids = {pid: hidden if walled else _uid_of(pid, files.proc) for pid in pids}
    given = _assigned(Path(files.record))
    return _Files(given, _names(Path(files.logs)), uids, walled)


def _uid_of(pid: int, proc: str) -> str | Unknown | None:
    try:
        return pod_uid(holders.text_of(Path(proc, str(pid), "cgroup")))
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError as error:
        return Unknown(f"its cgroup could not be read: {error.strerror}")


def _assigned(record: Path) -> tuple[Assigned, ...] | Unknown:
    try:
        with record.open("rb") as file:
            text = file.read(RECORD_MAX + 1)
    except OSError as error:
        return Unknown(f"the kubelet's record of assigned devices, {record}, could not be read: {error.strerror}")
    return assigned(text) if len(text) <= RECORD_MAX else Unknown(f"{record} is larger than {RECORD_MAX} bytes")


def _names(logs: Path) -> Mapping[str, PodName] | Unknown:
    try:
        return pod_names([one.name for one in logs.iterdir()])
    except OSError as error:
        return Unknown(f"the names of pods, in {logs}, could not be read: {error.strerror}")

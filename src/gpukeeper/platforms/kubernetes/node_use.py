"""How busy the GPUs of this Kubernetes node were, with the pods that have them. Reads only: the driver, the kubelet's
files, cgroups of processes; neither the API server nor the kubelet itself. Two sources, added together: the
kubelet's record of assigned devices, and the cgroups of processes that the driver lists. A name too many makes the
operator count more GPUs than a pod requests, which is unknown and keeps. What belongs to no known pod is counted,
and never guessed. A reading is valid for a short time: absent means unknown.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders
from gpukeeper.devices.busy import GpuUse
from gpukeeper.devices.gpus import WALLED
from gpukeeper.devices.meter import GpuMeter
from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown

_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"  # 32: of a static pod
# cgroupfs: pod<uid>; systemd: …-pod<uid>.slice, and …-pod<uid>.slice:cri-containerd:<id> where both drivers are mixed
_POD = re.compile(rf"(?:.+-)?pod({_UID})(?:\.slice(?::.+)?)?")
_DIRECTORY = re.compile(rf"([a-z0-9][a-z0-9-]{{0,62}})_([a-z0-9][a-z0-9.-]{{0,252}})_({_UID})")
_USERS = "user.slice"  # below it users make cgroups with any name
_NVIDIA = "nvidia.com/"

ProcessResult: TypeAlias = Literal["mapped", "no_pod", "unnamed", "gone", "unreadable"]
PROCESS_RESULTS: tuple[ProcessResult, ...] = ("mapped", "no_pod", "unnamed", "gone", "unreadable")
GONE = Unknown("it has ended")


class PodName(msgspec.Struct, frozen=True, order=True):
    namespace: str
    name: str
    uid: str


class Assigned(msgspec.Struct, frozen=True, order=True):
    """A device that the kubelet gave to a pod. `replica`: of a GPU that several share in turns; else empty."""

    device: str  # uuid of a GPU or slice, or what else the device plugin calls it
    uid: str  # of the pod
    replica: str = ""


class PodGpu(msgspec.Struct, frozen=True, order=True):
    """A pod on a GPU or slice."""

    uuid: str
    pod: PodName
    replica: str = ""


class PodGpus(msgspec.Struct, frozen=True):
    found: tuple[PodGpu, ...] = ()
    processes: Mapping[ProcessResult, int] = {}
    nameless: int = 0  # devices that the kubelet assigned, and that the driver does not report under that name


class _Entry(msgspec.Struct, frozen=True):
    uid: str = msgspec.field(name="PodUID")
    resource: str = msgspec.field(name="ResourceName")
    devices: Mapping[str, tuple[str, ...]] | tuple[str, ...] | None = msgspec.field(name="DeviceIDs")  # by NUMA node


class _Entries(msgspec.Struct, frozen=True):
    entries: tuple[_Entry, ...] | None = msgspec.field(name="PodDeviceEntries")


class _Record(msgspec.Struct, frozen=True):
    data: _Entries = msgspec.field(name="Data")


def pod_uid(cgroup: str) -> str | Unknown | None:
    """By /proc/PID/cgroup. The outermost: what runs inside a pod may add cgroups of its own. None: in no pod.

    The paths begin with `..` where the reader has a cgroup namespace of its own.
    """
    found = {uid for line in cgroup.split("\n") if (uid := _uid_in(line.split(":", 2)[-1])) is not None}
    if len(found) > 1:
        return Unknown("its cgroups name several pods")
    return next(iter(found), None)


def _uid_in(path: str) -> str | None:
    for part in path.split("/"):
        if part == _USERS:
            return None
        if match := _POD.fullmatch(part):
            return match.group(1).replace("_", "-")
    return None


def pod_names(directories: Iterable[str]) -> dict[str, PodName]:
    """By uid, from the names of the kubelet's log directories: NAMESPACE_NAME_UID. A uid with two names has none."""
    found: dict[str, set[PodName]] = {}
    for directory in directories:
        if match := _DIRECTORY.fullmatch(directory):
            found.setdefault(match.group(3), set()).add(PodName(*match.groups()))
    return {uid: next(iter(names)) for uid, names in found.items() if len(names) == 1}


def assigned(record: bytes) -> tuple[Assigned, ...] | Unknown:
    """From the kubelet's record of devices. It has no version, so an unknown form is Unknown."""
    try:
        entries = reading.decode(record, _Record).data.entries or ()
    except ValueError as error:
        return Unknown(f"the kubelet's record of assigned devices could not be read: {error}")
    return tuple(sorted({one for entry in entries if entry.resource.startswith(_NVIDIA) for one in _devices(entry)}))


def _devices(entry: _Entry) -> Iterable[Assigned]:
    by_numa = entry.devices.values() if isinstance(entry.devices, Mapping) else (entry.devices or (),)
    for device in (one for some in by_numa for one in some):
        uuid, _, replica = device.partition("::")
        yield Assigned(uuid, entry.uid, replica)


def pods_of_gpus(
    uses: Mapping[str, GpuUse],
    given: Iterable[Assigned],
    names: Mapping[str, PodName],
    uid_of: Mapping[int, str | Unknown | None],
) -> PodGpus:
    """`uid_of`: of every pid in `uses`, the pod's uid; None: in no pod."""
    found: set[PodGpu] = set()
    nameless = 0
    for one in given:
        nameless += one.device not in uses
        if one.device in uses and one.uid in names:
            found.add(PodGpu(one.device, names[one.uid], one.replica))
    holders = {(one.uuid, one.pod) for one in found}
    results: Tally[ProcessResult] = Tally()
    for use in uses.values():
        for pid in () if isinstance(use.pids, Unknown) else use.pids:
            pod, result = _pod_of(uid_of.get(pid, GONE), names)
            results[result] += 1
            if pod is not None and (use.uuid, pod) not in holders:
                found.add(PodGpu(use.uuid, pod))
    return PodGpus(tuple(sorted(found)), {result: results[result] for result in PROCESS_RESULTS}, nameless)


def _pod_of(uid: str | Unknown | None, names: Mapping[str, PodName]) -> tuple[PodName | None, ProcessResult]:
    if isinstance(uid, Unknown):
        return None, "gone" if uid is GONE else "unreadable"
    if uid is None:
        return None, "no_pod"
    return (names[uid], "mapped") if uid in names else (None, "unnamed")


EVERY = timedelta(seconds=15)
VALID = timedelta(seconds=45)
WINDOW = timedelta(minutes=1)  # the largest reading in it counts, so that a scrape misses no short work
FILES = timedelta(seconds=10)
RECORD_MAX = 16 * 1024 * 1024
LOG_FILES = 1_000  # of one container; the kubelet keeps five, and one for each of its last starts
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
    logs: Mapping[PodName, int] = {}  # bytes, of each pod with a directory of logs, also after its end; absent: unknown
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
            logs=found.logs,
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
    logs: Mapping[PodName, int]
    uid_of: Mapping[int, str | Unknown | None]
    walled: bool


def _read(files: KubeletFiles, pids: Iterable[int]) -> _Files:
    """The names last: a pod that came meanwhile has one."""
    walled = holders.is_walled(files.proc)
    hidden = Unknown(WALLED)
    uids = {pid: hidden if walled else _uid_of(pid, files.proc) for pid in pids}
    given, names = _assigned(Path(files.record)), _names(Path(files.logs))
    pods = () if isinstance(names, Unknown) else names.values()
    logs = {
        pod: size
        for pod in pods
        if (size := _log_bytes(Path(files.logs, f"{pod.namespace}_{pod.name}_{pod.uid}"))) is not None
    }
    return _Files(given, names, logs, uids, walled)


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


def _log_bytes(pod: Path) -> int | None:
    """Of its containers, with rotated files. None: unknown; a link leads to a log that another program keeps."""
    found = 0
    try:
        with os.scandir(pod) as containers:
            directories = [one.path for one in containers if one.is_dir(follow_symlinks=False)]
        for directory in directories:
            with os.scandir(directory) as files:
                for number, file in enumerate(files, start=1):
                    if number > LOG_FILES or not file.is_file(follow_symlinks=False):
                        return None
                    found += file.stat(follow_symlinks=False).st_size
    except OSError:
        return None
    return found


def _names(logs: Path) -> Mapping[str, PodName] | Unknown:
    try:
        return pod_names([one.name for one in logs.iterdir()])
    except OSError as error:
        return Unknown(f"the names of pods, in {logs}, could not be read: {error.strerror}")

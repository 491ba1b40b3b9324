"""Which pods of this Kubernetes node have which GPU. Pure: from what the kubelet and the kernel have on files.

Two sources, added together. The kubelet's record of assigned devices finds a pod that holds a GPU and does nothing; the
cgroups of processes that the driver lists find a pod that uses a GPU without an assignment. A name too many makes the
operator count more GPUs than a pod requests, which is unknown and keeps. What belongs to no known pod is counted, and
never guessed.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from gpukeeper.devices.busy import GpuUse
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

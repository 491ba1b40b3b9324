"""From the facts of this machine to subjects. Pure: no reads, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.gpus import opened_by
from gpukeeper.devices.holders import FIRST_PERSON_UID, Holder
from gpukeeper.disk.mounts import Usage
from gpukeeper.disk.tree import FILESYSTEM, PlaceAndTime
from gpukeeper.disk.walk import printable
from gpukeeper.model.decision import Unseen
from gpukeeper.model.gpu import OF_A_SESSION
from gpukeeper.model.subject import Disk, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

PLATFORM = "host"
GPU, SLICE, PROCESS, REPORT, DISK = "gpu", "slice", "process", "report", "disk"
SETTLED = timedelta(seconds=60)  # younger processes may end by themselves before they are reported
HARDWARE = Unknown("a GPU neither begins nor ends", by_design=True)
NOT_ON_DISK = Unknown("it is not on a disk", by_design=True)


# GPUs


def gpu_subjects(gpus: Iterable[GpuFacts], at: PlaceAndTime) -> tuple[tuple[Subject, ...], tuple[Unseen, ...]]:
    """Each GPU and each of its slices."""
    subjects, unseen = [], []
    for gpu in gpus:
        if isinstance(gpu.uuid, Unknown):
            unseen.append(Unseen(f"GPU {gpu.index}", gpu.uuid.why))
            continue
        whole = _gpu_subject(gpu, gpu.uuid, at)
        subjects.append(whole)
        if isinstance(gpu.slices, Unknown):
            unseen.append(Unseen(f"slices of GPU {gpu.index}", gpu.slices.why))
        else:
            subjects += [_slice_subject(part, gpu, whole.ref, at) for part in gpu.slices]
    return tuple(subjects), tuple(unseen)


def _gpu_subject(gpu: GpuFacts, uuid: str, at: PlaceAndTime) -> Subject:
    labels = {"index": gpu.index, "model": gpu.name, "minor": gpu.minor, "utilisation_percent": gpu.utilisation}
    return _device(at.seen(GPU, f"gpu-{gpu.index}", uuid, uuid, ""), None, labels | _memory(gpu))


def _slice_subject(part: SliceFacts, gpu: GpuFacts, root: Ref, at: PlaceAndTime) -> Subject:
    labels = {"index": part.index, "model": part.name, "gpu": gpu.index}
    seen = at.seen(SLICE, f"gpu-{gpu.index}-slice-{part.index}", part.uuid, part.uuid, "")
    return _device(seen, root.path, labels | _memory(part))


def _device(seen: Seen, root: str | None, labels: Mapping[str, int | float | str | Unknown]) -> Subject:
    return Subject(
        seen=seen,
        shape=Shape.DEVICE,
        root=root,
        state=HARDWARE,
        class_="device",
        created=HARDWARE,
        devices=(seen.ref.uid,),
        size=NOT_ON_DISK,
        labels={key: str(value) for key, value in labels.items()},
    )


def _memory(device: GpuFacts | SliceFacts) -> dict[str, int | float | str | Unknown]:
    return {"memory_total_mib": device.memory_total_mib, "memory_used_mib": device.memory_used_mib}


# Processes on the bare host


def is_bare(holder: Holder, started: datetime, now: datetime) -> bool:
    """A user's process, outside any container, and not just started. If whether it is in a container is Unknown, it is
    shown. A desktop's display server is no workload.
    """
    in_container = isinstance(holder.container, str)
    persons = holder.uid >= FIRST_PERSON_UID and holder.comm not in OF_A_SESSION
    return not in_container and persons and now - started > SETTLED


def process_subject(
    holder: Holder, devices: tuple[str, ...] | Unknown, owner: str, started: datetime, boot: str, at: PlaceAndTime
) -> Subject:
    state = State.PAUSED if holder.stopped else State.RUNNING
    name = f"{printable(holder.comm)}-{holder.pid}"
    return Subject(
        seen=at.seen(PROCESS, name, holder.identity, f"{boot}:{holder.starttime}", state),
        state=state,
        owner=owner,
        class_=holder.container if isinstance(holder.container, Unknown) else "bare",
        created=started,
        started=started,
        devices=devices,
        size=NOT_ON_DISK,
        labels={"pid": str(holder.pid), "command": printable(holder.comm)},
    )


def devices_of(
    holder: Holder, gpus: Sequence[GpuFacts] | Unknown, mig_minors: Mapping[int, tuple[int, int, int]]
) -> tuple[str, ...] | Unknown:
    """The uuids of what it has open: slices where it opened slices, otherwise the whole GPU."""
    if isinstance(gpus, Unknown):
        return (
            Unknown(f"it has {_nodes(holder)} open, but the GPU could not be identified: {gpus.why}")
            if holder.minors
            else ()
        )
    found: list[str] = []
    for minor, uuids in opened_by(holder, gpus, mig_minors):
        if not uuids:
            return Unknown(f"it has {_nodes(holder)} open, but the driver reports no GPU for /dev/nvidia{minor}")
        found += uuids
    return tuple(found)


def _nodes(holder: Holder) -> str:
    return ", ".join(f"/dev/nvidia{minor}" for minor in holder.minors)


# Disks


def disk(usage: Usage) -> Disk:
    return Disk(usage.mount_point, usage.used, usage.inodes_used)


def disk_subject(usage: Usage, held_open: int | Unknown, findings: tuple[str, ...], at: PlaceAndTime) -> Subject:
    labels: dict[str, object] = {
        "disk_size": usage.size,
        "disk_free": usage.free,
        "inodes": usage.inodes,
        "inodes_free": usage.inodes_free,
        "held_open": held_open,
    }
    uid = str(usage.device)
    return Subject(
        seen=at.seen(DISK, usage.mount_point, uid, uid, ""),
        shape=Shape.NODE,
        state=FILESYSTEM,
        class_=DISK,
        created=FILESYSTEM,
        size=usage.taken,
        disk=disk(usage),
        findings=findings,
        labels={key: str(value) for key, value in labels.items() if isinstance(value, int)},
    )

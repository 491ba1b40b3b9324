"""The GPUs of one machine: condition as last recorded, quarantine, and what has each open (`node list|show`). Nodes
and disks, before and after a pass: the figures behind what people read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.subject import Disk, Subject
from gpukeeper.model.unknown import Unknown


class GpuCondition(msgspec.Struct, frozen=True, kw_only=True):
    """`held_by`: processes that have it open now, or why that is unknown. None: nothing, or never recorded."""

    uuid: str
    index: int | None
    held_by: str | None
    condition: str | None
    checked: datetime | None
    reason: str | None
    quarantined: datetime | None
    quarantine_reason: str | None
    quarantined_by: str | None
    baseline_mib: int | None
    last_reset: datetime | None


class NodeView(msgspec.Struct, frozen=True):
    """`unseen`: why the GPUs could not be listed; then these are the ones in the ledger."""

    node: str
    gpus: tuple[GpuCondition, ...]
    unseen: str | None


class NodeGpuView(msgspec.Struct, frozen=True):
    node: str
    gpu: GpuCondition
    lines: tuple[dict[str, object], ...]


def gpu_condition(
    uuid: str, index: int | None, remembered: GpuMemory | None, held_by: str | None = None
) -> GpuCondition:
    gpu = remembered or GpuMemory()
    return GpuCondition(
        uuid=uuid,
        index=index,
        held_by=held_by,
        condition=gpu.result.value if gpu.result is not None else None,
        checked=gpu.checked,
        reason=gpu.reason or None,
        quarantined=gpu.quarantined,
        quarantine_reason=gpu.quarantine_reason or None,
        quarantined_by=gpu.quarantined_by or None,
        baseline_mib=gpu.baseline_mib,
        last_reset=gpu.last_reset,
    )


DISK = "disk"


class Bytes(NamedTuple):
    """Of a disk, as far as its platform reports it."""

    size: int | None
    free: int | None
    held_open: int | None


def bytes_of(subject: Subject) -> Bytes:
    return Bytes(*(_number(subject.labels, name) for name in ("disk_size", "disk_free", "held_open")))


def _number(labels: Mapping[str, str], name: str) -> int | None:
    words = labels.get(name, "")
    return int(words) if words.isascii() and words.isdecimal() else None


class SubjectChange(NamedTuple):
    """A node or a disk as a pass found it, and as it was afterwards. None: nothing was done there, so it was not read
    again."""

    before: Subject
    after: Subject | Unknown | None


class NodeFigures(msgspec.Struct, frozen=True):
    """`bytes`: temporary ones of a node, used ones of a disk."""

    bytes: int | Unknown
    disk: Disk | None
    disk_size: int | None
    disk_free: int | None


class NodeChange(msgspec.Struct, frozen=True):
    kind: str
    name: str
    before: NodeFigures
    after: NodeFigures | Unknown | None


def node_change(change: SubjectChange) -> NodeChange:
    ref, after = change.before.ref, change.after
    return NodeChange(
        ref.kind, ref.name, _figures(change.before), _figures(after) if isinstance(after, Subject) else after
    )


def _figures(subject: Subject) -> NodeFigures:
    disk = bytes_of(subject)
    return NodeFigures(subject.size, subject.disk, disk.size, disk.free)

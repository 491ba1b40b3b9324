"""Nodes and disks, before and after a pass: the figures behind what people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gpukeeper.model.subject import Disk, Subject
from gpukeeper.model.unknown import Unknown

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

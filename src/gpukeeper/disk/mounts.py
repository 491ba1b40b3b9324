"""Mounts, read from mountinfo: what is mounted inside a tree, and which trees are mounted somewhere else. Reads only.

Relies on /proc/<pid>/mountinfo, one per mount namespace: a container's bind mount of a directory in /tmp is visible
only there, and the container may need it without having a file open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk import procfs

# options of an overlay that name directories
_LAYERS = {b"lowerdir", b"lowerdir+", b"datadir+", b"upperdir", b"workdir"}
_COLON = re.compile(r"(?<!\\):")


class MountEntry(msgspec.Struct, frozen=True):
    device: str  # major:minor
    source: str  # the directory of that filesystem which is mounted; "/" is all of it
    point: str  # where
    kind: str = ""  # of filesystem, as mount(8) names it; empty: unknown
    layers: tuple[str, ...] = ()  # directories an overlay consists of, as written when it was mounted
    options: tuple[str, ...] = ()  # of this mount, such as noatime; of the whole filesystem only `ro`
    number: int | None = None  # the kernel's, of all mounts in all namespaces


def parse_mounts(mountinfo: bytes | str) -> tuple[MountEntry, ...]:
    """A line that does not have the kernel's format is skipped; see `unparsed`."""
    return tuple(_mount(fields) for line in _lines(mountinfo) if len(fields := line.split(b" ")) > 4)


def unparsed(mountinfo: bytes | str) -> int:
    """How many lines do not have the kernel's format: what is mounted there is unknown."""
    return sum(len(line.split(b" ")) <= 4 for line in _lines(mountinfo))


def own_mounts(proc: str = "/proc") -> tuple[MountEntry, ...]:
    return parse_mounts(procfs.read(f"{proc}/self/mountinfo", procfs.TABLE))


def has_mount_inside(path: str, mounts: Iterable[MountEntry]) -> bool:
    """Also of a single file, which a walk of directories cannot notice."""
    return any(is_at_or_below(mount.point, path) for mount in mounts)


def source_of(path: str, mounts: Iterable[MountEntry]) -> tuple[str, str] | None:
    """The same directory as (device, path inside that filesystem), or None if no mount covers it."""
    innermost = covering(path, mounts)
    if innermost is None:
        return None
    inside = os.path.relpath(path, innermost.point)
    return innermost.device, os.path.normpath(Path(innermost.source, inside))


def covering(path: str, mounts: Iterable[MountEntry]) -> MountEntry | None:
    """The mount that a path without links is on; of two on one point the later hides the earlier."""
    above = [mount for mount in mounts if is_at_or_below(path, mount.point)]
    return max(enumerate(above), key=lambda row: (len(row[1].point), row[0]))[1] if above else None


def is_at_or_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _lines(mountinfo: bytes | str) -> list[bytes]:
    whole = mountinfo if isinstance(mountinfo, bytes) else os.fsencode(mountinfo)
    return [line for line in whole.split(b"\n") if line]


def _mount(fields: list[bytes]) -> MountEntry:
    end = fields.index(b"-", 5) if b"-" in fields[5:] else len(fields)
    about = fields[end + 1 :]
    kind = about[0].decode("ascii", "backslashreplace") if about else ""
    layers = tuple(_layers(about[2])) if kind == "overlay" and len(about) > 2 else ()
    number = int(fields[0]) if fields[0].isdigit() else None
    device = fields[2].decode("ascii", "backslashreplace")
    options = _options(fields[:end], about)
    return MountEntry(device, procfs.unescaped(fields[3]), procfs.unescaped(fields[4]), kind, layers, options, number)


def _options(row: list[bytes], about: list[bytes]) -> tuple[str, ...]:
    own = row[5].split(b",") if len(row) > 5 else []
    whole = about[2].split(b",") if len(about) > 2 else []
    return tuple(one.decode("ascii", "backslashreplace") for one in (*own, *(one for one in whole if one == b"ro")))


def _layers(options: bytes) -> Iterator[str]:
    """Several lower ones are separated by colons; a colon in a name has a backslash before it."""
    for option in options.split(b","):
        name, _, value = option.partition(b"=")
        if name in _LAYERS:
            directories = _COLON.split(procfs.unescaped(value)) if name == b"lowerdir" else [procfs.unescaped(value)]
            yield from (directory.replace("\\:", ":") for directory in directories if directory)

"""Mounts, read from mountinfo: what is mounted inside a tree, and which trees are mounted somewhere else.

Looks only. Relies on /proc/<pid>/mountinfo, one per mount namespace: a container's bind mount of a folder in /tmp is
seen nowhere else, and no file needs to be open for the container to need it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

_ESCAPED = re.compile(r"\\([0-7]{3})")
_LAYERS = {"lowerdir", "lowerdir+", "datadir+", "upperdir", "workdir"}  # options of an overlay that name folders
_COLON = re.compile(r"(?<!\\):")


class Mount(msgspec.Struct, frozen=True):
    device: str  # major:minor
    source: str  # the folder of that filesystem which is mounted; "/" is all of it
    point: str  # where
    kind: str = ""  # of filesystem, as mount(8) calls it; empty: not told
    layers: tuple[str, ...] = ()  # folders an overlay is made of, as whoever mounted it wrote them
    options: tuple[str, ...] = ()  # of this mount, such as noatime; of the whole filesystem only `ro`


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    return tuple(_mount(line) for line in mountinfo.splitlines() if len(line.split()) > 4)


def own_mounts(proc: str = "/proc") -> tuple[Mount, ...]:
    return parse_mounts(Path(proc, "self/mountinfo").read_text("utf-8", "surrogateescape"))


def has_mount_inside(path: str, mounts: Iterable[Mount]) -> bool:
    """Also of a single file, which a walk of directories cannot notice."""
    return any(is_at_or_below(mount.point, path) for mount in mounts)


def source_of(path: str, mounts: Iterable[Mount]) -> tuple[str, str] | None:
    """The same folder as (device, path inside that filesystem), or None when no mount covers it."""
    innermost = covering(path, mounts)
    if innermost is None:
        return None
    inside = os.path.relpath(path, innermost.point)
    return innermost.device, os.path.normpath(Path(innermost.source, inside))


def covering(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that a path without links is on; of two on one point the later hides the earlier."""
    above = [mount for mount in mounts if is_at_or_below(path, mount.point)]
    return max(enumerate(above), key=lambda row: (len(row[1].point), row[0]))[1] if above else None


def is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _unescaped(field: str) -> str:
    """Blanks and line breaks in names are written as \\040 and \\012."""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8)), field)


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    row, about = before.split(), after.split()
    kind = about[0] if about else ""
    layers = tuple(_layers(about[2])) if kind == "overlay" and len(about) > 2 else ()
    return Mount(row[2], _unescaped(row[3]), _unescaped(row[4]), kind, layers, _options(row, about))


def _options(row: list[str], about: list[str]) -> tuple[str, ...]:
    whole = about[2].split(",") if len(about) > 2 else []
    return (*(row[5].split(",") if len(row) > 5 else ()), *(one for one in whole if one == "ro"))


def _layers(options: str) -> Iterator[str]:
    """Several lower ones are separated by colons; a colon of a name has a backslash before it."""
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name in _LAYERS:
            folders = _COLON.split(_unescaped(value)) if name == "lowerdir" else [_unescaped(value)]
            yield from (folder.replace("\\:", ":") for folder in folders if folder)

"""Mounts, read from mountinfo: what is mounted inside a tree, and which trees are mounted somewhere else.

Looks only. Relies on /proc/<pid>/mountinfo, one per mount namespace: a container's bind mount of a folder in /tmp is
seen nowhere else, and no file needs to be open for the container to need it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    device: str  # major:minor
    source: str  # the folder of that filesystem which is mounted; "/" is all of it
    point: str  # where


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    rows = (line.split() for line in mountinfo.splitlines())
    return tuple(Mount(row[2], _unescaped(row[3]), _unescaped(row[4])) for row in rows if len(row) > 4)


def own_mounts(proc: str = "/proc") -> tuple[Mount, ...]:
    return parse_mounts(Path(proc, "self/mountinfo").read_text("utf-8", "surrogateescape"))


def has_mount_inside(path: str, mounts: Iterable[Mount]) -> bool:
    """Also of a single file, which a walk of directories cannot notice."""
    return any(is_at_or_below(mount.point, path) for mount in mounts)


def source_of(path: str, mounts: Iterable[Mount]) -> tuple[str, str] | None:
    """The same folder as (device, path inside that filesystem), or None when no mount covers it."""
    covering = [mount for mount in mounts if is_at_or_below(path, mount.point)]
    if not covering:
        return None
    # Of two on one point the later hides the earlier.
    innermost = max(enumerate(covering), key=lambda row: (len(row[1].point), row[0]))[1]
    inside = os.path.relpath(path, innermost.point)
    return innermost.device, os.path.normpath(Path(innermost.source, inside))


def is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _unescaped(field: str) -> str:
    """Blanks and line breaks in names are written as \\040 and \\012."""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8)), field)

"""How full a filesystem is, like `df`. Reads only."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gpukeeper.disk.mounts import is_at_or_below, own_mounts


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Space reserved for root is neither used nor free: it is not available to other users."""

    device: int
    mount_point: str
    size: int
    taken: int  # bytes in files
    free: int  # bytes available to ordinary users
    inodes: int | None  # None: it creates them on demand
    inodes_free: int | None

    @property
    def used(self) -> float:
        """Share of the bytes available to ordinary users."""
        return self.taken / (self.taken + self.free) if self.taken + self.free else 0.0

    @property
    def inodes_used(self) -> float | None:
        if self.inodes is None or self.inodes_free is None:
            return None
        return (self.inodes - self.inodes_free) / self.inodes


def usage(path: str | int, proc: str = "/proc") -> Usage:
    """Of the filesystem of a path or an open descriptor. May hang if a network filesystem does."""
    found = os.statvfs(path)
    limited = found.f_files > 0
    return Usage(
        device=os.stat(path).st_dev,  # noqa: PTH116 - also of a descriptor
        mount_point=_mount_point(path, proc),
        size=found.f_blocks * found.f_frsize,
        taken=(found.f_blocks - found.f_bfree) * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        inodes=found.f_files if limited else None,
        inodes_free=found.f_favail if limited else None,
    )


def _mount_point(path: str | int, proc: str) -> str:
    link = Path(proc, "self/fd", str(path))
    real = str(link.readlink()) if isinstance(path, int) else os.path.realpath(path)
    return max((mount.point for mount in own_mounts(proc) if is_at_or_below(real, mount.point)), key=len, default="/")

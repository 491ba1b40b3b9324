"""Which filesystems may not answer: a call about a file there may hang forever.

An allow-list: whatever is not named here (FUSE, NFS, an unknown filesystem) is not queried by a read of all processes.
What must be queried is queried by a separate process, which can be ended or abandoned.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpukeeper.disk.mounts import MountEntry, covering, is_at_or_below

LINKS = 40  # as many as the kernel follows
PATIENCE_SECONDS = 5.0
FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0
LEFT_BEHIND_MAX = 4  # processes that no signal reached; with that many no more are started
ON_DISKS = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2", "vfat", "exfat"),
    *("msdos", "ntfs", "ntfs3", "iso9660", "udf", "squashfs", "erofs", "cramfs", "overlay"),
)
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
OF_THE_KERNEL = (
    *("proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "configfs", "bpf"),
    *("pstore", "efivarfs", "fusectl", "binfmt_misc", "nsfs", "pipefs", "sockfs", "anon_inodefs", "selinuxfs", "bdev"),
)
_ANSWERS = frozenset((*ON_DISKS, *IN_MEMORY, *OF_THE_KERNEL))


def may_hang(kind: str) -> bool:
    """Of a filesystem of that type, as mount(8) names it."""
    return kind not in _ANSWERS


def silent_mount(path: str, mounts: Iterable[MountEntry]) -> MountEntry | None:
    """The mount of a path without links, where it may hang."""
    mount = covering(path, mounts)
    return mount if mount is not None and may_hang(mount.kind) else None


def leads_through_silent(path: str, mounts: Iterable[MountEntry]) -> bool:
    """Whether a mount that may hang is on the path (without links), or at its end."""
    return any(may_hang(mount.kind) and is_at_or_below(path, mount.point) for mount in mounts)


def real_path(path: str, mounts: Iterable[MountEntry]) -> str:
    """Like realpath, but it does not query a filesystem that may hang: from there on, the path stays as it is
    written.
    """
    known = tuple(mounts)
    at, links = "/", 0
    left = [step for step in reversed(os.path.abspath(path).split("/")) if step]  # noqa: PTH100
    while left:
        step = left.pop()
        if step == "..":
            at = os.path.dirname(at)  # noqa: PTH120
            continue
        at = f"{at.rstrip('/')}/{step}"
        if silent_mount(at, known) is not None:
            return os.path.normpath("/".join([at, *reversed(left)]))
        target = None
        with suppress(OSError):
            target = os.readlink(at)  # noqa: PTH115
        if target is not None and links < LINKS:
            links += 1
            at = "/" if target.startswith("/") else os.path.dirname(at)  # noqa: PTH120
            left += [part for part in reversed(target.split("/")) if part not in {"", "."}]
    return at


class Responsiveness:
    """Whether paths answer at all. One that did not is retried after a while, with growing pauses."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._silent: dict[str, tuple[float, float]] = {}  # until when it is not retried, and the length of the pause
        self._left_behind: list[subprocess.Popen[bytes]] = []

    def why_not(self, path: str, mounts: Iterable[MountEntry]) -> str | None:
        """A sentence; None: it answers. Blocks for a few seconds at most."""
        known = tuple(mounts)
        mount = silent_mount(real_path(path, known), known)
        if mount is None:
            self._silent.pop(path, None)
            return None
        until, wait = self._silent.get(path, (0.0, FIRST_WAIT / 2))
        if self._now() >= until:
            if self._answers(path):
                self._silent.pop(path, None)
                return None
            wait = min(2 * wait, LONGEST_WAIT)
            self._silent[path] = until, _ = self._now() + wait, wait
        rest = max(1, round((until - self._now()) / 60))
        return (
            f"did not answer within {PATIENCE_SECONDS:g} s: the filesystem {mount.kind} at {mount.point} "
            f"hangs; it is skipped and retried in {rest} min"
        )

    def _answers(self, path: str) -> bool:
        self._left_behind = [child for child in self._left_behind if child.poll() is None]
        if len(self._left_behind) >= LEFT_BEHIND_MAX:
            return False
        command = ["stat", "-L", "--format=%i", "--", path]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE_SECONDS)
            return True  # an error is a response, too, and a reader gets it
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(1)
            return False
        self._left_behind.append(child)
        return False

"""The files of a node, as the node itself sees them: through the root directory of one of its processes.

Links of the node are resolved here, step by step by descriptor and never by the kernel, so that none leads out of the
node. A container's layers (upperdir, merged) are not used: sockets and locks cannot be seen there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from gpukeeper.disk import trash
from gpukeeper.platforms.ray.processes import is_still

LINKS = 40  # as the kernel allows
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
GONE = "the process through which its files are reached has ended"


class NodeAccess(msgspec.Struct, frozen=True):
    """The process through which a node's files are reached. No pid: our own, for this machine itself."""

    pid: int | None = None
    starttime: int = 0

    def is_open(self, proc: str = "/proc") -> bool:
        return self.pid is None or is_still(self.pid, self.starttime, proc)


@contextmanager
def opened(door: NodeAccess, proc: str = "/proc") -> Iterator[int]:
    """The root directory of a node. FileNotFoundError: its process ended, and its pid may have been reused."""
    root = os.open("/" if door.pid is None else f"{proc}/{door.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not door.is_open(proc):
            raise FileNotFoundError(errno.ENOENT, GONE)
        yield root
    finally:
        os.close(root)


@contextmanager
def folder(root: int, path: str) -> Iterator[tuple[int, str, frozenset[int]]]:
    """A directory of the node, open for reading; its path without links; and the owners of the links that were
    followed.
    """
    links: list[os.stat_result] = []
    way = resolved(root, path, links)
    try:
        fd = _for_reading(way[-1][0])
    finally:
        for step, _ in way[1:]:
            os.close(step)
    try:
        yield fd, "/" + "/".join(name for _, name in way[1:]), frozenset(link.st_uid for link in links)
    finally:
        os.close(fd)


def identity(root: int, path: str) -> tuple[int, int]:
    """Of the entry, links resolved within the node. FileNotFoundError also while a removal holds that name."""
    way = resolved(root, path)
    try:
        found = os.fstat(way[-1][0])
        if trash.holds_a_name(found):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found.st_dev, found.st_ino
    finally:
        for step, _ in way[1:]:
            os.close(step)


def on_the_way(root: int, path: str) -> set[tuple[int, int]]:
    """Everything on that path: directories, links that lead there, and itself; as far as it exists."""
    passed: list[os.stat_result] = []
    with suppress(OSError):
        _close(resolved(root, path, passed, steps=True)[1:])
    return {(one.st_dev, one.st_ino) for one in passed}


def resolved(
    root: int, path: str, passed: list[os.stat_result] | None = None, *, steps: bool = False
) -> list[tuple[int, str]]:
    """The path from the root down, one descriptor and name for each step; the caller closes all but the first. `passed`
    gets the links that were followed: the kernel would refuse some of a stranger's (protected_symlinks), and a caller
    that resolves links itself has to check them itself. With `steps` it gets every other step, too.
    """
    way = [(root, "")]
    left = [name for name in path.split("/") if name not in {"", "."}][::-1]
    links = 0
    try:
        while left:
            name = left.pop()
            if name == "..":
                if len(way) > 1:
                    os.close(way.pop()[0])
                continue
            step = os.open(name, _STEP, dir_fd=way[-1][0])
            about = os.fstat(step)
            is_link = stat.S_ISLNK(about.st_mode)
            if passed is not None and (is_link or steps):
                passed.append(about)
            if not is_link:
                way.append((step, name))
                continue
            links += 1
            target = _target(step, path, links)
            if target.startswith("/"):
                _close(way[1:])
                del way[1:]
            left += [part for part in target.split("/") if part not in {"", "."}][::-1]
    except BaseException:
        _close(way[1:])
        raise
    return way


def _target(link: int, path: str, links: int) -> str:
    try:
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _for_reading(step: int) -> int:
    """Without updating its access time where permitted: only owners and root may do that."""
    with suppress(PermissionError):
        return os.open(".", _FOLDER | os.O_NOATIME, dir_fd=step)
    return os.open(".", _FOLDER, dir_fd=step)


def _close(steps: list[tuple[int, str]]) -> None:
    for step, _ in steps:
        os.close(step)

"""Walking a tree by descriptors: what it contains, counted. Reads only.

No link is followed and no mount entered, whatever is renamed in the meantime. However deep the tree, only the lowest
directories are open. Imports little and returns plain values: the processes of `worker` start with it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias

from gpukeeper.disk import kernel

Identity: TypeAlias = tuple[int, int]  # device, inode
Lister: TypeAlias = Callable[[int], AbstractContextManager[Iterator["os.DirEntry[str]"]]]
Pending: TypeAlias = tuple[bytes, int]  # a directory not yet visited: path below the top, depth
MOUNT_POINT = "contains a mount point"
CHANGED = "changed while it was measured"
OUT_OF_TIME = "could not be finished in the available time"
LOCKED = "a directory in it is locked"
OPEN = "it is in use: a process has a file of it open or mapped"
ANY_DEVICE = -1  # of an open file whose filesystem is unknown: its inode counts on every one
BLOCK = 512  # unit of st_blocks, whatever the filesystem's own block size is
CHUNK = 1024  # entries at a time: a directory may have millions
DESCRIPTORS = 48
# the kernel limits paths to 4,095 bytes; deeper directories stay with the process that is there already
PATH_BYTES = 3000
PROBLEMS_KEPT = 100  # all mean the same for the decision: not measured

_times = attrgetter("st_ctime_ns"), attrgetter("st_mtime_ns"), attrgetter("st_atime_ns")
_blocks, _links, _inode, _mode = (attrgetter(name) for name in ("st_blocks", "st_nlink", "st_ino", "st_mode"))
_owner = attrgetter("st_uid")
_entry_inode = methodcaller("inode")


def never() -> bool:
    return False


def read_ns(found: os.stat_result) -> int:
    """When a file was read after its last change, as far as that is recorded; 0: it was not. Not of a directory: `du`,
    a backup or an index of names reads every directory and uses nothing.
    """
    read = found.st_atime_ns
    later = read > found.st_mtime_ns and read > found.st_ctime_ns
    return read if later and not stat.S_ISDIR(found.st_mode) else 0


class WalkStopped(Exception):
    """The walk ends here; what was not visited is unknown."""


class WalkTotals:
    """What was counted. Two of them can be merged, so that several processes can walk one tree."""

    def __init__(self, open_files: Mapping[Identity, int]) -> None:
        self.open_files = open_files
        self.open_inodes = {inode for _, inode in open_files}
        self.entries = self.blocks = self.sockets = self.fifos = self.devices = 0
        self.newest_ns = self.ctime_ns = self.content_ns = self.read_ns = 0
        self.held_by: int | None = None
        self.problems: list[str] = []
        self.uids: set[int] = set()  # owners of the entries
        self.links: dict[Identity, list[int]] = {}  # of files with several links: links seen here, blocks

    def add(self, found: list[os.stat_result]) -> None:
        """Written for speed, a thousand entries at a time: trees often have millions."""
        if not found:
            return
        self.entries += len(found)
        self.blocks += sum(map(_blocks, found))
        self.uids.update(map(_owner, found))
        changed, modified, used = (max(map(time, found)) for time in _times)
        self.ctime_ns = max(self.ctime_ns, changed)
        if used > self.read_ns:
            self.read_ns = max(self.read_ns, *map(read_ns, found))
        self.content_ns = max(self.content_ns, changed, modified)
        self.newest_ns = max(self.newest_ns, changed, modified, self.read_ns)
        if not self.open_inodes.isdisjoint(map(_inode, found)):
            self._count_users(found)
        if max(map(_links, found)) > 1 or not all(map(stat.S_ISREG, set(map(_mode, found)))):
            self._count_kinds(found)

    def problem(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)

    def size(self) -> int:
        """Allocated on disk; a file with several links counts once."""
        return self.blocks * BLOCK

    def record(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "blocks": self.blocks,
            "sockets": self.sockets,
            "fifos": self.fifos,
            "devices": self.devices,
            "newest_ns": self.newest_ns,
            "ctime_ns": self.ctime_ns,
            "content_ns": self.content_ns,
            "read_ns": self.read_ns,
            "held_by": self.held_by,
            "problems": self.problems,
            "uids": sorted(self.uids),
            "links": [[*identity, *counted] for identity, counted in self.links.items()],
        }

    def merge(self, other: Mapping[str, Any]) -> None:
        for name in ("entries", "blocks", "sockets", "fifos", "devices"):
            setattr(self, name, getattr(self, name) + other[name])
        for name in ("newest_ns", "ctime_ns", "content_ns", "read_ns"):
            setattr(self, name, max(getattr(self, name), other[name]))
        self.held_by = other["held_by"] if self.held_by is None else self.held_by
        self.uids.update(other["uids"])
        for problem in other["problems"]:
            self.problem(problem)
        for device, inode, seen, blocks in other["links"]:
            known = self.links.setdefault((device, inode), [0, blocks])
            if known[0]:
                self.blocks -= blocks  # both had counted it
            known[0] += seen

    def _count_users(self, found: Iterable[os.stat_result]) -> None:
        for one in found:
            known = self.open_files.get((ANY_DEVICE, one.st_ino), self.held_by)
            self.held_by = self.open_files.get((one.st_dev, one.st_ino), known)

    def _count_kinds(self, found: Iterable[os.stat_result]) -> None:
        for one in found:
            kind = stat.S_IFMT(one.st_mode)
            if one.st_nlink > 1 and kind != stat.S_IFDIR:
                self._add_link(one)
            self.sockets += kind == stat.S_IFSOCK
            self.fifos += kind == stat.S_IFIFO
            self.devices += kind in {stat.S_IFCHR, stat.S_IFBLK}

    def _add_link(self, one: os.stat_result) -> None:
        known = self.links.setdefault((one.st_dev, one.st_ino), [0, one.st_blocks])
        known[0] += 1
        if known[0] > 1:
            self.blocks -= one.st_blocks


class OpenDirectory:
    """One on the path from the top to the current position. `fd` -1: closed for now."""

    __slots__ = ("blocks", "fd", "identity", "name", "shape", "todo")

    def __init__(self, name: str, fd: int, found: os.stat_result) -> None:
        self.name, self.fd = name, fd
        self.identity, self.shape, self.blocks = (found.st_dev, found.st_ino), shape(found), found.st_blocks
        self.todo: list[tuple[str, os.stat_result | None]] = []


class Descent:
    """The path down. Only the lowest directories are open; one above is opened again from below, and must be the
    same.
    """

    def __init__(self, top: int, path: bytes = b"") -> None:
        """The top belongs to the caller, who closes it. `path`: its position, for the names of what is pending."""
        self.prefix = path
        self.folders = [OpenDirectory("", top, os.fstat(top))]

    @property
    def here(self) -> OpenDirectory:
        return self.folders[-1]

    def enter(self, name: str) -> tuple[OpenDirectory, os.stat_result]:
        fd = kernel.open_inside(self.here.fd, name)
        # Taken before it is read, since reading it may update its own access time.
        found = os.fstat(fd)
        directory = OpenDirectory(name, fd, found)
        self.folders.append(directory)
        highest = len(self.folders) - 1 - DESCRIPTORS
        if highest >= 1:
            _close(self.folders[highest])
        return directory, found

    def leave(self) -> OpenDirectory:
        """Goes up one level, and returns the directory that was left."""
        left = self.folders.pop()
        try:
            if self.here.fd < 0:
                self.here.fd = _reopened(left.fd, self.here.identity)
        finally:
            _close(left)
        return left

    def close(self) -> None:
        for directory in self.folders[1:]:
            _close(directory)
        del self.folders[1:]

    def path(self) -> bytes:
        names = [self.prefix, *(os.fsencode(directory.name) for directory in self.folders[1:])]
        return b"/".join(name for name in names if name)


class TreeWalk:
    """One walk over one tree, or over the part of it below `path`."""

    def __init__(
        self,
        tally: WalkTotals,
        entries_max: int = 2**63,
        depth_max: int = 2**63,
        is_time_up: Callable[[], bool] = never,
        lister: Lister = os.scandir,
        locking: bool = False,
    ) -> None:
        self.tally, self.entries_max, self.depth_max = tally, entries_max, depth_max
        self.is_time_up, self.lister, self.locking = is_time_up, lister, locking

    def below(self, top: int, at: Pending = (b"", 0), quantum: int | None = None) -> list[Pending]:
        """Counts all below the directory, which is open and counted. After `quantum` entries, it returns what is
        left.
        """
        path, depth = at
        way = Descent(top, path)
        enough = None if quantum is None else self.tally.entries + quantum
        try:
            self._list(way.here, depth)
            while True:
                if enough is not None and self.tally.entries >= enough and (left := pending(way, depth)) is not None:
                    self._compare(way.folders)
                    return left
                if way.here.todo:
                    self._enter(way, way.here.todo.pop()[0], depth)
                elif len(way.folders) > 1:
                    self._compare([way.here])
                    self._leave(way)
                else:
                    self._compare([way.here])
                    return []
        finally:
            way.close()

    def one(self, top: int, at: Pending, quantum: int) -> list[Pending]:
        """Counts a directory that was pending, and all below it. Returns what is left then."""
        path, _ = at
        try:
            fd = kernel.open_inside(top, path)
        except OSError as error:
            self.tally.problem(reason(os.fsdecode(path), error))
            return []
        try:
            self.count([os.fstat(fd)])
            self.lock(fd, os.fsdecode(path))
            return self.below(fd, at, quantum)
        finally:
            os.close(fd)

    def _enter(self, way: Descent, name: str, depth: int) -> None:
        try:
            directory, found = way.enter(name)
        except OSError as error:
            self.tally.entries += 1
            self.tally.problem(reason(name, error))
            return
        self.count([found])
        self.lock(directory.fd, name)
        self._list(directory, depth + len(way.folders) - 1)

    def _list(self, directory: OpenDirectory, depth: int) -> None:
        if depth >= self.depth_max:
            raise WalkStopped(f"is deeper than {self.depth_max:,} levels")
        try:
            with self.lister(directory.fd) as entries:
                while chunk := list(islice(entries, CHUNK)):
                    # In the order of the disk: read in the order of names, a cold tree takes twice as long.
                    chunk.sort(key=_entry_inode)
                    self._chunk(directory, chunk)
        except OSError as error:
            self.tally.problem(reason(directory.name, error))

    def _chunk(self, directory: OpenDirectory, chunk: list[os.DirEntry[str]]) -> None:
        # Directories are not queried before they are opened: what is mounted on one may never answer.
        directory.todo += [(entry.name, None) for entry in chunk if entry.is_dir(follow_symlinks=False)]
        chunk = [entry for entry in chunk if not entry.is_dir(follow_symlinks=False)]
        try:
            found = [entry.stat(follow_symlinks=False) for entry in chunk]
        except OSError:
            chunk, found = self._one_by_one(chunk)
        if any(map(stat.S_ISDIR, set(map(_mode, found)))):
            self.tally.problem(CHANGED)  # a file when it was listed
        self.count(found)
        self._find_open(directory, chunk, found)

    def _find_open(self, directory: OpenDirectory, chunk: list[os.DirEntry[str]], found: list[os.stat_result]) -> None:
        """Queried from the kernel, file by file: a scan of processes may miss one that keeps moving its descriptors."""
        if not self.locking:
            return
        for entry, one in zip(chunk, found, strict=True):
            if stat.S_ISREG(one.st_mode) and kernel.is_open(directory.fd, entry.name):
                self.tally.problem(OPEN)
                return

    def _one_by_one(self, chunk: list[os.DirEntry[str]]) -> tuple[list[os.DirEntry[str]], list[os.stat_result]]:
        seen: list[tuple[os.DirEntry[str], os.stat_result]] = []
        for entry in chunk:
            try:
                seen.append((entry, entry.stat(follow_symlinks=False)))
            except OSError as error:
                self.tally.problem(reason(entry.name, error))
        return [entry for entry, _ in seen], [found for _, found in seen]

    def count(self, found: list[os.stat_result]) -> None:
        if self.is_time_up():
            raise WalkStopped("could not be measured in the available time")
        self.tally.add(found)
        if self.tally.entries > self.entries_max:
            raise WalkStopped(f"has more than {self.entries_max:,} entries")

    def lock(self, directory: int, name: str) -> None:
        """Tried, not kept: a process that wants it later finds a directory that is out of reach."""
        if not self.locking:
            return
        try:
            if not kernel.lock(directory):
                self.tally.problem(LOCKED)
        except OSError as error:
            self.tally.problem(f"whether {printable(name)} is locked could not be determined: {error.strerror}")

    def _leave(self, way: Descent) -> None:
        try:
            way.leave()
        except OSError as error:
            raise WalkStopped(CHANGED) from error  # the way back up is lost

    def _compare(self, directories: Iterable[OpenDirectory]) -> None:
        for directory in directories:
            if directory.fd >= 0 and shape(os.fstat(directory.fd)) != directory.shape:
                self.tally.problem(CHANGED)


def pending(way: Descent, depth: int) -> list[Pending] | None:
    """What is left to visit, for others. None: too deep for a path, so it cannot be given to others."""
    left: list[Pending] = []
    path = way.prefix
    for level, directory in enumerate(way.folders):
        path = os.path.join(path, os.fsencode(directory.name))  # noqa: PTH118 - bytes
        if len(path) > PATH_BYTES:
            return None
        left += [(os.path.join(path, os.fsencode(name)), depth + level + 1) for name, _ in directory.todo]  # noqa: PTH118
    return left


def shape(found: os.stat_result) -> tuple[int, int]:
    """What changes when entries come and go."""
    return found.st_mtime_ns, found.st_nlink


def reason(name: str, error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE}:
        return CHANGED
    if error.errno == errno.EXDEV:
        return MOUNT_POINT
    return f"{printable(name)} could not be read: {error.strerror}"


def printable(name: str) -> str:
    """Names are bytes and not trusted: no terminal codes, no line breaks, nothing that is not UTF-8."""
    whole = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in whole)


def _reopened(below: int, identity: Identity) -> int:
    fd = os.open("..", kernel.FOLDER, dir_fd=below)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != identity:
        os.close(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return fd


def _close(directory: OpenDirectory) -> None:
    if directory.fd >= 0:
        os.close(directory.fd)
        directory.fd = -1

"""How large a tree of files is and when it was last used. Looks only; deletes nothing.

Descriptors all the way down: no link is followed and no mount is entered, whatever is renamed meanwhile.
What could not be read, or changed during the walk, is a problem, and a tree with a problem has Unknown facts.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.model.unknown import Unknown

Identity: TypeAlias = tuple[int, int]  # device, inode
Lister: TypeAlias = Callable[[int], AbstractContextManager[Iterator["os.DirEntry[str]"]]]
BLOCK = 512  # st_blocks counts these, whatever the filesystem's own block is
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOUNT_POINT = "contains a mount point"
CHANGED = "changed while it was measured"
PROBLEMS_NAMED = 3
ENTRIES_PER_GLANCE = 64  # at the clock


class Limits(msgspec.Struct, frozen=True):
    entries: int = 2_000_000
    depth: int = 256  # each level holds a descriptor open


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A tree as it was during one walk. With any problem, size and times are Unknown: part of it was not seen."""

    device: int
    inode: int
    uid: int
    size: int | Unknown  # bytes allocated on disk; hard links count once, holes not at all
    entries: int
    newest: datetime | Unknown  # of all access, modification and change times
    ctime_ns: int | Unknown  # newest; unlike the others it cannot be set by anyone
    problems: tuple[str, ...]
    sockets: int = 0
    held_by: int | None = None  # a pid of `open_files` that has something of it open


def never() -> bool:
    return False


def measure(
    name: str,
    parent: int,
    open_files: Mapping[Identity, int] | None = None,
    limits: Limits | None = None,
    is_time_up: Callable[[], bool] = never,
    lister: Lister = os.scandir,
) -> Measured | None:
    """The entry `name` of the directory that is open as `parent`. None: there is no such entry."""
    walk = _Walk(mount_id(parent), open_files or {}, limits or Limits(), is_time_up, lister)
    try:
        top = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    walk.problem_if(top.st_dev != os.fstat(parent).st_dev, MOUNT_POINT)
    try:
        if stat.S_ISDIR(top.st_mode):
            top = walk.enter(name, parent, top, depth=0)
        else:
            walk.count(top)
    except _EnoughError as enough:
        walk.problems.append(str(enough))
    return walk.result(top)


class _EnoughError(Exception):
    """The walk ends here; what was not visited is not known."""


class _Walk:
    def __init__(
        self,
        mount: str,
        open_files: Mapping[Identity, int],
        limits: Limits,
        is_time_up: Callable[[], bool],
        lister: Lister,
    ) -> None:
        self.mount, self.open_files = mount, open_files
        self.entries_max, self.depth_max = limits.entries, limits.depth
        self.is_time_up, self.lister = is_time_up, lister
        self.problems: list[str] = []
        self.linked: set[Identity] = set()
        self.blocks = self.entries = self.sockets = self.newest_ns = self.ctime_ns = 0
        self.held_by: int | None = None

    def enter(self, name: str, parent: int, listed: os.stat_result, depth: int) -> os.stat_result:
        """Counts a directory and all below it. Returns what the open descriptor says it is."""
        try:
            with open_directory(name, parent) as fd:
                # Taken before it is read, since reading it may move its own access time.
                found = os.fstat(fd)
                self.count(found)
                # By mount id: a bind mount of the same filesystem has the same device number.
                if mount_id(fd) == self.mount:
                    self.visit(fd, depth)
                else:
                    self.problems.append(MOUNT_POINT)
                self.problem_if(_shape(os.fstat(fd)) != _shape(found), CHANGED)
                return found
        except OSError as error:
            self.count(listed)
            self.problems.append(_reason(name, error))
            return listed

    def visit(self, fd: int, depth: int) -> None:
        if depth >= self.depth_max:
            raise _EnoughError(f"is deeper than {self.depth_max} levels")
        # Directories wait until the listing is closed, so that each level holds one descriptor and not two.
        with self.lister(fd) as entries:
            directories = list(self.listed(entries))
        for name, found in directories:
            self.enter(name, fd, found, depth + 1)

    def listed(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
        """Counts what is no directory, and gives the directories."""
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError as error:
                self.problems.append(_reason(entry.name, error))
                continue
            if stat.S_ISDIR(found.st_mode):
                yield entry.name, found
            else:
                self.count(found)

    def count(self, found: os.stat_result) -> None:
        """Called for every entry, so it is written for speed: millions of them are usual."""
        self.entries += 1
        if self.entries > self.entries_max:
            raise _EnoughError(f"has more than {self.entries_max:,} entries")
        if self.entries % ENTRIES_PER_GLANCE == 1 and self.is_time_up():
            raise _EnoughError("could not be measured in the time there was")
        changed = found.st_ctime_ns
        self.ctime_ns = max(self.ctime_ns, changed)
        self.newest_ns = max(self.newest_ns, changed, found.st_atime_ns, found.st_mtime_ns)
        mode, identity = found.st_mode, (found.st_dev, found.st_ino)
        if identity in self.open_files:
            self.held_by = self.open_files[identity]
        if found.st_nlink > 1 and not stat.S_ISDIR(mode):
            if identity in self.linked:
                return
            self.linked.add(identity)
        self.blocks += found.st_blocks
        if stat.S_ISSOCK(mode):
            self.sockets += 1

    def problem_if(self, is_so: bool, problem: str) -> None:
        if is_so:
            self.problems.append(problem)

    def result(self, top: os.stat_result) -> Measured:
        unknown = Unknown(in_short(self.problems)) if self.problems else None
        return Measured(
            device=top.st_dev,
            inode=top.st_ino,
            uid=top.st_uid,
            size=self.blocks * BLOCK if unknown is None else unknown,
            entries=self.entries,
            newest=instant(self.newest_ns) if unknown is None else unknown,
            ctime_ns=self.ctime_ns if unknown is None else unknown,
            problems=tuple(self.problems),
            sockets=self.sockets,
            held_by=self.held_by,
        )


@contextmanager
def open_directory(name: str, parent: int | None = None) -> Iterator[int]:
    """Never through a link. Without moving its access time where we may: only owners and root are allowed that,
    and a look that counted as use would keep every tree for ever."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags | os.O_NOATIME, dir_fd=parent)
    except PermissionError:
        fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def mount_id(fd: int) -> str:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("mnt_id:"))


def in_short(problems: list[str]) -> str:
    """A few of them: a tree of a million unreadable files has one reason, not a million."""
    distinct = list(dict.fromkeys(problems))
    more = len(distinct) - PROBLEMS_NAMED
    return "; ".join(distinct[:PROBLEMS_NAMED]) + (f"; and {more} more" if more > 0 else "")


def instant(ns: int) -> datetime:
    """Rounded up, so that nothing ever looks older than it is."""
    return EPOCH + timedelta(microseconds=-(-ns // 1000))


def _shape(found: os.stat_result) -> tuple[int, int]:
    """What moves when entries come and go."""
    return found.st_mtime_ns, found.st_nlink


def _reason(name: str, error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE}:
        return CHANGED
    return f"{printable(name)} could not be read: {error.strerror}"


def printable(name: str) -> str:
    """Names are bytes and hostile: no terminal codes, no line breaks, nothing that is not UTF-8."""
    whole = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in whole)

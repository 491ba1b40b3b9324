"""How large a directory tree is and when it was last used. Reads only; deletes nothing.

Descriptors all the way down: no link is followed and no mount is entered, whatever is renamed in the meantime. What
could not be read, or changed during the walk, is a problem, and a tree with a problem has Unknown facts.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec

from gpukeeper.disk import kernel, worker_pool
from gpukeeper.disk.kernel import mount_id
from gpukeeper.disk.walk import (
    CHANGED,
    MOUNT_POINT,
    OUT_OF_TIME,
    Identity,
    Lister,
    Pending,
    TreeWalk,
    WalkStopped,
    WalkTotals,
    never,
    printable,
    reason,
)
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.unknown import Unknown

__all__ = [
    "CHANGED",
    "MOUNT_POINT",
    "Identity",
    "MeasureLimits",
    "TreeMeasurement",
    "estimate",
    "measure",
    "mount_id",
    "open_directory",
    "printable",
]
PROBLEMS_NAMED = 3
ALONE = 20_000  # entries; larger trees are split, since starting processes takes as long as counting these
SHARE = 20_000  # entries after which a worker process returns what is left


class MeasureLimits(msgspec.Struct, frozen=True):
    entries: int = 5_000_000
    depth: int = 20_000


KEEP = ".keep"  # such a file at the top of a tree keeps it


def tree_uid(device: int, inode: int) -> str:
    return f"{device}:{inode}"


class TreeMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """A tree as it was during one walk. With any problem, size and times are Unknown: part of it was not read.

    `newest` is the last recorded use: the modification and change times of everything, and the access times of files.
    The change time of the top counts, since moving a tree changes nothing else. `content` is without it: a removal that
    puts a tree back changes it too, and must not make that tree the latest of its kind.
    """

    device: int
    inode: int
    uid: int
    size: int | Unknown  # bytes allocated on disk; hard links count once, holes not at all
    entries: int
    newest: datetime | Unknown  # when any entry was last changed, or read as far as that is recorded
    ctime_ns: int | Unknown  # newest change time; unlike the others it cannot be set by users
    problems: tuple[str, ...]
    sockets: int = 0
    fifos: int = 0
    devices: int = 0
    held_by: int | None = None  # a pid of `open_files` that has something of it open
    uids: frozenset[int] = frozenset()  # owners of all its entries; with a problem, of those that were read
    read: datetime | None = None  # the newest read of a file after its last change; None: none is recorded
    content: datetime | Unknown = Unknown("not measured")  # newest modification or change, without the top's own change

    @property
    def tree_uid(self) -> str:
        return tree_uid(self.device, self.inode)

    @property
    def incarnation(self) -> str:
        return f"{self.inode}:{'not measured' if isinstance(self.ctime_ns, Unknown) else self.ctime_ns}"


def measure(
    name: str,
    parent: int,
    open_files: Mapping[Identity, int] | None = None,
    limits: MeasureLimits | None = None,
    is_time_up: Callable[[], bool] = never,
    lister: Lister = os.scandir,
    alone: int | None = None,
) -> TreeMeasurement | None:
    """The entry `name` of the directory that is open as `parent`. None: there is no such entry."""
    try:
        top = kernel.stat_inside(parent, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EXDEV:
            return _mount_point(name, parent)
        raise
    limits = limits or MeasureLimits()
    tally = WalkTotals(open_files or {})
    walk = TreeWalk(tally, limits.entries, limits.depth, is_time_up, lister)
    try:
        if stat.S_ISDIR(top.st_mode):
            top = _measure_folder(walk, name, parent, top, alone)
        else:
            top = _measure_file(walk, name, parent, top)
    except WalkStopped as enough:
        tally.problem(str(enough))
    return _result(tally, top)


def measure_below(walk: TreeWalk, top: int, alone: int | None = None) -> None:
    """All below an open directory; two worker processes share large ones. What was not read is a problem of the
    tally.
    """
    left = walk.below(top, quantum=ALONE if alone is None else alone)
    if left:
        _share_out(walk, top, left)


def estimate(paths: Sequence[str], deadline: timedelta) -> int | Unknown:
    """Bytes of all paths together, as `du` counts them: quick, and never a reason to delete.

    It enters bind mounts of the same filesystem, returns no times, and paths may be swapped while it runs. Good enough
    for "is it above the limit?". What is gone in the meantime adds nothing.
    """
    command, plain = ["du", "-sxcB1", "--", *paths], {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=deadline.total_seconds(), check=False, env=plain)
    except subprocess.TimeoutExpired:
        return Unknown(f"du did not finish within {deadline.total_seconds():g} s")
    except OSError as error:
        return Unknown(f"du could not be started: {error.strerror}")
    complaints = done.stderr.splitlines()
    only_gone = bool(complaints) and all(one.endswith(b": No such file or directory") for one in complaints)
    if done.returncode != 0 and not only_gone:
        first = done.stderr.decode("utf-8", "backslashreplace").partition("\n")[0]
        return Unknown(f"du could not read everything: {printable(first)}")
    return int(done.stdout.rsplit(b"\n", 2)[-2].split(b"\t")[0])


@contextmanager
def open_directory(name: str, parent: int | None = None) -> Iterator[int]:
    """Never through a link. Without updating its access time where permitted: only owners and root may do that, and a
    read of ours that counted as use would keep every tree forever.
    """
    try:
        fd = os.open(name, kernel.FOLDER | os.O_NOATIME, dir_fd=parent)
    except PermissionError:
        fd = os.open(name, kernel.FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def in_short(problems: Sequence[str]) -> str:
    """Only the first ones: a tree of a million unreadable files has one reason, not a million."""
    distinct = list(dict.fromkeys(problems))
    more = len(distinct) - PROBLEMS_NAMED
    return "; ".join(distinct[:PROBLEMS_NAMED]) + (f"; and {more} more" if more > 0 else "")


def instant(ns: int) -> datetime:
    """Rounded up, so that nothing ever looks older than it is."""
    return EPOCH + timedelta(microseconds=-(-ns // 1000))


def unmeasured(device: int, inode: int, uid: int, why: Unknown) -> TreeMeasurement:
    """A tree that was not walked."""
    return TreeMeasurement(
        device=device, inode=inode, uid=uid, size=why, entries=1, newest=why, ctime_ns=why, problems=(why.why,)
    )


def _mount_point(name: str, parent: int) -> TreeMeasurement | None:
    """A filesystem that never answers may be mounted there: it is not queried."""
    try:
        top = kernel.status_of(f"/proc/self/fd/{parent}/{name}")
    except FileNotFoundError:
        return None
    return unmeasured(top.dev, top.ino, top.uid, Unknown(MOUNT_POINT))


def _measure_folder(
    walk: TreeWalk, name: str, parent: int, listed: os.stat_result, alone: int | None
) -> os.stat_result:
    """Returns what the open descriptor is."""
    try:
        top = kernel.open_inside(parent, name)
    except OSError as error:
        walk.count([listed])
        walk.tally.problem(reason(name, error))
        return listed
    try:
        # Taken before it is read, since reading it may update its own access time.
        found = os.fstat(top)
        walk.count([found])
        walk.tally.content_ns = found.st_mtime_ns  # without its own change, see Measured
        measure_below(walk, top, alone)
        return found
    finally:
        os.close(top)


def _measure_file(walk: TreeWalk, name: str, parent: int, listed: os.stat_result) -> os.stat_result:
    try:
        found = kernel.stat_inside(parent, name)
    except OSError as error:
        walk.tally.problem(reason(name, error))
        found = listed
    walk.count([found])
    return found


def _share_out(walk: TreeWalk, top: int, left: list[Pending]) -> None:
    tally = walk.tally
    settings = {
        "open": [[*identity, pid] for identity, pid in tally.open_files.items()],
        "depth_max": walk.depth_max,
        "locking": walk.locking,
        "quantum": SHARE,
    }

    def accept(answer: dict[str, object]) -> None:
        tally.merge(answer)
        if tally.entries > walk.entries_max:
            raise WalkStopped(f"has more than {walk.entries_max:,} entries")

    with worker_pool.WorkerPool("measure", top, settings) as programs:
        while left and not programs.is_ready():
            left += walk.one(top, left.pop(), worker_pool.MEANWHILE)
        why = programs.share_out(left, accept, walk.is_time_up)
    if why is not None:
        raise WalkStopped("could not be measured in the available time" if why == OUT_OF_TIME else why)


def _result(tally: WalkTotals, top: os.stat_result) -> TreeMeasurement:
    unknown = Unknown(in_short(tally.problems)) if tally.problems else None
    return TreeMeasurement(
        device=top.st_dev,
        inode=top.st_ino,
        uid=top.st_uid,
        size=tally.size() if unknown is None else unknown,
        entries=tally.entries,
        newest=instant(tally.newest_ns) if unknown is None else unknown,
        ctime_ns=tally.ctime_ns if unknown is None else unknown,
        problems=tuple(tally.problems),
        sockets=tally.sockets,
        fifos=tally.fifos,
        devices=tally.devices,
        held_by=tally.held_by,
        uids=frozenset(tally.uids),
        read=instant(tally.read_ns) if tally.read_ns else None,
        content=instant(tally.content_ns) if unknown is None else unknown,
    )

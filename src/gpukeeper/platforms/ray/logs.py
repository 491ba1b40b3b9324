"""Logs of ended processes, in sessions that are alive: one by one, by the pid in the name, and only closed files; and
the end of the newest ones as evidence before a removal.

Nothing else of a live session is ever offered: without its spilled objects or unpacked code Ray hangs, without a
message.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from gpukeeper.disk import kernel
from gpukeeper.disk.access_times import Reads, hidden_until
from gpukeeper.disk.measure import instant, printable
from gpukeeper.disk.walk import read_ns
from gpukeeper.platforms.ray.translate import LONG_LOG, LogFile, long_log
from gpukeeper.platforms.ray.visit import Visit

LOGS = "logs"
OLD = "old"  # what Ray moved itself, of workers that ended
FOLDERS = ("", OLD, "events", "export_events")
BLOCK = 512
_OF_A_PROCESS = re.compile(
    r"(?:worker|io_worker)-[0-9a-f]+-[0-9a-f]+-(\d+)\.(?:out|err)(?:\.\d+)?"
    r"|python-core-(?:worker|driver)-[0-9a-f]+_(\d+)(?:\.\d+)?\.log(?:\.\d+)?"
    r"|event_[A-Z_]+_(\d+)\.log(?:\.\d+)?"
)
_SETUP = re.compile(r"runtime_env_setup-[0-9a-f]+\.log(?:\.\d+)?")


def pid_in(name: str) -> int | None:
    """Of the process that wrote it, in its own pid namespace."""
    match = _OF_A_PROCESS.fullmatch(name)
    return next((int(number) for number in match.groups() if number), None) if match else None


def removable(logs: int, visit: Visit, reads: Reads, before: datetime) -> tuple[LogFile, ...]:
    """Closed, of a process that is gone from its node, and not used since then, as far as is known."""
    alive = {one.inside for one in visit.node.processes} | {one.pid for one in visit.node.processes}
    setups = sorted(_setups(logs), key=lambda row: row[1].st_mtime_ns)
    found = [_file("", name, about) for name, about in setups[:-1]]
    for directory in FOLDERS:
        found += [
            _file(directory, name, about)
            for name, about in _files(logs, directory)
            if (directory == OLD and pid_in(name) not in alive) or _is_over(name, alive)
        ]
    used = visit.used.files
    closed = (one for one in found if (one.device, one.inode) not in used)
    return tuple(one for one in closed if (until := hidden_until(one.newest, one.read, reads)) and until < before)


def too_long(logs: int) -> tuple[str, ...]:
    """Sentences about logs that grow without bound."""
    sizes = [(name, about.st_blocks * BLOCK) for name, about in _files(logs, "")]
    return tuple(long_log(name, size) for name, size in sizes if size > LONG_LOG)


def _is_over(name: str, alive: set[int]) -> bool:
    pid = pid_in(name)
    return pid is not None and pid not in alive


def _setups(logs: int) -> Iterator[tuple[str, os.stat_result]]:
    return ((name, about) for name, about in _files(logs, "") if _SETUP.fullmatch(name))


@contextmanager
def opened(logs: int, directory: str) -> Iterator[int | None]:
    """None: it does not exist, or is a link, which Ray does not create."""
    try:
        fd = kernel.open_inside(logs, directory or ".")
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _files(logs: int, directory: str) -> Iterator[tuple[str, os.stat_result]]:
    with opened(logs, directory) as fd:
        for name in sorted(os.listdir(fd)) if fd is not None else ():  # noqa: PTH208
            try:
                about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                yield name, about


def _file(directory: str, name: str, about: os.stat_result) -> LogFile:
    newest = instant(max(about.st_atime_ns, about.st_mtime_ns, about.st_ctime_ns))
    size, read = about.st_blocks * BLOCK, read_ns(about)
    when = instant(read) if read else None
    return LogFile(directory, name, about.st_dev, about.st_ino, about.st_ctime_ns, size, newest, about.st_uid, when)


END_BYTES = 64 * 1024  # bytes of each file
MOST_FILES = 200
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def ends_of(directory: int, wanted: frozenset[tuple[str, str]] | None = None) -> dict[str, bytes]:
    """Of the newest files below an open directory of logs; `wanted`: only these, by directory and name."""
    rows = sorted(_newest_files(directory, wanted), reverse=True)[:MOST_FILES]
    ends = {}
    for _, place, name in rows:
        text = _end_of_file(directory, place, name)
        if text:
            ends["/".join(part for part in (LOGS, place, printable(name)) if part)] = text
    return ends


def _newest_files(directory: int, wanted: frozenset[tuple[str, str]] | None) -> Iterator[tuple[int, str, str]]:
    for place in FOLDERS:
        with opened(directory, place) as fd:
            for name in os.listdir(fd) if fd is not None else ():  # noqa: PTH208
                try:
                    about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(about.st_mode) and (wanted is None or (place, name) in wanted):
                    yield about.st_mtime_ns, place, name


def _end_of_file(directory: int, place: str, name: str) -> bytes:
    """Without updating its access time: a read of ours must not count as use."""
    try:
        fd = kernel.open_inside(directory, f"{place}/{name}" if place else name, _READ)
    except OSError:
        return b""
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return b""
        return os.pread(fd, END_BYTES, max(about.st_size - END_BYTES, 0))
    except OSError:
        return b""
    finally:
        os.close(fd)

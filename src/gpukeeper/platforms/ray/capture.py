"""Evidence of a session or of logs before their removal: the end of the newest log files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from gpukeeper.disk import kernel
from gpukeeper.disk.measure import printable
from gpukeeper.platforms.ray import logs

END = 64 * 1024  # bytes of each file
FILES = 200
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def ends_of(directory: int, wanted: frozenset[tuple[str, str]] | None = None) -> dict[str, bytes]:
    """Of the newest files below an open directory of logs; `wanted`: only these, by directory and name."""
    rows = sorted(_files(directory, wanted), reverse=True)[:FILES]
    ends = {}
    for _, place, name in rows:
        text = _end(directory, place, name)
        if text:
            ends["/".join(part for part in (logs.LOGS, place, printable(name)) if part)] = text
    return ends


def _files(directory: int, wanted: frozenset[tuple[str, str]] | None) -> Iterator[tuple[int, str, str]]:
    for place in logs.FOLDERS:
        with logs.opened(directory, place) as fd:
            for name in os.listdir(fd) if fd is not None else ():  # noqa: PTH208
                try:
                    about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(about.st_mode) and (wanted is None or (place, name) in wanted):
                    yield about.st_mtime_ns, place, name


def _end(directory: int, place: str, name: str) -> bytes:
    """Without updating its access time: a read of ours must not count as use."""
    try:
        fd = kernel.open_inside(directory, f"{place}/{name}" if place else name, _READ)
    except OSError:
        return b""
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return b""
        return os.pread(fd, END, max(about.st_size - END, 0))
    except OSError:
        return b""
    finally:
        os.close(fd)

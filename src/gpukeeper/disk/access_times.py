"""When a tree was last used, as far as that can be known: by its times, and by watching it. Changes are always
recorded, reads are not (relatime, noatime): what counts is until when a tree may have been read without a record,
unless it was watched. The kernel (fanotify) reports each closed file of a whole filesystem. Whatever is missed
restarts the time. That needs root and Linux 5.9, and does not see what an overlay or an NFS server reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import IntEnum
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel
from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.mounts import MountEntry, covering, is_at_or_below, own_mounts, source_of
from gpukeeper.disk.walk import printable
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

DAY = timedelta(hours=24)  # relatime: a read within a day of the recorded one is not recorded, unless a change came


class ReadRecording(IntEnum):
    """How often a read is recorded; the higher, the less often."""

    ALWAYS = 0
    DAILY = 1
    NEVER = 2


class Reads(msgspec.Struct, frozen=True):
    """How reads are recorded on the weakest of the mounts through which a tree can be reached."""

    recorded: ReadRecording
    mount: str = ""  # as text


class WatchRecord(msgspec.Struct, frozen=True):
    """Every use since then was seen, and the last one was then."""

    since: datetime
    last: datetime | None = None


class LastUse(msgspec.Struct, frozen=True):
    """`at`: not used after that; it is in the future where a read may still go unrecorded. `how`: what that follows
    from.
    """

    at: datetime | Unknown
    how: str = ""


def reads_of(directory: str, mounts: Sequence[MountEntry], tables: Iterable[Sequence[MountEntry]]) -> Reads:
    """Of the entries of a directory, by its path without links. `mounts`: of the namespace of the path; `tables`: of
    every namespace. A process that has only something inside an entry mounted uses that entry anyway.
    """
    here = source_of(directory, mounts)
    if here is None:
        return Reads(ReadRecording.NEVER, "a mount that is not listed")
    ways = [(_recorded(one), _in_words(one)) for one in _ways_to(*here, mounts)]
    for table in tables:
        # A service in a sandbox of the machine's own directories (ProtectSystem=) sees them read-only; see limits.md.
        sandbox = _root(table) == _root(mounts)
        ways += [(_recorded(one, sandbox=sandbox), _in_words(one)) for one in _ways_to(*here, table)]
    return Reads(*max(ways, key=lambda way: way[0]))


def last_use(found: TreeMeasurement, reads: Reads, watched: WatchRecord | Unknown | None, now: datetime) -> LastUse:
    """When it was certainly not used any more, by what was recorded and watched. Unknown: the watch failed."""
    newest = found.newest
    if isinstance(newest, Unknown):
        return LastUse(newest)
    what = "recorded read" if newest == found.read else "change"
    known = f"last {what} {_ago(newest, now)}"
    hidden = hidden_until(newest, found.read, reads)
    if isinstance(watched, WatchRecord):
        seen = newest if watched.last is None else max(newest, watched.last)
        hidden = watched.since if hidden is None else min(hidden, watched.since)
        last = "" if watched.last is None else f", last use {_ago(watched.last, now)}"
        return LastUse(max(seen, hidden), f"{known}; watched for {in_words(now - watched.since)}{last}")
    if hidden is None:
        trace = f"{known}, but reads are not recorded on {reads.mount}"
        if isinstance(watched, Unknown):
            return LastUse(Unknown(f"{trace}, and it could not be watched: {watched.why}"))
        return LastUse(Unknown(f"{trace}; run `gpukeeper serve` to watch it, or mount it with relatime or strictatime"))
    if hidden > newest:
        return LastUse(hidden, f"{known}; reads in the 24h after that are not recorded on {reads.mount}")
    return LastUse(newest, known)


def recorded(found: TreeMeasurement, now: datetime) -> LastUse:
    """By what was recorded alone: for trees that no process can read, and for trees that are kept for another
    reason.
    """
    return last_use(found, Reads(ReadRecording.ALWAYS), None, now)


def hidden_until(newest: datetime, read: datetime | None, reads: Reads) -> datetime | None:
    """Until when reads may be unrecorded. None: forever. With relatime a read is recorded if the file changed since the
    recorded one, or if that is older than a day. So only reads after a recorded one can be missing, and only for a
    day.
    """
    if reads.recorded is ReadRecording.NEVER:
        return None
    if reads.recorded is ReadRecording.ALWAYS or read is None:
        return newest
    return max(newest, read + DAY)


def _ways_to(device: str, inside: str, table: Sequence[MountEntry]) -> Iterator[MountEntry]:
    """The mounts of one namespace through which that directory is visible: not where another is mounted above it."""
    for mount in table:
        if mount.device == device and is_at_or_below(inside, mount.source):
            seen_at = os.path.normpath(Path(mount.point, os.path.relpath(inside, mount.source)))
            if covering(seen_at, table) == mount:
                yield mount


def _recorded(mount: MountEntry, *, sandbox: bool = False) -> ReadRecording:
    if "noatime" in mount.options or ("ro" in mount.options and not sandbox) or not mount.options:
        return ReadRecording.NEVER
    return ReadRecording.DAILY if "relatime" in mount.options else ReadRecording.ALWAYS


def _root(table: Sequence[MountEntry]) -> tuple[str, str] | None:
    return source_of("/", table)


def _in_words(mount: MountEntry) -> str:
    how = next((one for one in ("noatime", "ro", "relatime") if one in mount.options), "strictatime")
    return f"{printable(mount.point)} ({'read-only' if how == 'ro' else how})"


def _ago(at: datetime, now: datetime) -> str:
    return f"{in_words(now - at)} ago" if at <= now else f"{in_words(at - now)} ahead"


REMEMBERED = 50_000  # entries; more are dropped, the oldest first, and with them the time before
_CLOEXEC, _NONBLOCK, _REPORT_DIR_AND_NAME = 0x1, 0x2, 0xC00
_ADD, _FILESYSTEM = 0x1, 0x100
_CLOSED, _OVERFLOW = 0x18, 0x4000
_HERE = -100  # AT_FDCWD
_DIR_AND_NAME = 2
_EVENT = struct.Struct("=IBBHQii")  # length, version, -, length of this, mask, fd, pid
_INFO = struct.Struct("=BBH8sIi")  # type, -, length, filesystem, bytes of the handle, type of the handle
_BUFFER = 256 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class Event(msgspec.Struct, frozen=True):
    """A file of that name, in that directory, was closed. Without a handle: the directory is not reported."""

    filesystem: bytes
    handle: bytes | None  # type and bytes, as open_by_handle_at requires them
    name: str
    pid: int
    lost: bool = False  # others were not reported


class _Disk(msgspec.Struct):
    mark: str  # the name of its mark in fdinfo
    filesystem: bytes
    since: float
    folders: set[str]


def since_start() -> float:
    """Seconds that no clock change affects; a suspended machine counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class FileWatcher:
    def __init__(self, clock: Callable[[], float] = since_start) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._fd = -1
        self._wake = (-1, -1)
        self._disks: dict[str, _Disk] = {}  # by the name of its mark
        self._last: dict[tuple[str, str], float] = {}  # by directory and entry
        self._why: dict[str, str] = {}  # by directory: why it is not watched

    def start(self) -> str | None:
        """Why nothing can be watched; None: it begins."""
        fd = _libc.fanotify_init(_CLOEXEC | _NONBLOCK | _REPORT_DIR_AND_NAME, os.O_RDONLY | os.O_CLOEXEC)
        if fd < 0:
            return os.strerror(ctypes.get_errno())
        with self._lock:
            self._fd, self._wake = fd, os.pipe2(os.O_CLOEXEC)
        threading.Thread(target=self._run, args=(fd, self._wake[0]), daemon=True, name="watch").start()
        return None

    def close(self) -> None:
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._wake[1])
            os.close(self._fd)
            self._fd = -1
            self._disks, self._last, self._why = {}, {}, {}

    def add(self, directory: str) -> None:
        """A path without links. Every further call is free, unless its filesystem is another one now."""
        with self._lock:
            if self._fd >= 0:
                try:
                    self._add(directory)
                    self._why.pop(directory, None)
                except OSError as error:
                    self._why[directory] = error.strerror or str(error)

    def watched(self, directory: str, name: str, now: datetime) -> WatchRecord | Unknown | None:
        """Of an entry of that directory. Unknown: it could not be watched; None: it was not requested."""
        with self._lock:
            if self._fd < 0:
                return None
            self._drain()
            disk = next((one for one in self._disks.values() if directory in one.folders), None)
            if disk is None or disk.mark not in self._marks():
                return Unknown(self._why.get(directory, "its filesystem is another one now"))
            time_now, last = self._clock(), self._last.get((directory, name))
            at = None if last is None else now - timedelta(seconds=time_now - last)
            return WatchRecord(now - timedelta(seconds=time_now - disk.since), at)

    def _add(self, directory: str) -> None:
        mount = covering(directory, own_mounts())
        if mount is None:
            raise OSError(errno.ENOENT, "its mount is not listed")
        major, minor = map(int, mount.device.split(":"))
        mark = f"sdev:{major << 20 | minor:x}"
        known = self._disks.get(mark)
        if known is not None and mark in self._marks():
            known.folders.add(directory)
            return
        _resolvable(directory)
        if _libc.fanotify_mark(self._fd, _ADD | _FILESYSTEM, ctypes.c_uint64(_CLOSED), _HERE, os.fsencode(directory)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if mark not in self._marks():
            raise OSError(errno.EXDEV, "the kernel watches another filesystem")
        for other in self._disks.values():
            other.folders.discard(directory)
        filesystem = os.statvfs(directory).f_fsid.to_bytes(8, "little")
        self._disks[mark] = _Disk(mark, filesystem, self._clock(), {directory})

    def _marks(self) -> set[str]:
        """Those that exist. That of a filesystem that was unmounted does not, even if it was mounted again since."""
        with open(f"/proc/self/fdinfo/{self._fd}") as lines:  # noqa: PTH123 - of the kernel
            return {line.split()[1] for line in lines if line.startswith("fanotify sdev:")}

    def _run(self, fd: int, ended: int) -> None:
        try:
            while not any(one == ended for one in select.select([fd, ended], [], [])[0]):
                with self._lock:
                    if self._fd != fd:
                        return
                    self._drain()
        except (OSError, ValueError):
            return  # closed in the meantime; the next caller reads what is left
        finally:
            os.close(ended)

    def _drain(self) -> None:
        """Everything that was reported so far. A directory is resolved once at a time: it may be renamed later."""
        known: dict[tuple[bytes, bytes], str | None] = {}
        now = self._clock()
        while True:
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                break
            for event in parse_events(data):
                if event.pid != os.getpid():
                    self._note(event, known, now)
        if len(self._last) > REMEMBERED:
            self._forget()

    def _note(self, event: Event, known: dict[tuple[bytes, bytes], str | None], now: float) -> None:
        disks = [one for one in self._disks.values() if one.filesystem == event.filesystem]
        lost = event.lost or not disks  # which of them is unknown
        for disk in self._disks.values() if lost else disks:
            if lost or event.handle is None:
                disk.since = now
                continue
            key = event.filesystem, event.handle
            try:
                path = known[key] if key in known else known.setdefault(key, self._resolved(disk, event.handle))
            except OSError:
                disk.since = now
                continue
            for directory in disk.folders if path is not None else ():
                entry = entry_of(directory, str(path), event.name)
                if entry is not None:
                    self._last[directory, entry] = now

    def _resolved(self, disk: _Disk, handle: bytes) -> str | None:
        """The path of a directory. None: it is gone, and so is what was in it."""
        for directory in disk.folders:
            try:
                with opened_mount(directory) as mount:
                    return resolve_handle(mount, handle)
            except FileNotFoundError:
                continue  # that one was removed
            except OSError as error:
                if error.errno == errno.ESTALE:
                    return None
                raise
        raise FileNotFoundError(errno.ENOENT, "none of its directories exists any more")

    def _forget(self) -> None:
        """The older half, and all that was before: since then the use of entries is incomplete."""
        oldest = sorted(self._last.items(), key=lambda item: item[1])[: len(self._last) // 2]
        for key, _ in oldest:
            del self._last[key]
        for disk in self._disks.values():
            disk.since = max(disk.since, oldest[-1][1])


@contextmanager
def opened_mount(directory: str) -> Iterator[int]:
    """For a moment only: an open file would keep its filesystem from being unmounted."""
    fd = os.open(directory, kernel.FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def entry_of(directory: str, path: str, name: str) -> str | None:
    """The entry of a directory that contains the file `name` in `path`. None: it is not below it."""
    if path == directory:
        return name
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :].split("/", 1)[0] if path.startswith(prefix) else None


def parse_events(data: bytes) -> Iterator[Event]:
    at = 0
    while at + _EVENT.size <= len(data):
        length, _, _, head, mask, _, pid = _EVENT.unpack_from(data, at)
        if mask & _OVERFLOW:
            yield Event(b"", None, "", 0, lost=True)
        else:
            yield _event(data[at + head : at + length], pid)
        at += max(length, _EVENT.size)


def _event(info: bytes, pid: int) -> Event:
    at = 0
    while at + _INFO.size <= len(info):
        kind, _, length, filesystem, size, of_type = _INFO.unpack_from(info, at)
        if kind == _DIR_AND_NAME:
            begin = at + _INFO.size
            name = info[begin + size : at + length].split(b"\0", 1)[0]
            return Event(
                filesystem, struct.pack("=Ii", size, of_type) + info[begin : begin + size], os.fsdecode(name), pid
            )
        at += max(length, 4)
    return Event(b"", None, "", pid, lost=True)  # the filesystem is not reported either


def resolve_handle(mount: int, handle: bytes) -> str:
    fd = _libc.open_by_handle_at(mount, handle, os.O_PATH | os.O_CLOEXEC)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)


def _resolvable(directory: str) -> None:
    """OSError if handles cannot be opened again: then an event could not be resolved."""
    buffer = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0) + bytes(128), 136)
    number = ctypes.c_int()
    if _libc.name_to_handle_at(_HERE, os.fsencode(directory), buffer, ctypes.byref(number), 0):
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    with opened_mount(directory) as mount:
        if resolve_handle(mount, buffer.raw) != directory:
            raise OSError(errno.EXDEV, "the kernel has another path for it")

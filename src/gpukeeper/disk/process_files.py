"""What processes use: files that are open or mapped, working directories, programs. Every thread is read, as often as
needed until two reads agree.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel
from gpukeeper.disk.kernel import (
    STATUS_MAX,
    TABLE_MAX,
    TooLong,
    read_proc,
    read_proc_part,
    stat_fields,
    status_value,
    unescaped,
)
from gpukeeper.disk.mounts import MOUNT_NAMESPACE, MountEntry, MountScan, covering, may_hang, source_of
from gpukeeper.disk.walk import ANY_DEVICE, BLOCK, Identity

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number for the one of the machine itself
ROUNDS = 200
FASTEST = 500_000  # process numbers a second: more than any machine assigns
ENDED = b"ended"  # before its start was read
QUIET = 2  # lists of processes without a new one
SECONDS = 20.0  # for all of it
AGREEING = 10  # reads of the descriptors of one process that show the same, if the kernel counts as many as were listed
UNCOUNTED = 20  # the same, if it does not count (Linux before 6.2), or counts one that is not open yet (in accept)
WHOLE = 40  # reads in which nothing vanished, of a process that never shows the same twice
LOOKS = 200
DESCRIPTORS = 50_000  # of one process; more are not read
ONLY_HERE = "only the processes of this container can be seen from here, not those of the machine"
DELETED = " (deleted)"
KERNEL_THREAD = 0x00200000
RECENT = 8  # descriptor tables of one process a thread is compared with, besides the first
IN_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage")  # noqa: S108 - a name to compare
OF_NO_MOUNT = ("/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage", "/drm mm object", "/dmabuf:")  # the kernel's own
# Every byte but b"\n" may be in a name; the kernel writes b"\n" as \012.
_MAPPED = re.compile(rb"^[^ \n]+ [^ \n]+ [^ \n]+ ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) +(/[^\n]*)$", re.MULTILINE)
_DEVICE = re.compile(r"(\d+):(\d+)")
RING = "anon_inode:[io_uring]"
_MAPPED_RING = re.compile(rb"^[^ \n]+ [^ \n]+ [^ \n]+ [^ \n]+ (\d+) +anon_inode:\[io_uring\]$", re.MULTILINE)
_REGISTERED = re.compile(rb"^UserFiles:\t\d+\n((?: *\d+: [^\n]*\n)*)", re.MULTILINE)
_OF_NO_NAME = re.compile(rb"<none>|[a-z_]+:\[?[^/\n]*")  # an empty place; a socket, a pipe, another ring


class DeletedFile(msgspec.Struct, frozen=True):
    """A deleted file that is still open: its space is returned when it is closed."""

    pid: int
    path: str
    identity: Identity
    size: int  # bytes allocated


class ProcessScan:
    def __init__(self, proc: str, vouched: frozenset[str]) -> None:
        self.proc, self.vouched = proc, vouched
        self.comparable = _is_own(proc)
        self.until = time.monotonic() + SECONDS
        self.files: dict[Identity, int] = {}
        self.paths: dict[str, int] = {}
        self.held: dict[Identity, DeletedFile] = {}
        self.detached: list[tuple[int, int, int]] = []  # number of the mount, inode, pid
        self.unread: list[int] = []
        self.unsteady: list[str] = []  # why a process was not read completely, although it may be read
        self.rings: set[int] = set()  # inodes of the io_urings that a descriptor shows
        self.mapped_rings: dict[int, int] = {}  # inodes of those that are mapped, each with a pid
        self.mounts = MountScan(proc, self.files, self.paths, self.unsteady)
        self.restless = False
        self.numbers = _Numbers(self.proc, usable=self.comparable)

    def add_all(self) -> None:
        """Until no new process is found: a process may end before it is read, and a child of it continue.

        Twice in a row: the kernel lists processes in the order of their numbers. When these begin anew after the
        largest one, a child has a number that was passed already, while its parent ends before its own is reached. A
        number that was read may belong to another process by then, so each is known by its start, too.
        """
        seen: set[tuple[int, bytes]] = set()
        quiet = 0
        for _ in range(ROUNDS):
            new = self.numbers.unseen(seen)
            quiet = 0 if new else quiet + 1
            if quiet == QUIET:
                break
            for pid, start in new:
                if time.monotonic() > self.until:
                    self.restless = True
                    return
                self.numbers.sample()
                self.add(pid)
                if start != ENDED:
                    seen.add((pid, start))
        else:
            self.restless = True
        self.mounts.add_kept()
        self.add_detached()
        for inode, pid in self.mapped_rings.items():
            if inode not in self.rings:
                self.unsteady.append(f"pid {pid} has an io_uring without a descriptor, whose files cannot be read")

    def add(self, pid: int) -> None:
        home = Path(self.proc, str(pid))
        try:
            flags, has_ended = _state(home)
            if not flags & KERNEL_THREAD:  # such has no files, though non-root users may not see that
                self.add_threads(home, _Process(pid, self.comparable), has_ended)
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended
        except TooLong as error:
            self.unsteady.append(f"pid {pid} has {error.strerror} in {Path(error.filename).name}")
        except (OSError, ValueError, IndexError):
            if not self.is_vouched(home):
                self.unread.append(pid)

    def is_vouched(self, home: Path) -> bool:
        """Of root only: users can give a program any name. Not by the owner of its /proc directory: that is root for
        any process that may not be read, no matter which user runs it.
        """
        try:
            name = read_proc(f"{home}/comm", STATUS_MAX).removesuffix(b"\n")
            uids = status_value(read_proc(f"{home}/status", STATUS_MAX), b"Uid")
        except OSError:
            return False
        return os.fsdecode(name) in self.vouched and uids == b"0\t0\t0\t0"

    def add_threads(self, home: Path, process: _Process, has_ended: bool) -> None:
        """Until no new one is found. Of a process that ended and was not yet reaped, other threads may still run."""
        seen = {process.pid} if has_ended else set()
        for _ in range(ROUNDS):
            new = [tid for tid in _tids(home, process.pid) if tid not in seen]
            if not new:
                return
            for tid in new:
                try:
                    self.add_thread(home if tid == process.pid else home / "task" / str(tid), tid, process)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it ended
            seen.update(new)
        self.restless = True

    def add_thread(self, home: Path, tid: int, process: _Process) -> None:
        mounts = self.mounts.add(home)
        tables = not process.has_read(kernel.OPEN_FILES, tid)
        folders = not process.has_read(kernel.FOLDERS, tid)
        if not process.mapped:
            self.add_mapped(home, process.pid, mounts)
            process.mapped = True
        if tables or folders:
            self.add_open(home, process.pid, mounts, tables)
        for kind, is_read in ((kernel.OPEN_FILES, tables), (kernel.FOLDERS, folders)):
            if is_read:
                process.read[kind].append(tid)

    def add_mapped(self, home: Path, pid: int, mounts: tuple[MountEntry, ...]) -> None:
        self.add_path(f"{home}/exe", self.read_link(f"{home}/exe"), pid, mounts)
        maps = read_proc(f"{home}/maps", TABLE_MAX)
        for ring in _MAPPED_RING.findall(maps):
            self.mapped_rings.setdefault(int(ring), pid)
        for identity, path in parse_maps(maps):
            self.files.setdefault(identity, pid)
            self.paths.setdefault(path, pid)

    def add_open(self, home: Path, pid: int, mounts: tuple[MountEntry, ...], tables: bool) -> None:
        """Its descriptors and its directories, repeatedly until two reads agree: a file that moves from one number to
        another, or to the working directory, may be missed by any single read.
        """
        if self.comparable and pid == os.getpid():
            self.read(home, pid, mounts, tables, {})  # once: reading ourselves opens and closes descriptors
            return
        before: dict[str, str] = {}
        agreeing = counted = whole = 0
        for _ in range(LOOKS):
            now, is_counted = self.read(home, pid, mounts, tables, before)
            if now is not None:
                if now != before:
                    agreeing = counted = 0
                agreeing, counted, whole = agreeing + 1, counted + is_counted, whole + 1
                before = now
                if counted >= AGREEING or agreeing >= UNCOUNTED or whole >= WHOLE:
                    return
            if time.monotonic() > self.until:
                break
        self.unsteady.append(f"pid {pid} keeps changing its open files, faster than they can be read")

    def read(
        self, home: Path, pid: int, mounts: tuple[MountEntry, ...], tables: bool, known: dict[str, str]
    ) -> tuple[dict[str, str] | None, bool]:
        """Number and target, files only, and whether the kernel counts as many: it counts faster than it lists. None:
        something was closed between listing and reading, so it may have moved. What `known` has is not read again.
        """
        found: dict[str, str] = {}
        whole = True
        for name in ("cwd", "root"):
            path = self.read_link(f"{home}/{name}")
            if path is not None:
                found[name] = path
                if known.get(name) != path:
                    self.add_path(f"{home}/{name}", path, pid, mounts)
        numbers = os.listdir(f"{home}/fd") if tables else []  # noqa: PTH208 - as text, since there are many
        if len(numbers) > DESCRIPTORS:
            raise TooLong(0, f"more than {DESCRIPTORS:,} descriptors", f"{home}/fd")
        is_counted = not tables or os.stat(f"{home}/fd").st_size == len(numbers)  # noqa: PTH116
        for number in numbers:
            path = self.read_link(f"{home}/fd/{number}")
            if path is None:
                whole = False
            elif path.startswith(MOUNT_NAMESPACE):
                self.mounts.kept_namespaces.setdefault(path, f"{home}/fd/{number}")
            elif path == RING:
                registered = self.add_ring(f"{home}/fd/{number}", f"{home}/fdinfo/{number}", pid, mounts)
                if registered is None:
                    whole = False
                else:
                    found[number] = registered
            elif not path or path.startswith("/"):  # else a pipe, a socket
                found[number] = path
                if known.get(number) != path:
                    whole = self.add_descriptor(home, number, path, pid) and whole
        return (found if whole else None), is_counted

    def read_link(self, link: str) -> str | None:
        """None: closed since it was listed. Empty: too deep to have a path, as any user can arrange; then it is known
        by identity alone.
        """
        try:
            return os.readlink(link)  # noqa: PTH115
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return ""

    def add_descriptor(self, home: Path, number: str, path: str, pid: int) -> bool:
        """Does not query a filesystem that may not answer: the kernel itself knows the mount and the inode of an open
        file. False: it was closed in the meantime.
        """
        try:
            about = read_proc_part(f"{home}/fdinfo/{number}", 512)
        except (FileNotFoundError, ProcessLookupError):
            about = b""
        inode = int(status_value(about, b"ino") or 0)
        mount = self.mounts.by_number.get(int(status_value(about, b"mnt_id") or 0))
        if path:
            self.paths.setdefault(path.removesuffix(DELETED), pid)
        if inode and mount is None and not path.startswith(OF_NO_MOUNT):
            self.detached.append((int(status_value(about, b"mnt_id") or 0), inode, pid))
            return True
        if mount is not None and may_hang(mount.kind):
            if (match := _DEVICE.fullmatch(mount.device)) and inode:
                self.files.setdefault((os.makedev(int(match[1]), int(match[2])), inode), pid)
            return True
        return self.add_identity(f"{home}/fd/{number}", path, pid)

    def add_path(self, link: str, path: str | None, pid: int, mounts: tuple[MountEntry, ...]) -> None:
        """Of a link without a number. Its path shows which mount it is on, as its process sees it."""
        if path is None:
            return
        if path:
            self.paths.setdefault(path.removesuffix(DELETED), pid)
        mount = covering(path, mounts) if path else None
        if mount is None or not may_hang(mount.kind):
            self.add_identity(link, path, pid)

    def add_ring(self, link: str, about: str, pid: int, mounts: tuple[MountEntry, ...]) -> str | None:
        """The files that are registered with an io_uring: they stay open without a descriptor, and only their paths are
        shown. None: it was closed since it was listed, or is locked by a request.
        """
        try:
            text = read_proc(about, TABLE_MAX)
            self.rings.add(kernel.status_of(link).ino)
        except (FileNotFoundError, ProcessLookupError):
            return None
        registered = parse_registered(text)
        if registered is None:
            return None
        for path in registered:
            if not path.startswith("/"):
                raise TooLong(0, "files registered with an io_uring, of which only names are shown", about)
            self.paths.setdefault(path, pid)
            if not path.startswith(OF_NO_MOUNT) and (source := source_of(path, mounts)) is not None:
                self.mounts.mounted.add(source)  # for a process in another mount namespace
        return "\n".join(registered)

    def add_identity(self, link: str, path: str, pid: int) -> bool:
        try:
            found = kernel.status_of(link)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return True  # a user's own FUSE mount refuses even root; such a file is not on a disk we walk
        identity = found.dev, found.ino
        self.files.setdefault(identity, pid)
        # Memory files (memfd, shared memory of the kernel) have no links either, and are on no disk.
        if found.nlink == 0 and stat.S_ISREG(found.mode) and not path.startswith(IN_MEMORY):
            self.held.setdefault(identity, DeletedFile(pid, path.removesuffix(DELETED), identity, found.blocks * BLOCK))
        return True

    def add_detached(self) -> None:
        """Files open on a mount that no process has in its namespace: unmounted while in use, or in a namespace that
        only a descriptor keeps. Its filesystem is unknown, and may not answer; its inode counts on every one.
        """
        for number, inode, pid in self.detached:
            mount = self.mounts.by_number.get(number)
            match = None if mount is None else _DEVICE.fullmatch(mount.device)
            device = ANY_DEVICE if match is None else os.makedev(int(match[1]), int(match[2]))
            self.files.setdefault((device, inode), pid)

    def why_hidden(self) -> str | None:
        """The problem that is hardest to fix comes first: no other process may be hidden if ONLY_HERE is reported."""
        if not Path(self.proc, "1", "stat").exists():
            return "this machine hides the processes of other users (hidepid); run as root to see them"
        if self.unread:
            return (
                f"the open files of {len(self.unread)} other processes could not be read, for example of pid "
                f"{self.unread[0]}; that needs root (CAP_SYS_PTRACE). If even root may not: disk.unreadable in "
                "the policy"
            )
        if self.mounts.unentered is not None:
            return f"a mount namespace without processes ({self.mounts.unentered}) could not be read; that needs root"
        if self.restless:
            return "processes come and go faster than they can be read"
        if self.unsteady:
            more = f", and {len(self.unsteady) - 1} more" if len(self.unsteady) > 1 else ""
            return f"{self.unsteady[0]}{more}; ask its owner to end it, or wait until it ends"
        return ONLY_HERE if _namespace(self.proc) != FIRST_PID_NAMESPACE else None


class _Numbers:
    """Which processes were not seen yet. While it is certain that no number can have been used again, numbers alone
    say so, which takes a tenth of the time: where programs start all the time, a list without a new one is rare.
    """

    def __init__(self, proc: str, *, usable: bool) -> None:
        """`usable`: the last number that the kernel reports is one of `proc`."""
        self._proc, self._at, self._last = proc, time.monotonic(), 0
        self._lap = _number(f"{proc}/sys/kernel/pid_max") / FASTEST  # seconds in which all numbers cannot be used
        self._only_upwards = usable
        self.sample()

    def sample(self) -> None:
        """Numbers are assigned upwards and begin anew after the largest one. If the last one is read often enough,
        that cannot be missed."""
        if self._only_upwards:
            last, now = _number(f"{self._proc}/loadavg"), time.monotonic()
            self._only_upwards = 0 < last >= self._last and now - self._at < self._lap
            self._last, self._at = last, now

    def unseen(self, seen: set[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        numbers = _numbers(self._proc)
        self.sample()
        if not self._only_upwards:
            return [one for one in _processes(self._proc) if one not in seen]
        known = {pid for pid, _ in seen}
        return [(pid, _start(f"{self._proc}/{pid}/stat")) for pid in numbers if pid not in known]


class _Process:
    """What was read of one process. Its threads usually share everything; each may have files of its own."""

    def __init__(self, pid: int, comparable: bool) -> None:
        self.pid, self.comparable = pid, comparable
        self.mapped = False
        self.read: dict[int, list[int]] = {kernel.OPEN_FILES: [], kernel.FOLDERS: []}

    def has_read(self, kind: int, tid: int) -> bool:
        """False if the kernel does not report it: then all of them are read."""
        known = self.read[kind] if self.comparable else []
        return any(kernel.is_same(kind, tid, other) for other in [*known[:1], *known[1:][-RECENT:]])


def parse_maps(maps: bytes) -> Iterator[tuple[Identity, str]]:
    """The mapped files, each once. Device numbers are hexadecimal here; entries without an inode are no files."""
    for major, minor, inode, path in dict.fromkeys(_MAPPED.findall(maps)):
        name = unescaped(path).removesuffix(DELETED)
        yield (os.makedev(int(major, 16), int(minor, 16)), int(inode)), name


def parse_registered(fdinfo: bytes) -> list[str] | None:
    """The files registered with an io_uring, by path; older kernels show only its last part. None: the kernel
    does not list them, or not at this moment.
    """
    listed = _REGISTERED.search(fdinfo)
    if listed is None:
        return None
    entries = [line.split(b": ", 1)[1] for line in listed[1].splitlines()]
    return [unescaped(one).removesuffix(DELETED) for one in entries if one and not _OF_NO_NAME.fullmatch(one)]


def _numbers(proc: str) -> list[int]:
    with os.scandir(proc) as entries:
        return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())


def _processes(proc: str) -> list[tuple[int, bytes]]:
    """Their numbers, each with when it started: a number is used again."""
    return [(pid, _start(f"{proc}/{pid}/stat")) for pid in _numbers(proc)]


def _number(path: str) -> int:
    """The last word of the file; 0 if there is none."""
    try:
        return int(read_proc(path, STATUS_MAX).split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _start(stat: str) -> bytes:
    try:
        return stat_fields(read_proc(stat, STATUS_MAX))[19]
    except (FileNotFoundError, ProcessLookupError):
        return ENDED
    except (OSError, ValueError, IndexError):
        return b""  # what cannot be read at all is reported when it is added


def _tids(home: Path, pid: int) -> list[int]:
    """The one with the number of the process comes first; usually it has its files."""
    try:
        tids = {int(task.name) for task in (home / "task").iterdir()}
    except FileNotFoundError:
        return [pid]
    return sorted(tids, key=lambda tid: (tid != pid, tid))


def _state(home: Path) -> tuple[int, bool]:
    """Its flags, and whether it ended and was not yet reaped."""
    fields = stat_fields(read_proc(f"{home}/stat", STATUS_MAX))
    return int(fields[6]), fields[0] in {b"Z", b"X", b"x"}


def _is_own(proc: str) -> bool:
    """Whether its numbers mean for the kernel what they mean for us: it may be that of another pid namespace."""
    try:
        status = read_proc(f"{proc}/self/status", STATUS_MAX)
    except OSError:
        return False
    return status_value(status, b"NSpid") == str(os.getpid()).encode()


def _namespace(proc: str) -> str | None:
    try:
        return str(Path(proc, "self/ns/pid").readlink())
    except OSError:
        return None

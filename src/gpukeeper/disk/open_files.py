"""Which files are in use: open, mapped, working directory or program of a process, mounted elsewhere, used by the
kernel.

Reads only, every thread. By device and inode as well as by path, since a process in another mount namespace has its own
paths. A scan that could not read all processes says so in `hidden`; then "not in use" cannot be known.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel, procfs
from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.mounts import MountEntry, covering, is_at_or_below, own_mounts, parse_mounts, source_of, unparsed
from gpukeeper.disk.namespaces import mountinfo_of
from gpukeeper.disk.remote_use import Export, exported
from gpukeeper.disk.unresponsive import leads_through_silent, may_hang
from gpukeeper.disk.walk import ANY_DEVICE, BLOCK, Identity
from gpukeeper.model.unknown import Unknown

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number for the one of the machine itself
ROUNDS = 50
SECONDS = 20.0  # for all of it
AGREEING = 5  # reads of the descriptors of one process that show the same
WHOLE = 15  # reads in which nothing vanished, of a process that never shows the same twice
LOOKS = 200
DESCRIPTORS = 50_000  # of one process; more are not read
ONLY_HERE = "only the processes of this container can be seen from here, not those of the machine"
DELETED = " (deleted)"
KERNEL = 0  # as a holder: no process, the kernel itself
KERNEL_THREAD = 0x00200000
MOUNT_NAMESPACE = "mnt:["
RECENT = 8  # descriptor tables of one process a thread is compared with, besides the first
IN_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage")  # noqa: S108 - a name to compare
OF_NO_MOUNT = ("/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage", "/drm mm object", "/dmabuf:")  # the kernel's own
# Every byte but b"\n" may be in a name; the kernel writes b"\n" as \012.
_MAPPED = re.compile(rb"^[^ \n]+ [^ \n]+ [^ \n]+ ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) +(/[^\n]*)$", re.MULTILINE)
_DEVICE = re.compile(r"(\d+):(\d+)")


class DeletedFile(msgspec.Struct, frozen=True):
    """A deleted file that is still open: its space is returned when it is closed."""

    pid: int
    path: str
    identity: Identity
    size: int  # bytes allocated


class OpenFiles(msgspec.Struct, frozen=True):
    """Everything in use at one moment, each with one pid that uses it."""

    files: dict[Identity, int]
    paths: dict[str, int]
    own_mounts: tuple[MountEntry, ...]
    mounted: frozenset[tuple[str, str]]  # (device, directory) that some mount namespace has mounted on its own
    hidden: str | None  # why this is not everything
    points: frozenset[str] = frozenset()  # where anything is mounted, in any mount namespace, as that one names it
    held: tuple[DeletedFile, ...] = ()
    tables: tuple[tuple[MountEntry, ...], ...] = ()  # the mounts of each mount namespace
    exports: tuple[Export, ...] = ()  # what this machine exports to others

    def user_of(self, identity: Identity) -> int | None:
        """One pid that has it open."""
        return self.files.get(identity, self.files.get((ANY_DEVICE, identity[1])))


def scan(proc: str = "/proc", system: str = "/sys", unreadable: Collection[str] = ()) -> OpenFiles:
    """`unreadable`: programs of root that may be skipped if they cannot be read; the policy vouches for them."""
    found = _Scan(proc, frozenset(unreadable))
    found.add_all()
    for path in _kernel_files(proc, system):
        found.paths.setdefault(path, KERNEL)
    mounts = own_mounts(proc)
    return OpenFiles(
        found.files,
        found.paths,
        mounts,
        frozenset(found.mounted),
        found.why_hidden(),
        frozenset(found.points),
        tuple(found.held.values()),
        tuple(found.namespaces.values()),
        exported(mounts),
    )


class DirectoryUse(msgspec.Struct, frozen=True):
    """What is in use below one directory; `users`: the entries in which a path is open, each with one pid."""

    folder: str
    users: dict[str, int]
    open_files: OpenFiles


def below(folder: str, open_files: OpenFiles) -> DirectoryUse:
    prefix = folder.rstrip("/") + "/"
    rests = ((path[len(prefix) :], pid) for path, pid in open_files.paths.items() if path.startswith(prefix))
    return DirectoryUse(folder, {rest.split("/", 1)[0]: pid for rest, pid in rests if rest}, open_files)


def user_of(name: str, measured: TreeMeasurement, used: DirectoryUse) -> int | None:
    """One pid that uses the entry `name`, by path or by identity."""
    return used.users.get(name, measured.held_by)


def is_in_use(name: str, measured: TreeMeasurement, used: DirectoryUse) -> bool | Unknown:
    """Of an entry of that directory. False only if everything was read."""
    open_files = used.open_files
    if user_of(name, measured, used) is not None or is_mounted_elsewhere(str(Path(used.folder, name)), open_files):
        return True
    if measured.problems:
        return Unknown("it could not be walked completely, so a file in use may have been missed")
    # the same check as in a removal, so that none is tried in vain
    if measured.sockets or measured.fifos or measured.devices:
        return Unknown("it contains a socket, a pipe or a device, and their users cannot be determined by open files")
    return Unknown(open_files.hidden) if open_files.hidden else False


def is_mounted_elsewhere(path: str, open_files: OpenFiles) -> bool:
    here = source_of(path, open_files.own_mounts)
    if here is None:
        return False
    device, folder = here
    return any(device == other and is_at_or_below(source, folder) for other, source in open_files.mounted)


def users_of_trash(trash: str, open_files: OpenFiles) -> int | Unknown | None:
    """One pid that has something open below the directory of that random name, KERNEL for a mount or the kernel itself.

    For a check after the rename: from then on the name is in every path by which a process, in whatever mount
    namespace, still uses something of it. None only if all processes were read.
    """
    inside = f"/{trash}/"
    for path, pid in open_files.paths.items():
        if inside in path:
            return pid
    mounted = (source for _, source in open_files.mounted)
    own = (mount.point for mount in open_files.own_mounts)
    if any(inside in f"{path}/" for paths in (mounted, own, open_files.points) for path in paths):
        return KERNEL
    return Unknown(open_files.hidden) if open_files.hidden else None


def held_open(open_files: OpenFiles) -> dict[int, int] | Unknown:
    """By pid, the bytes of deleted files that it holds open, each file once; for a report, never a reason to act.
    Unknown if nothing was found and not all processes could be read.
    """
    held: dict[int, int] = {}
    for one in open_files.held:
        held[one.pid] = held.get(one.pid, 0) + one.size
    return Unknown(open_files.hidden) if open_files.hidden and not held else held


def parse_maps(maps: bytes) -> Iterator[tuple[Identity, str]]:
    """The mapped files, each once. Device numbers are hexadecimal here; entries without an inode are no files."""
    for major, minor, inode, path in dict.fromkeys(_MAPPED.findall(maps)):
        name = procfs.unescaped(path).removesuffix(DELETED)
        yield (os.makedev(int(major, 16), int(minor, 16)), int(inode)), name


def parse_backing_files(swaps: bytes) -> Iterator[str]:
    """Files that the kernel swaps to; no process has a descriptor of them."""
    for line in swaps.split(b"\n")[1:]:
        if line.startswith(b"/"):
            yield procfs.unescaped(line.split(b" ")[0].split(b"\t")[0])


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


class _Scan:
    def __init__(self, proc: str, vouched: frozenset[str]) -> None:
        self.proc, self.vouched = proc, vouched
        self.comparable = _is_own(proc)
        self.until = time.monotonic() + SECONDS
        self.files: dict[Identity, int] = {}
        self.paths: dict[str, int] = {}
        self.held: dict[Identity, DeletedFile] = {}
        self.mounted: set[tuple[str, str]] = set()
        self.points: set[str] = set()
        self.namespaces: dict[str, tuple[MountEntry, ...]] = {}
        self.kept_namespaces: dict[
            str, str
        ] = {}  # that a descriptor or a mount keeps, each with a path to it (empty: it may hang)
        self.unentered: str | None = None
        self.by_number: dict[int, MountEntry] = {}
        self.detached: list[tuple[int, int, int]] = []  # number of the mount, inode, pid
        self.overlays: set[tuple[str, tuple[str, ...]]] = set()
        self.unread: list[int] = []
        self.unsteady: list[str] = []  # why a process was not read completely, although it may be read
        self.restless = False

    def add_all(self) -> None:
        """Until no new process is found: a process may end before it is read, and a child of it continue."""
        seen: set[int] = set()
        for _ in range(ROUNDS):
            new = [pid for pid in _pids(self.proc) if pid not in seen]
            if not new:
                break
            for pid in new:
                if time.monotonic() > self.until:
                    self.restless = True
                    return
                self.add(pid)
            seen.update(new)
        else:
            self.restless = True
        self.add_kept_namespaces()
        self.add_detached()

    def add(self, pid: int) -> None:
        home = Path(self.proc, str(pid))
        try:
            flags, has_ended = _state(home)
            if not flags & KERNEL_THREAD:  # such has no files, though non-root users may not see that
                self.add_threads(home, _Process(pid, self.comparable), has_ended)
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended
        except procfs.TooLong as error:
            self.unsteady.append(f"pid {pid} has {error.strerror} in {Path(error.filename).name}")
        except (OSError, ValueError, IndexError):
            if not self.is_vouched(home):
                self.unread.append(pid)

    def is_vouched(self, home: Path) -> bool:
        """Of root only: users can give a program any name. Not by the owner of its /proc directory: that is root for
        any process that may not be read, whoever runs it.
        """
        try:
            name = procfs.read(f"{home}/comm", procfs.STATUS).removesuffix(b"\n")
            uids = procfs.status_value(procfs.read(f"{home}/status", procfs.STATUS), b"Uid")
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
        mounts = self.add_mounts(home)
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
        for identity, path in parse_maps(procfs.read(f"{home}/maps", procfs.TABLE)):
            self.files.setdefault(identity, pid)
            self.paths.setdefault(path, pid)

    def add_open(self, home: Path, pid: int, mounts: tuple[MountEntry, ...], tables: bool) -> None:
        """Its descriptors and its directories, repeatedly until two reads agree: a file that moves from one number to
        another, or to the working directory, may be missed by any single read.
        """
        if self.comparable and pid == os.getpid():
            self.look(home, pid, mounts, tables, {})  # once: reading ourselves opens and closes descriptors
            return
        before: dict[str, str] = {}
        agreeing = whole = 0
        for _ in range(LOOKS):
            now = self.look(home, pid, mounts, tables, before)
            if now is not None:
                agreeing, whole = agreeing + 1 if now == before else 1, whole + 1
                before = now
                if agreeing >= AGREEING or whole >= WHOLE:
                    return
            if time.monotonic() > self.until:
                break
        self.unsteady.append(f"pid {pid} keeps changing its open files, faster than they can be read")

    def look(
        self, home: Path, pid: int, mounts: tuple[MountEntry, ...], tables: bool, known: dict[str, str]
    ) -> dict[str, str] | None:
        """Number and target; files only. None: something was closed between listing and reading, so it may have moved.
        What `known` has already is not read again.
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
            raise procfs.TooLong(0, f"more than {DESCRIPTORS:,} descriptors", f"{home}/fd")
        for number in numbers:
            path = self.read_link(f"{home}/fd/{number}")
            if path is None:
                whole = False
            elif path.startswith(MOUNT_NAMESPACE):
                self.kept_namespaces.setdefault(path, f"{home}/fd/{number}")
            elif not path or path.startswith("/"):  # else a pipe, a socket
                found[number] = path
                if known.get(number) != path:
                    whole = self.add_descriptor(home, number, path, pid) and whole
        return found if whole else None

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
            about = procfs.read_part(f"{home}/fdinfo/{number}", 512)
        except (FileNotFoundError, ProcessLookupError):
            about = b""
        inode = int(procfs.status_value(about, b"ino") or 0)
        mount = self.by_number.get(int(procfs.status_value(about, b"mnt_id") or 0))
        if path:
            self.paths.setdefault(path.removesuffix(DELETED), pid)
        if inode and mount is None and not path.startswith(OF_NO_MOUNT):
            self.detached.append((int(procfs.status_value(about, b"mnt_id") or 0), inode, pid))
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
            mount = self.by_number.get(number)
            match = None if mount is None else _DEVICE.fullmatch(mount.device)
            device = ANY_DEVICE if match is None else os.makedev(int(match[1]), int(match[2]))
            self.files.setdefault((device, inode), pid)

    def add_mounts(self, home: Path) -> tuple[MountEntry, ...]:
        namespace = os.readlink(f"{home}/ns/mnt")  # noqa: PTH115
        if namespace not in self.namespaces:
            text = procfs.read(f"{home}/mountinfo", procfs.TABLE)
            if unparsed(text):
                self.unsteady.append(f"{unparsed(text)} lines of {home}/mountinfo could not be understood")
            self.add_table(namespace, parse_mounts(text), home)
        return self.namespaces[namespace]

    def add_table(self, namespace: str, mounts: tuple[MountEntry, ...], home: Path) -> None:
        self.namespaces[namespace] = mounts
        self.by_number.update((mount.number, mount) for mount in mounts if mount.number is not None)
        self.mounted.update((mount.device, mount.source) for mount in mounts if mount.source != "/")
        self.points.update(mount.point for mount in mounts)
        for mount in mounts:
            self.add_layers(mount, home, mounts)
            if mount.kind == "nsfs" and mount.source.startswith(MOUNT_NAMESPACE):
                hangs = leads_through_silent(mount.point, mounts)
                self.kept_namespaces.setdefault(mount.source, "" if hangs else f"{home}/root{mount.point}")

    def add_kept_namespaces(self) -> None:
        """Those without processes: a process that enters one of them later finds its mounts."""
        for _ in range(ROUNDS):
            left = [one for one in self.kept_namespaces if one not in self.namespaces]
            if not left:
                return
            way = self.kept_namespaces[left[0]]
            found = mountinfo_of(way, self.proc) if way else None
            if found is None:
                self.unentered = left[0]
                return
            self.add_table(left[0], parse_mounts(found), Path(self.proc, "self"))
        self.unentered = "more than can be read"

    def add_layers(self, mount: MountEntry, home: Path, mounts: tuple[MountEntry, ...]) -> None:
        """No process has a descriptor of the directories an overlay consists of, and they are mounted nowhere. Their
        paths are those of the process that mounted it, so they are looked up in each namespace until one has them
        all.
        """
        if not mount.layers or (mount.device, mount.layers) in self.overlays:
            return
        for layer in mount.layers:
            self.paths.setdefault(layer, KERNEL)
        found = [self.add_layer(layer, mount, home, mounts) for layer in mount.layers]
        if all(found):
            self.overlays.add((mount.device, mount.layers))

    def add_layer(self, layer: str, mount: MountEntry, home: Path, mounts: tuple[MountEntry, ...]) -> bool:
        """A relative one was relative to a directory that engines keep above another layer or above the mount point."""
        near = [mount.point, *(other for other in mount.layers if other.startswith("/"))]
        bases = dict.fromkeys(str(above) for one in near for above in Path(one).parents)
        known = False
        for base in ["/"] if layer.startswith("/") else bases:
            path = os.path.normpath(Path(base, layer))
            if leads_through_silent(path, mounts):
                continue
            try:
                found = kernel.status_of(f"{home}/root{path}")
            except OSError:
                continue
            self.paths.setdefault(path, KERNEL)
            self.files.setdefault((found.dev, found.ino), KERNEL)
            known = True
        return known

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
        if self.unentered is not None:
            return f"a mount namespace without processes ({self.unentered}) could not be read; that needs root"
        if self.restless:
            return "processes come and go faster than they can be read"
        if self.unsteady:
            more = f", and {len(self.unsteady) - 1} more" if len(self.unsteady) > 1 else ""
            return f"{self.unsteady[0]}{more}; ask its owner to end it, or wait until it ends"
        return ONLY_HERE if _namespace(self.proc) != FIRST_PID_NAMESPACE else None


def _pids(proc: str) -> list[int]:
    return sorted(int(home.name) for home in Path(proc).iterdir() if home.name.isdecimal())


def _tids(home: Path, pid: int) -> list[int]:
    """The one with the number of the process comes first; usually it has its files."""
    try:
        tids = {int(task.name) for task in (home / "task").iterdir()}
    except FileNotFoundError:
        return [pid]
    return sorted(tids, key=lambda tid: (tid != pid, tid))


def _state(home: Path) -> tuple[int, bool]:
    """Its flags, and whether it ended and was not yet reaped."""
    fields = procfs.stat_fields(procfs.read(f"{home}/stat", procfs.STATUS))
    return int(fields[6]), fields[0] in {b"Z", b"X", b"x"}


def _is_own(proc: str) -> bool:
    """Whether its numbers mean for the kernel what they mean for us: it may be that of another pid namespace."""
    try:
        status = procfs.read(f"{proc}/self/status", procfs.STATUS)
    except OSError:
        return False
    return procfs.status_value(status, b"NSpid") == str(os.getpid()).encode()


def _namespace(proc: str) -> str | None:
    try:
        return str(Path(proc, "self/ns/pid").readlink())
    except OSError:
        return None


def _kernel_files(proc: str, system: str) -> Iterator[str]:
    for path in Path(system, "block").glob("loop*/loop/backing_file"):
        try:
            yield os.fsdecode(procfs.read(str(path), procfs.STATUS).removesuffix(b"\n")).removesuffix(DELETED)
        except OSError:
            continue  # detached since it was listed
    try:
        yield from parse_backing_files(procfs.read(f"{proc}/swaps", procfs.TABLE))
    except FileNotFoundError:
        return  # a kernel without swap

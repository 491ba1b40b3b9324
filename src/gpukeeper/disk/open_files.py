"""Which files are in use: open, mapped, as somebody's folder or program, mounted elsewhere, used by the kernel itself.

Looks only, at every thread. By device and inode as well as by path, since a process in another mount namespace names
files its own way.
A scan that could not look into everybody says so in `hidden`; then "not in use" cannot be known.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel
from gpukeeper.disk.elsewhere import Export, exported
from gpukeeper.disk.measure import Measured
from gpukeeper.disk.mounts import Mount, is_at_or_below, own_mounts, parse_mounts, source_of
from gpukeeper.disk.namespaces import mountinfo_of
from gpukeeper.disk.walk import BLOCK, Identity
from gpukeeper.model.unknown import Unknown

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number for the one of the machine itself
ROUNDS = 50
ONLY_HERE = "only the processes of this container can be seen from here, not those of the machine"
DELETED = " (deleted)"
KERNEL = 0  # as a holder: no process, the kernel itself
KERNEL_THREAD = 0x00200000
MOUNT_NAMESPACE = "mnt:["
RECENT = 8  # tables of one process a thread is compared with, beside the first
IN_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage")  # noqa: S108 - a name to compare
_MAPPED = re.compile(r"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) +(/.*)$", re.MULTILINE)


class Held(msgspec.Struct, frozen=True):
    """A deleted file that somebody still has open: its space comes back when it is closed."""

    pid: int
    path: str
    identity: Identity
    size: int  # bytes allocated


class OpenFiles(msgspec.Struct, frozen=True):
    """Everything in use at one moment, each with one pid that uses it."""

    files: dict[Identity, int]
    paths: dict[str, int]
    own_mounts: tuple[Mount, ...]
    mounted: frozenset[tuple[str, str]]  # (device, folder) that some mount namespace has mounted on its own
    hidden: str | None  # why this is not everything
    points: frozenset[str] = frozenset()  # where anything is mounted, in any mount namespace, as that one names it
    held: tuple[Held, ...] = ()
    tables: tuple[tuple[Mount, ...], ...] = ()  # the mounts of each mount namespace
    exports: tuple[Export, ...] = ()  # what this machine offers to others


def scan(proc: str = "/proc", system: str = "/sys", unreadable: Collection[str] = ()) -> OpenFiles:
    """`unreadable`: programs of root that need not be looked into when they cannot be; somebody vouches for them."""
    found = _Scan(proc, frozenset(unreadable))
    found.add_all()
    found.add_kept_namespaces()
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
        tuple(found.tables),
        exported(mounts),
    )


class Below(msgspec.Struct, frozen=True):
    """What is in use below one folder; `users`: the entries in which a path is open, each with one pid."""

    folder: str
    users: dict[str, int]
    open_files: OpenFiles


def below(folder: str, open_files: OpenFiles) -> Below:
    prefix = folder.rstrip("/") + "/"
    rests = ((path[len(prefix) :], pid) for path, pid in open_files.paths.items() if path.startswith(prefix))
    return Below(folder, {rest.split("/", 1)[0]: pid for rest, pid in rests if rest}, open_files)


def user_of(name: str, measured: Measured, used: Below) -> int | None:
    """One pid that uses the entry `name`, by path or by identity."""
    return used.users.get(name, measured.held_by)


def is_in_use(name: str, measured: Measured, used: Below) -> bool | Unknown:
    """Of an entry of that folder. False only when everything was seen."""
    open_files = used.open_files
    if user_of(name, measured, used) is not None or is_mounted_elsewhere(str(Path(used.folder, name)), open_files):
        return True
    if measured.problems:
        return Unknown("it could not be walked whole, so a file in use may have been missed")
    if measured.sockets or measured.fifos or measured.devices:  # as a removal asks, so that none is tried in vain
        return Unknown("it holds a socket, a pipe or a device, and who uses that cannot be seen by its files")
    return Unknown(open_files.hidden) if open_files.hidden else False


def is_mounted_elsewhere(path: str, open_files: OpenFiles) -> bool:
    here = source_of(path, open_files.own_mounts)
    if here is None:
        return False
    device, folder = here
    return any(device == other and is_at_or_below(source, folder) for other, source in open_files.mounted)


def users_of_trash(trash: str, open_files: OpenFiles) -> int | Unknown | None:
    """One pid that has something open below the folder of that random name, KERNEL for a mount or the kernel itself.

    For a look after the rename: from then on the name is in every path by which anybody, in whatever mount namespace,
    still uses something of it. None only when everybody was seen.
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
    Unknown when nothing was seen and not everybody could be looked at."""
    held: dict[int, int] = {}
    for one in open_files.held:
        held[one.pid] = held.get(one.pid, 0) + one.size
    return Unknown(open_files.hidden) if open_files.hidden and not held else held


def parse_maps(maps: str) -> Iterator[tuple[Identity, str]]:
    """The mapped files, each once. Device numbers are hexadecimal here; what has no inode is no file."""
    for major, minor, inode, path in dict.fromkeys(_MAPPED.findall(maps)):
        yield (os.makedev(int(major, 16), int(minor, 16)), int(inode)), path.removesuffix(DELETED)


def parse_backing_files(swaps: str) -> Iterator[str]:
    """Files that the kernel swaps to; they are in nobody's descriptors."""
    for line in swaps.splitlines()[1:]:
        if line.startswith("/"):
            yield line.split()[0]


class _Process:
    """What was read of one process. Its threads mostly share all they have; each may have files of its own."""

    def __init__(self, pid: int, comparable: bool) -> None:
        self.pid, self.comparable = pid, comparable
        self.mapped = False
        self.read: dict[int, list[int]] = {kernel.OPEN_FILES: [], kernel.FOLDERS: []}

    def has_read(self, kind: int, tid: int) -> bool:
        """False where the kernel does not say: then all of them are read."""
        known = self.read[kind] if self.comparable else []
        return any(kernel.is_same(kind, tid, other) for other in [*known[:1], *known[1:][-RECENT:]])


class _Scan:
    def __init__(self, proc: str, vouched: frozenset[str]) -> None:
        self.proc, self.vouched = proc, vouched
        self.comparable = _is_own(proc)
        self.files: dict[Identity, int] = {}
        self.paths: dict[str, int] = {}
        self.held: dict[Identity, Held] = {}
        self.mounted: set[tuple[str, str]] = set()
        self.points: set[str] = set()
        self.namespaces: set[str] = set()
        self.tables: list[tuple[Mount, ...]] = []
        self.kept_namespaces: dict[str, str] = {}  # that a descriptor or a mount keeps, each with a way to it
        self.unentered: str | None = None
        self.overlays: set[tuple[str, tuple[str, ...]]] = set()
        self.unread: list[int] = []
        self.restless = False

    def add_all(self) -> None:
        """Until nobody new is found: a user may end before we come to it, and a child of it go on."""
        seen: set[int] = set()
        for _ in range(ROUNDS):
            new = [pid for pid in _pids(self.proc) if pid not in seen]
            if not new:
                return
            for pid in new:
                self.add(pid)
            seen.update(new)
        self.restless = True

    def add(self, pid: int) -> None:
        home = Path(self.proc, str(pid))
        try:
            flags, has_ended = _state(home)
            if not flags & KERNEL_THREAD:  # such has no files, though non-root is refused to see that
                self.add_threads(home, _Process(pid, self.comparable), has_ended)
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended
        except OSError:
            if not self.is_vouched(home):
                self.unread.append(pid)

    def is_vouched(self, home: Path) -> bool:
        """Of root only: anybody can give a program any name. Not by the owner of its folder: that is root for whatever
        may not be looked into, whoever runs it."""
        try:
            name = (home / "comm").read_text("utf-8", "replace").rstrip("\n")
            status = (home / "status").read_text("utf-8", "replace")
        except OSError:
            return False
        uids = next((line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")), [])
        return name in self.vouched and uids == ["0"] * 4

    def add_threads(self, home: Path, process: _Process, has_ended: bool) -> None:
        """Until no new one is found. Of what ended and was not yet waited for, other threads may still run."""
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
        if not process.has_read(kernel.OPEN_FILES, tid):
            for link in (home / "fd").iterdir():
                self.add_link(link, process.pid)
            process.read[kernel.OPEN_FILES].append(tid)
        if not process.mapped:
            self.add_mapped(home, process.pid)
            process.mapped = True
        if not process.has_read(kernel.FOLDERS, tid):
            for name in ("cwd", "root"):
                self.add_link(home / name, process.pid)
            self.add_mounts(home)
            process.read[kernel.FOLDERS].append(tid)

    def add_mapped(self, home: Path, pid: int) -> None:
        self.add_link(home / "exe", pid)
        for identity, path in parse_maps((home / "maps").read_text("utf-8", "surrogateescape")):
            self.files.setdefault(identity, pid)
            self.paths.setdefault(path, pid)

    def add_link(self, link: Path, pid: int) -> None:
        try:
            path = str(link.readlink())
        except (FileNotFoundError, ProcessLookupError):
            return  # closed since it was listed
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            path = ""  # too deep to have one, as anybody can arrange: then known by identity alone
        if path.startswith(MOUNT_NAMESPACE):
            self.kept_namespaces.setdefault(path, str(link))
        if path and not path.startswith("/"):
            return  # a pipe, a socket
        if path:
            self.paths.setdefault(path.removesuffix(DELETED), pid)
        try:
            found = link.stat()
        except OSError:
            return  # a user's own FUSE mount refuses even root; such a file is not on a disk we walk
        identity = found.st_dev, found.st_ino
        self.files.setdefault(identity, pid)
        # Memory files (memfd, shared memory of the kernel) have no links either, and are on no disk.
        if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and not path.startswith(IN_MEMORY):
            self.held.setdefault(identity, Held(pid, path.removesuffix(DELETED), identity, found.st_blocks * BLOCK))

    def add_mounts(self, home: Path) -> None:
        namespace = str((home / "ns/mnt").readlink())
        if namespace not in self.namespaces:
            mounts = parse_mounts((home / "mountinfo").read_text("utf-8", "surrogateescape"))
            self.add_table(namespace, mounts, home)

    def add_table(self, namespace: str, mounts: tuple[Mount, ...], home: Path) -> None:
        self.namespaces.add(namespace)
        self.tables.append(mounts)
        self.mounted.update((mount.device, mount.source) for mount in mounts if mount.source != "/")
        self.points.update(mount.point for mount in mounts)
        for mount in mounts:
            self.add_layers(mount, home)
            if mount.kind == "nsfs" and mount.source.startswith(MOUNT_NAMESPACE):
                self.kept_namespaces.setdefault(mount.source, f"{home}/root{mount.point}")

    def add_kept_namespaces(self) -> None:
        """Those in which no process is: whatever enters one of them later finds its mounts."""
        for _ in range(ROUNDS):
            left = [one for one in self.kept_namespaces if one not in self.namespaces]
            if not left:
                return
            found = mountinfo_of(self.kept_namespaces[left[0]], self.proc)
            if found is None:
                self.unentered = left[0]
                return
            self.add_table(left[0], parse_mounts(found), Path(self.proc, "self"))
        self.unentered = "more than can be looked at"

    def add_layers(self, mount: Mount, home: Path) -> None:
        """The folders an overlay is made of are open in nobody's descriptors and mounted nowhere. They are called as
        whoever mounted it called them, so it is asked in each namespace until one knows them all."""
        if not mount.layers or (mount.device, mount.layers) in self.overlays:
            return
        for layer in mount.layers:
            self.paths.setdefault(layer, KERNEL)
        found = [self.add_layer(layer, mount, home) for layer in mount.layers]
        if all(found):
            self.overlays.add((mount.device, mount.layers))

    def add_layer(self, layer: str, mount: Mount, home: Path) -> bool:
        """One that is relative was so to a folder that engines keep above another layer or above the mount point."""
        near = [mount.point, *(other for other in mount.layers if other.startswith("/"))]
        bases = dict.fromkeys(str(above) for one in near for above in Path(one).parents)
        known = False
        for base in ["/"] if layer.startswith("/") else bases:
            path = os.path.normpath(Path(base, layer))
            try:
                found = os.stat(f"{home}/root{path}")  # noqa: PTH116 - joined as text: the path is absolute
            except OSError:
                continue
            self.paths.setdefault(path, KERNEL)
            self.files.setdefault((found.st_dev, found.st_ino), KERNEL)
            known = True
        return known

    def why_hidden(self) -> str | None:
        """What is the least to be helped comes first: nobody else must be hidden where ONLY_HERE is said."""
        if not Path(self.proc, "1", "stat").exists():
            return "this machine hides other people's processes (hidepid); run as root to see them"
        if self.unread:
            return (
                f"the open files of {len(self.unread)} other processes could not be read, of pid {self.unread[0]} "
                "for one; that needs root (CAP_SYS_PTRACE). Where even root may not: disk.unreadable in the policy"
            )
        if self.unentered is not None:
            return f"a mount namespace without processes ({self.unentered}) could not be looked into; that needs root"
        if self.restless:
            return "processes come and go faster than they can be looked at"
        return ONLY_HERE if _namespace(self.proc) != FIRST_PID_NAMESPACE else None


def _pids(proc: str) -> list[int]:
    return sorted(int(home.name) for home in Path(proc).iterdir() if home.name.isdecimal())


def _tids(home: Path, pid: int) -> list[int]:
    """The one that has the number of the process comes first; it has its files in all usual cases."""
    try:
        tids = {int(task.name) for task in (home / "task").iterdir()}
    except FileNotFoundError:
        return [pid]
    return sorted(tids, key=lambda tid: (tid != pid, tid))


def _state(home: Path) -> tuple[int, bool]:
    """Its flags, and whether it ended and was not yet waited for."""
    status = (home / "stat").read_text("utf-8", "replace")
    fields = status[status.rindex(")") + 2 :].split()
    return int(fields[6]), fields[0] in "ZXx"


def _is_own(proc: str) -> bool:
    """Whether its numbers mean for the kernel what they mean for us: it may be that of another pid namespace."""
    try:
        status = Path(proc, "self/status").read_text("utf-8", "replace")
    except OSError:
        return False
    return f"\nNSpid:\t{os.getpid()}\n" in status


def _namespace(proc: str) -> str | None:
    try:
        return str(Path(proc, "self/ns/pid").readlink())
    except OSError:
        return None


def _kernel_files(proc: str, system: str) -> Iterator[str]:
    for path in Path(system, "block").glob("loop*/loop/backing_file"):
        try:
            yield path.read_text("utf-8", "surrogateescape").rstrip("\n").removesuffix(DELETED)
        except OSError:
            continue  # detached since it was listed
    try:
        yield from parse_backing_files(Path(proc, "swaps").read_text("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return  # a kernel without swap

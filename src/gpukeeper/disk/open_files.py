"""Which files are in use: open, mapped, as somebody's folder or program, mounted elsewhere, used by the kernel itself.

Looks only. By device and inode as well as by path, since a process in another mount namespace names files its own way.
A scan that could not look into everybody says so in `hidden`; then "not in use" cannot be known.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk.measure import Measured
from gpukeeper.disk.mounts import Mount, is_at_or_below, own_mounts, parse_mounts, source_of
from gpukeeper.disk.walk import BLOCK, Identity
from gpukeeper.model.unknown import Unknown

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number for the one of the machine itself
ROUNDS = 50
DELETED = " (deleted)"
KERNEL = 0  # as a holder: no process, the kernel itself
KERNEL_THREAD = 0x00200000
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


def scan(proc: str = "/proc", system: str = "/sys", unreadable: Collection[str] = ()) -> OpenFiles:
    """`unreadable`: programs of root that need not be looked into when they cannot be; somebody vouches for them."""
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
    if measured.sockets:
        return Unknown("it holds a socket, and who listens there cannot be seen by its files")
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


class _Scan:
    def __init__(self, proc: str, vouched: frozenset[str]) -> None:
        self.proc, self.vouched = proc, vouched
        self.files: dict[Identity, int] = {}
        self.paths: dict[str, int] = {}
        self.held: dict[Identity, Held] = {}
        self.mounted: set[tuple[str, str]] = set()
        self.points: set[str] = set()
        self.namespaces: set[str] = set()
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
            for one in _homes(home):
                self.add_home(one, pid)
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended
        except OSError:
            if not self.is_vouched(home):
                self.unread.append(pid)

    def is_vouched(self, home: Path) -> bool:
        """Of root only: anybody can give a program any name."""
        try:
            name, owner = (home / "comm").read_text("utf-8", "replace").rstrip("\n"), home.stat().st_uid
        except OSError:
            return False
        return name in self.vouched and owner == 0

    def add_home(self, home: Path, pid: int) -> None:
        for link in _links(home):
            self.add_link(link, pid)
        for identity, path in parse_maps((home / "maps").read_text("utf-8", "surrogateescape")):
            self.files.setdefault(identity, pid)
            self.paths.setdefault(path, pid)
        self.add_mounts(home)

    def add_link(self, link: Path, pid: int) -> None:
        try:
            path = str(link.readlink())
        except (FileNotFoundError, ProcessLookupError):
            return  # closed since it was listed
        if not path.startswith("/"):
            return  # a pipe, a socket
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
            self.namespaces.add(namespace)
            self.mounted.update((mount.device, mount.source) for mount in mounts if mount.source != "/")
            self.points.update(mount.point for mount in mounts)

    def why_hidden(self) -> str | None:
        if _namespace(self.proc) != FIRST_PID_NAMESPACE:
            return "only the processes of this container can be seen from here, not those of the machine"
        if not Path(self.proc, "1", "stat").exists():
            return "this machine hides other people's processes (hidepid); run as root to see them"
        if self.unread:
            return (
                f"the open files of {len(self.unread)} other processes could not be read, of pid {self.unread[0]} "
                "for one; that needs root (CAP_SYS_PTRACE). Where even root may not: disk.unreadable in the policy"
            )
        return "processes come and go faster than they can be looked at" if self.restless else None


def _pids(proc: str) -> list[int]:
    return sorted(int(home.name) for home in Path(proc).iterdir() if home.name.isdecimal())


def _links(home: Path) -> Iterator[Path]:
    for name in ("cwd", "root", "exe"):
        yield home / name
    yield from (home / "fd").iterdir()


def _homes(home: Path) -> list[Path]:
    """Where the open files are. A thread of the kernel has none, though non-root is refused to see that. Of what ended
    and was not yet waited for, other threads may still run, with all its files."""
    status = (home / "stat").read_text("utf-8", "replace")
    fields = status[status.rindex(")") + 2 :].split()
    if int(fields[6]) & KERNEL_THREAD:
        return []
    if fields[0] not in "ZXx":
        return [home]
    tasks = home / "task"
    return [task for task in tasks.iterdir() if task.name != home.name] if tasks.exists() else []


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

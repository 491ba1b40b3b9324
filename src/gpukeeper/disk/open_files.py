"""Which files are in use: open, mapped, as somebody's folder or program, mounted elsewhere, used by the kernel itself.

Looks only. By device and inode as well as by path, since a process in another mount namespace names files its own way.
A scan that could not look into everybody says so in `hidden`; then "not in use" cannot be known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk.measure import Identity, Measured
from gpukeeper.disk.mounts import Mount, is_at_or_below, own_mounts, parse_mounts, source_of
from gpukeeper.model.unknown import Unknown

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number for the one of the machine itself
DELETED = " (deleted)"
KERNEL = 0  # as a holder: no process, the kernel itself
KERNEL_THREAD = 0x00200000
_MAPPED = re.compile(r"\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)\s+(/.*)")


class OpenFiles(msgspec.Struct, frozen=True):
    """Everything in use at one moment, each with one pid that uses it."""

    files: dict[Identity, int]
    paths: dict[str, int]
    own_mounts: tuple[Mount, ...]
    mounted: frozenset[tuple[str, str]]  # (device, folder) that some mount namespace has mounted on its own
    hidden: str | None  # why this is not everything


def scan(proc: str = "/proc", system: str = "/sys") -> OpenFiles:
    found = _Scan(proc)
    for pid in _pids(proc):
        found.add(pid)
    for path in _kernel_files(proc, system):
        found.paths.setdefault(path, KERNEL)
    mounts = own_mounts(proc)
    return OpenFiles(found.files, found.paths, mounts, frozenset(found.mounted), found.why_hidden())


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


def parse_maps(maps: str) -> Iterator[tuple[Identity, str]]:
    """The mapped files. Device numbers are hexadecimal here; what has no inode is no file."""
    for line in maps.splitlines():
        match = _MAPPED.match(line)
        if match and match.group(3) != "0":
            major, minor, inode, path = match.groups()
            yield (os.makedev(int(major, 16), int(minor, 16)), int(inode)), path.removesuffix(DELETED)


def parse_backing_files(swaps: str) -> Iterator[str]:
    """Files that the kernel swaps to; they are in nobody's descriptors."""
    for line in swaps.splitlines()[1:]:
        if line.startswith("/"):
            yield line.split()[0]


class _Scan:
    def __init__(self, proc: str) -> None:
        self.proc = proc
        self.files: dict[Identity, int] = {}
        self.paths: dict[str, int] = {}
        self.mounted: set[tuple[str, str]] = set()
        self.namespaces: set[str] = set()
        self.unread: list[int] = []

    def add(self, pid: int) -> None:
        home = Path(self.proc, str(pid))
        try:
            if _holds_nothing((home / "stat").read_text("utf-8", "replace")):
                return
            for link in _links(home):
                self.add_link(link, pid)
            for identity, path in parse_maps((home / "maps").read_text("utf-8", "surrogateescape")):
                self.files.setdefault(identity, pid)
                self.paths.setdefault(path, pid)
            self.add_mounts(home)
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended
        except OSError:
            self.unread.append(pid)

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
        self.files.setdefault((found.st_dev, found.st_ino), pid)

    def add_mounts(self, home: Path) -> None:
        namespace = str((home / "ns/mnt").readlink())
        if namespace not in self.namespaces:
            mounts = parse_mounts((home / "mountinfo").read_text("utf-8", "surrogateescape"))
            self.namespaces.add(namespace)
            self.mounted.update((mount.device, mount.source) for mount in mounts if mount.source != "/")

    def why_hidden(self) -> str | None:
        if _namespace(self.proc) != FIRST_PID_NAMESPACE:
            return "only the processes of this container can be seen from here, not those of the machine"
        if not Path(self.proc, "1", "stat").exists():
            return "this machine hides other people's processes (hidepid); run as root to see them"
        if self.unread:
            return (
                f"the open files of {len(self.unread)} other processes could not be read, of pid {self.unread[0]} "
                "for one; that needs root (CAP_SYS_PTRACE)"
            )
        return None


def _pids(proc: str) -> list[int]:
    return sorted(int(home.name) for home in Path(proc).iterdir() if home.name.isdecimal())


def _links(home: Path) -> Iterator[Path]:
    for name in ("cwd", "root", "exe"):
        yield home / name
    yield from (home / "fd").iterdir()


def _holds_nothing(stat: str) -> bool:
    """Ended and not yet waited for, or a thread of the kernel: refused to non-root, though there is nothing to see."""
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[0] in "ZXx" or bool(int(fields[6]) & KERNEL_THREAD)


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

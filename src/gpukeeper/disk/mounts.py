"""Mounts and filesystems: what is mounted where, in every mount namespace (a container's bind mount of a directory in
/tmp is visible only there); how full a filesystem is; its id that outlasts a reboot; and which may not answer.
Reads only. An allow-list: a filesystem that is not named here (FUSE, NFS, an unknown one) is not queried by a read
of all processes, but by a separate process, which can be ended or abandoned.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel
from gpukeeper.disk.kernel import KERNEL, TABLE_MAX, read_proc, unescaped
from gpukeeper.disk.walk import Identity
from gpukeeper.model.subject import Subject
from gpukeeper.processes import ABANDONED_MAX, Abandoned

# options of an overlay that name directories
_LAYERS = {b"lowerdir", b"lowerdir+", b"datadir+", b"upperdir", b"workdir"}
_COLON = re.compile(r"(?<!\\):")


class MountEntry(msgspec.Struct, frozen=True):
    device: str  # major:minor
    source: str  # the directory of that filesystem which is mounted; "/" is all of it
    point: str  # where
    kind: str = ""  # of filesystem, as mount(8) names it; empty: unknown
    layers: tuple[str, ...] = ()  # directories an overlay consists of, as written when it was mounted
    options: tuple[str, ...] = ()  # of this mount, such as noatime; of the whole filesystem only `ro`
    number: int | None = None  # the kernel's, of all mounts in all namespaces


def parse_mounts(mountinfo: bytes | str) -> tuple[MountEntry, ...]:
    """A line that does not have the kernel's format is skipped; see `unparsed`."""
    return tuple(_mount(fields) for line in _lines(mountinfo) if len(fields := line.split(b" ")) > 4)


def unparsed(mountinfo: bytes | str) -> int:
    """How many lines do not have the kernel's format: what is mounted there is unknown."""
    return sum(len(line.split(b" ")) <= 4 for line in _lines(mountinfo))


def own_mounts(proc: str = "/proc") -> tuple[MountEntry, ...]:
    return parse_mounts(read_proc(f"{proc}/self/mountinfo", TABLE_MAX))


def has_mount_inside(path: str, mounts: Iterable[MountEntry]) -> bool:
    """Also of a single file, which a walk of directories cannot notice."""
    return any(is_at_or_below(mount.point, path) for mount in mounts)


def source_of(path: str, mounts: Iterable[MountEntry]) -> tuple[str, str] | None:
    """The same directory as (device, path inside that filesystem), or None if no mount covers it."""
    innermost = covering(path, mounts)
    if innermost is None:
        return None
    inside = os.path.relpath(path, innermost.point)
    return innermost.device, os.path.normpath(Path(innermost.source, inside))


def covering(path: str, mounts: Iterable[MountEntry]) -> MountEntry | None:
    """The mount that a path without links is on; of two on one point the later hides the earlier."""
    above = [mount for mount in mounts if is_at_or_below(path, mount.point)]
    return max(enumerate(above), key=lambda row: (len(row[1].point), row[0]))[1] if above else None


def is_at_or_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _lines(mountinfo: bytes | str) -> list[bytes]:
    whole = mountinfo if isinstance(mountinfo, bytes) else os.fsencode(mountinfo)
    return [line for line in whole.split(b"\n") if line]


def _mount(fields: list[bytes]) -> MountEntry:
    end = fields.index(b"-", 5) if b"-" in fields[5:] else len(fields)
    about = fields[end + 1 :]
    kind = about[0].decode("ascii", "backslashreplace") if about else ""
    layers = tuple(_layers(about[2])) if kind == "overlay" and len(about) > 2 else ()
    number = int(fields[0]) if fields[0].isdigit() else None
    device = fields[2].decode("ascii", "backslashreplace")
    options = _options(fields[:end], about)
    return MountEntry(device, unescaped(fields[3]), unescaped(fields[4]), kind, layers, options, number)


def _options(row: list[bytes], about: list[bytes]) -> tuple[str, ...]:
    own = row[5].split(b",") if len(row) > 5 else []
    whole = about[2].split(b",") if len(about) > 2 else []
    return tuple(one.decode("ascii", "backslashreplace") for one in (*own, *(one for one in whole if one == b"ro")))


def _layers(options: bytes) -> Iterator[str]:
    """Several lower ones are separated by colons; a colon in a name has a backslash before it."""
    for option in options.split(b","):
        name, _, value = option.partition(b"=")
        if name in _LAYERS:
            directories = _COLON.split(unescaped(value)) if name == b"lowerdir" else [unescaped(value)]
            yield from (directory.replace("\\:", ":") for directory in directories if directory)


LINKS = 40  # as many as the kernel follows
PATIENCE_SECONDS = 5.0
FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0
ON_DISKS = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2", "vfat", "exfat"),
    *("msdos", "ntfs", "ntfs3", "iso9660", "udf", "squashfs", "erofs", "cramfs", "overlay"),
)
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
OF_THE_KERNEL = (
    *("proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "configfs", "bpf"),
    *("pstore", "efivarfs", "fusectl", "binfmt_misc", "nsfs", "pipefs", "sockfs", "anon_inodefs", "selinuxfs", "bdev"),
)
_ANSWERS = frozenset((*ON_DISKS, *IN_MEMORY, *OF_THE_KERNEL))


def may_hang(kind: str) -> bool:
    """Of a filesystem of that type, as mount(8) names it."""
    return kind not in _ANSWERS


def silent_mount(path: str, mounts: Iterable[MountEntry]) -> MountEntry | None:
    """The mount of a path without links, where it may hang."""
    mount = covering(path, mounts)
    return mount if mount is not None and may_hang(mount.kind) else None


def leads_through_silent(path: str, mounts: Iterable[MountEntry]) -> bool:
    """Whether a mount that may hang is on the path (without links), or at its end."""
    return any(may_hang(mount.kind) and is_at_or_below(path, mount.point) for mount in mounts)


def real_path_of(path: str, mounts: Iterable[MountEntry]) -> str:
    """Like realpath, but it does not query a filesystem that may hang: from there on, the path stays as it is
    written.
    """
    known = tuple(mounts)
    at, links = "/", 0
    left = [step for step in reversed(os.path.abspath(path).split("/")) if step]  # noqa: PTH100
    while left:
        step = left.pop()
        if step == "..":
            at = os.path.dirname(at)  # noqa: PTH120
            continue
        at = f"{at.rstrip('/')}/{step}"
        if silent_mount(at, known) is not None:
            return os.path.normpath("/".join([at, *reversed(left)]))
        target = None
        with suppress(OSError):
            target = os.readlink(at)  # noqa: PTH115
        if target is not None and links < LINKS:
            links += 1
            at = "/" if target.startswith("/") else os.path.dirname(at)  # noqa: PTH120
            left += [part for part in reversed(target.split("/")) if part not in {"", "."}]
    return at


class Responsiveness:
    """Whether paths answer at all. One that did not is retried after a while, with growing pauses."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._silent: dict[str, tuple[float, float]] = {}  # until when it is not retried, and the length of the pause
        self._abandoned = Abandoned()

    def why_not(self, path: str, mounts: Iterable[MountEntry]) -> str | None:
        """A sentence; None: it answers. Blocks for a few seconds at most."""
        known = tuple(mounts)
        mount = silent_mount(real_path_of(path, known), known)
        if mount is None:
            self._silent.pop(path, None)
            return None
        until, wait = self._silent.get(path, (0.0, FIRST_WAIT / 2))
        if self._now() >= until:
            if self._answers(path):
                self._silent.pop(path, None)
                return None
            wait = min(2 * wait, LONGEST_WAIT)
            self._silent[path] = until, _ = self._now() + wait, wait
        rest = max(1, round((until - self._now()) / 60))
        return (
            f"did not answer within {PATIENCE_SECONDS:g} s: the filesystem {mount.kind} at {mount.point} "
            f"hangs; it is skipped and retried in {rest} min"
        )

    def _answers(self, path: str) -> bool:
        if len(self._abandoned) >= ABANDONED_MAX:
            return False
        command = ["stat", "-L", "--format=%i", "--", path]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE_SECONDS)
            return True  # an error is a response, too, and a reader gets it
        self._abandoned.kill(child)
        return False


NAMESPACE_PATIENCE = 10.0  # seconds
_LIST_MOUNTS = """
import ctypes, os, sys
libc, proc = ctypes.CDLL(None, use_errno=True), os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECTORY)
if libc.setns(int(sys.argv[1]), 0x20000) != 0:
    os._exit(1)
fd = os.open("self/mountinfo", os.O_RDONLY, dir_fd=proc)
while part := os.read(fd, 65536):
    os.write(1, part)
os._exit(0)
"""


def mountinfo_of(namespace: str, proc: str = "/proc") -> str | None:
    """`namespace`: a path that leads to it. None: it could not be entered."""
    try:
        fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        command = [sys.executable, "-I", "-S", "-c", _LIST_MOUNTS, str(fd), str(Path(proc))]
        done = subprocess.run(command, pass_fds=[fd], capture_output=True, timeout=NAMESPACE_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    finally:
        os.close(fd)
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


MOUNT_NAMESPACE = "mnt:["
SCAN_ROUNDS = 50


class MountScan:
    """Adds to the files, paths and problems of the scan that it is part of."""

    def __init__(self, proc: str, files: dict[Identity, int], paths: dict[str, int], problems: list[str]) -> None:
        self._proc, self._files, self._paths, self._problems = proc, files, paths, problems
        self.mounted: set[tuple[str, str]] = set()
        self.points: set[str] = set()
        self.namespaces: dict[str, tuple[MountEntry, ...]] = {}
        # Those that a descriptor or a mount keeps, each with a path to it (empty: it may hang).
        self.kept_namespaces: dict[str, str] = {}
        self.unentered: str | None = None
        self.by_number: dict[int, MountEntry] = {}
        self._overlays: set[tuple[str, tuple[str, ...]]] = set()

    def add(self, home: Path) -> tuple[MountEntry, ...]:
        namespace = os.readlink(f"{home}/ns/mnt")  # noqa: PTH115
        if namespace not in self.namespaces:
            text = read_proc(f"{home}/mountinfo", TABLE_MAX)
            if unparsed(text):
                self._problems.append(f"{unparsed(text)} lines of {home}/mountinfo could not be understood")
            self._add_table(namespace, parse_mounts(text), home)
        return self.namespaces[namespace]

    def add_kept(self) -> None:
        """Those without processes: a process that enters one of them later finds its mounts."""
        for _ in range(SCAN_ROUNDS):
            left = [one for one in self.kept_namespaces if one not in self.namespaces]
            if not left:
                return
            way = self.kept_namespaces[left[0]]
            found = mountinfo_of(way, self._proc) if way else None
            if found is None:
                self.unentered = left[0]
                return
            self._add_table(left[0], parse_mounts(found), Path(self._proc, "self"))
        self.unentered = "more than can be read"

    def _add_table(self, namespace: str, mounts: tuple[MountEntry, ...], home: Path) -> None:
        self.namespaces[namespace] = mounts
        self.by_number.update((mount.number, mount) for mount in mounts if mount.number is not None)
        self.mounted.update((mount.device, mount.source) for mount in mounts if mount.source != "/")
        self.points.update(mount.point for mount in mounts)
        for mount in mounts:
            self._add_layers(mount, home, mounts)
            if mount.kind == "nsfs" and mount.source.startswith(MOUNT_NAMESPACE):
                hangs = leads_through_silent(mount.point, mounts)
                self.kept_namespaces.setdefault(mount.source, "" if hangs else f"{home}/root{mount.point}")

    def _add_layers(self, mount: MountEntry, home: Path, mounts: tuple[MountEntry, ...]) -> None:
        """No process has a descriptor of the directories an overlay consists of, and they are mounted nowhere. Their
        paths are those of the process that mounted it, so they are looked up in each namespace until one has them
        all.
        """
        if not mount.layers or (mount.device, mount.layers) in self._overlays:
            return
        for layer in mount.layers:
            self._paths.setdefault(layer, KERNEL)
        found = [self._add_layer(layer, mount, home, mounts) for layer in mount.layers]
        if all(found):
            self._overlays.add((mount.device, mount.layers))

    def _add_layer(self, layer: str, mount: MountEntry, home: Path, mounts: tuple[MountEntry, ...]) -> bool:
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
            self._paths.setdefault(path, KERNEL)
            self._files.setdefault((found.dev, found.ino), KERNEL)
            known = True
        return known


BY_UUID = "/dev/disk/by-uuid"
FSID_IS_LASTING = frozenset(("ext2", "ext3", "ext4", "btrfs", "zfs", "bcachefs"))
FSID_IS_DEVICE = frozenset(("xfs", "f2fs"))  # f_fsid is derived from the device number


def lasting_ids(mounts: Iterable[MountEntry] | None = None, by_uuid: str = BY_UUID) -> dict[int, str]:
    """By device number, as in stat(2): the id of each mounted filesystem that has one. Two copies of one filesystem
    have the same id.
    """
    known = own_mounts() if mounts is None else tuple(mounts)
    wanted = [mount for mount in known if mount.kind in FSID_IS_LASTING | FSID_IS_DEVICE]
    found: dict[int, str] = {}
    done: set[tuple[str, str]] = set()
    uuids = _uuids(by_uuid) if any(mount.kind in FSID_IS_DEVICE for mount in wanted) else {}
    for mount in wanted:
        # Each subvolume of btrfs has a number and an id of its own; other filesystems are read once.
        which = (mount.device, mount.source if mount.kind == "btrfs" else "")
        if which in done or leads_through_silent(mount.point, known):
            continue
        if covering(mount.point, known) is not mount:
            continue  # hidden by a later mount
        with suppress(OSError):
            device, fsid = _status_of(mount.point)
            if mount.kind == "btrfs" or device == _device_number(mount.device):
                done.add(which)
                name = uuids.get(device) if mount.kind in FSID_IS_DEVICE else f"fsid-{fsid:016x}" if fsid else None
                found |= {} if name is None else {device: name}
    return found


def identified(trees: Iterable[Subject]) -> tuple[Subject, ...]:
    """The same trees, each with the uid that outlasts its device number. OSError: the mounts could not be listed."""
    ids = lasting_ids()
    return tuple(msgspec.structs.replace(one, lasting=lasting_uid(one.ref.uid, ids)) for one in trees)


def lasting_uid(uid: str, ids: Mapping[int, str]) -> str | None:
    """A uid that begins with a device number, with the id of the filesystem in its place. None: it has none."""
    device, _, rest = uid.partition(":")
    name = ids.get(int(device)) if device.isdecimal() and rest else None
    return None if name is None else f"{name}:{rest}"


def _status_of(point: str) -> tuple[int, int]:
    fd = os.open(point, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.fstat(fd).st_dev, os.fstatvfs(fd).f_fsid & (2**64 - 1)
    finally:
        os.close(fd)


def _device_number(device: str) -> int | None:
    major, _, minor = device.partition(":")
    return os.makedev(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _uuids(directory: str) -> dict[int, str]:
    """By the number of the block device."""
    found: dict[int, str] = {}
    with suppress(OSError), os.scandir(directory) as listing:
        for link in listing:
            with suppress(OSError):
                found[link.stat().st_rdev] = f"uuid-{link.name}"
    return found


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Space reserved for root is neither used nor free: it is not available to other users."""

    device: int
    mount_point: str
    size: int
    taken: int  # bytes in files
    free: int  # bytes available to ordinary users
    inodes: int | None  # None: it creates them on demand
    inodes_free: int | None

    @property
    def used(self) -> float:
        """Share of the bytes available to ordinary users."""
        return self.taken / (self.taken + self.free) if self.taken + self.free else 0.0

    @property
    def inodes_used(self) -> float | None:
        if self.inodes is None or self.inodes_free is None:
            return None
        return (self.inodes - self.inodes_free) / self.inodes


def usage(path: str | int, proc: str = "/proc") -> Usage:
    """Of the filesystem of a path or an open descriptor. May hang if a network filesystem does."""
    found = os.statvfs(path)
    limited = found.f_files > 0
    return Usage(
        device=os.stat(path).st_dev,  # noqa: PTH116 - also of a descriptor
        mount_point=_mount_point(path, proc),
        size=found.f_blocks * found.f_frsize,
        taken=(found.f_blocks - found.f_bfree) * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        inodes=found.f_files if limited else None,
        inodes_free=found.f_favail if limited else None,
    )


def _mount_point(path: str | int, proc: str) -> str:
    link = Path(proc, "self/fd", str(path))
    real = str(link.readlink()) if isinstance(path, int) else os.path.realpath(path)
    return max((mount.point for mount in own_mounts(proc) if is_at_or_below(real, mount.point)), key=len, default="/")

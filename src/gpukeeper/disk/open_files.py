"""Which files are in use: open, mapped, working directory or program of a process, mounted elsewhere, used by the
kernel, or shared with other machines, whose users cannot be known here (what is not known to be local counts as
shared). Reads only, every thread. By device and inode as well as by path, since a process in another mount
namespace has its own paths. A scan that could not read all processes says so in `hidden`; then "not in use" cannot
be known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from gpukeeper.disk.kernel import KERNEL, STATUS_MAX, TABLE_MAX, read_proc, unescaped
from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.mounts import MountEntry, covering, is_at_or_below, own_mounts, source_of
from gpukeeper.disk.process_files import DELETED, DeletedFile, ProcessScan
from gpukeeper.disk.walk import ANY_DEVICE, Identity, printable
from gpukeeper.model.unknown import Unknown

# Local filesystems, as mount(8) names them. An overlay cannot have an upper layer on a shared one.
LOCAL = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2", "ntfs3"),
        *("tmpfs", "ramfs", "overlay", "vfat", "exfat"),
    )
)
EXPORTS = ("/etc/exports", "/etc/exports.d", "/var/lib/nfs/etab", "/proc/fs/nfsd/exports")
_FOLDER = re.compile(r'"([^"]+)"|(/\S*)')
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Export(msgspec.Struct, frozen=True):
    """A directory that the NFS server of this machine exports, or will when it starts."""

    path: str  # links resolved
    by: str  # the file that defines it
    device: str
    source: str  # where it is inside that filesystem
    crosses: bool  # filesystems mounted below it are exported, too


def why_unseen(path: str, mounts: Sequence[MountEntry], exports: Iterable[Export]) -> Unknown | None:
    """Why users of a path without links may be invisible. `mounts`: of the namespace of the path."""
    mount = covering(path, mounts)
    if mount is None or mount.kind not in LOCAL:
        kind = "an unknown filesystem" if mount is None or not mount.kind else f"a filesystem of type {mount.kind}"
        return Unknown(f"it is on {kind}, which other machines may use, too; their use cannot be seen from here")
    one = next((one for one in exports if _offers(one, path, mounts)), None)
    if one is None:
        return None
    words = f"{printable(one.path)} is exported over NFS ({one.by})"
    return Unknown(f"{words}, and its use by other machines cannot be seen from here")


def exported(mounts: Sequence[MountEntry], files: Iterable[str] = EXPORTS) -> tuple[Export, ...]:
    """`mounts`: of this machine."""
    found = {}
    for file in _each(files):
        try:
            text = file.read_bytes().decode("utf-8", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            continue  # for non-root users; they cannot see the open files of others either
        for directory, crosses in parse_exports(text):
            path = os.path.realpath(directory)
            device, source = source_of(path, mounts) or ("", "/")
            found[path, crosses] = Export(path, str(file), device, source, crosses)
    return tuple(found.values())


def parse_exports(text: str) -> Iterator[tuple[str, bool]]:
    """Each directory, and whether what is mounted below it is exported, too. Lines that begin otherwise are
    continuations.
    """
    for line in text.replace("\\\n", " ").split("\n"):
        match = _FOLDER.match(line)
        if match is not None:
            directory = _ESCAPED.sub(lambda code: chr(int(code.group(1), 8)), match.group(1) or match.group(2))
            yield directory, "crossmnt" in line or "nohide" in line


def _each(files: Iterable[str]) -> Iterator[Path]:
    for file in map(Path, files):
        if file.is_dir():
            yield from sorted(file.glob("*.exports"))
        else:
            yield file


def _offers(export: Export, path: str, mounts: Sequence[MountEntry]) -> bool:
    """At the path, above or below it, by whatever name: an export is often a bind mount of the directory that is
    meant.
    """
    here = source_of(path, mounts)
    if here is not None and here[0] == export.device:
        inside = here[1]
        return is_at_or_below(inside, export.source) or is_at_or_below(export.source, inside)
    return export.crosses and is_at_or_below(path, export.path)


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
    found = ProcessScan(proc, frozenset(unreadable))
    found.add_all()
    for path in _kernel_files(proc, system):
        found.paths.setdefault(path, KERNEL)
    mounts = own_mounts(proc)
    return OpenFiles(
        found.files,
        found.paths,
        mounts,
        frozenset(found.mounts.mounted),
        found.why_hidden(),
        frozenset(found.mounts.points),
        tuple(found.held.values()),
        tuple(found.mounts.namespaces.values()),
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


def is_named_by_kernel(path: str, open_files: OpenFiles) -> bool:
    """Whether something at or below it is the layer of a mounted overlay, or used by the kernel itself."""
    return any(pid == KERNEL and is_at_or_below(named, path) for named, pid in open_files.paths.items())


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


def parse_backing_files(swaps: bytes) -> Iterator[str]:
    """Files that the kernel swaps to; no process has a descriptor of them."""
    for line in swaps.split(b"\n")[1:]:
        if line.startswith(b"/"):
            yield unescaped(line.split(b" ")[0].split(b"\t")[0])


def _kernel_files(proc: str, system: str) -> Iterator[str]:
    for path in Path(system, "block").glob("loop*/loop/backing_file"):
        try:
            yield os.fsdecode(read_proc(str(path), STATUS_MAX).removesuffix(b"\n")).removesuffix(DELETED)
        except OSError:
            continue  # detached since it was listed
    try:
        yield from parse_backing_files(read_proc(f"{proc}/swaps", TABLE_MAX))
    except FileNotFoundError:
        return  # a kernel without swap

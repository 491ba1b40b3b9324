"""Which files are in use: open, mapped, working directory or program of a process, mounted elsewhere, used by the
kernel.

Reads only, every thread. By device and inode as well as by path, since a process in another mount namespace has its own
paths. A scan that could not read all processes says so in `hidden`; then "not in use" cannot be known.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from gpukeeper.disk import procfs
from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.mounts import MountEntry, is_at_or_below, own_mounts, source_of
from gpukeeper.disk.process_files import DELETED, DeletedFile, ProcessScan
from gpukeeper.disk.remote_use import Export, exported
from gpukeeper.disk.walk import ANY_DEVICE, Identity
from gpukeeper.model.unknown import Unknown


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
            yield procfs.unescaped(line.split(b" ")[0].split(b"\t")[0])


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

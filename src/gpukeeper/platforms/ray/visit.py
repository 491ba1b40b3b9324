"""One read of the files of one node: its root directory open, and what the whole machine has in use at that moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from gpukeeper.devices.holders import user_name
from gpukeeper.disk import access_times, measure, mounts, open_files, trash, tree
from gpukeeper.disk.access_times import LastUse, Reads
from gpukeeper.disk.kernel import KERNEL, TABLE_MAX, read_proc
from gpukeeper.disk.measure import MeasureLimits, TreeMeasurement
from gpukeeper.disk.mounts import MountEntry, usage
from gpukeeper.disk.open_files import DirectoryUse, OpenFiles, why_unseen
from gpukeeper.disk.process_files import ONLY_HERE
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.disk.tree import PlaceAndTime
from gpukeeper.model.subject import Category, Disk, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.nodes import (
    Node,
    NodeAccess,
    Process,
    identity_of_entry,
    on_the_way,
    opened_directory,
    opened_node,
)


class MachineSnapshot:
    """What is common to all nodes at one moment. Open files are read when they are first needed: for what is gone they
    need not be. A caller that is about to open files reads them before.
    """

    def __init__(self, everyone: tuple[Process, ...], scan: Callable[[], OpenFiles], proc: str = "/proc") -> None:
        self.everyone, self._scan, self.proc = everyone, scan, proc
        self._used: OpenFiles | None = None

    @property
    def used(self) -> OpenFiles:
        # No cached_property: in Python 3.11 it lets only one thread of all read at a time.
        if self._used is None:
            self._used = self._scan()
        return self._used


class NodeDirectory(msgspec.Struct, frozen=True):
    """A directory of the node that is open. `path`: as the policy or Ray writes it; `real`: without links."""

    fd: int
    path: str
    real: str
    disk: Disk
    size: int  # of its filesystem, bytes
    free: int
    private: bool  # on the layer of one container, which no other process has mounted
    uids: frozenset[int] | None = None  # whose entries count; None: any user's

    def counts(self, owner: int) -> bool:
        return self.uids is None or owner in self.uids


class ProtectedPaths(msgspec.Struct, frozen=True):
    """Paths that no removal may include, and roots that belong to the host platform."""

    machine: tuple[str, ...] = ()  # as this machine sees them
    node: tuple[str, ...] = ()  # as the node does
    hosts: tuple[str, ...] = ()  # roots of this machine whose entries another platform manages


class Visit:
    def __init__(
        self,
        node: Node,
        root: int,
        around: MachineSnapshot,
        at: PlaceAndTime,
        until: float,
        limits: MeasureLimits | None = None,
        needed: ProtectedPaths | None = None,
    ) -> None:
        """`until`: of the monotonic clock; what was not measured by then is unknown."""
        self.node, self.root, self.around, self.at, self.until = node, root, around, at, until
        self.limits = limits or MeasureLimits()
        who = self.around.proc + "/" + ("self" if node.door.pid is None else str(node.door.pid))
        self.mounts = mounts.parse_mounts(read_proc(f"{who}/mountinfo", TABLE_MAX))
        self._used: OpenFiles | None = None
        self._reads: dict[str, Reads] = {}
        self._holding, self._hosts = _identities(root, needed or ProtectedPaths())

    @property
    def used(self) -> OpenFiles:
        if self._used is None:
            self._used = _as_node_sees(self.node, self.around.used, self.mounts)
        return self._used

    def unseen(self, directory: NodeDirectory) -> Unknown | None:
        """Why other machines may use it, too."""
        return why_unseen(directory.real, self.mounts, self.around.used.exports)

    def reads(self, directory: NodeDirectory) -> Reads:
        """How reads of its entries are recorded."""
        if directory.real not in self._reads:
            self._reads[directory.real] = access_times.reads_of(directory.real, self.mounts, self.around.used.tables)
        return self._reads[directory.real]

    @contextmanager
    def folder(self, path: str) -> Iterator[NodeDirectory]:
        with opened_directory(self.root, path) as (fd, real, linkers):
            found = usage(fd)
            mount = mounts.covering(real, self.mounts)
            disk = Disk(mount.point if mount else real, found.used, found.inodes_used)
            private = mount is not None and mount.point == "/" and mount.kind == "overlay"
            uids = whose(self.node.uids, linkers)
            named = os.path.normpath(path)
            yield NodeDirectory(fd, named, real, disk, found.size, found.free, private, uids)

    def is_hosts(self, directory: NodeDirectory) -> bool:
        """Its trees are left to the host platform, by whatever name they are seen here: two platforms must not act on
        the same tree.
        """
        about = os.fstat(directory.fd)
        return (about.st_dev, about.st_ino) in self._hosts

    def holds(self, identity: tuple[int, int]) -> str | None:
        """Why that tree is kept: it is, or contains, what the policy names or we need ourselves."""
        path = self._holding.get(identity)
        return None if path is None else tree.contains(path)

    def measure(self, directory: int, name: str) -> TreeMeasurement | None:
        return measure.measure(name, directory, self.used.files, self.limits, lambda: time.monotonic() > self.until)

    def last_use(self, directory: NodeDirectory, found: TreeMeasurement) -> LastUse:
        return access_times.last_use(found, self.reads(directory), None, self.at.now)

    def below(self, directory: NodeDirectory) -> DirectoryUse:
        return open_files.below(directory.real, seen_from_here(directory, self.used))

    def with_mounts(self, directory: NodeDirectory, name: str, found: TreeMeasurement) -> TreeMeasurement:
        """A single file mounted inside escapes the walk; the list of mounts has it."""
        if not mounts.has_mount_inside(str(Path(directory.real, name)), self.mounts):
            return found
        why = Unknown(measure.MOUNT_POINT)
        problems = (*found.problems, measure.MOUNT_POINT)
        return msgspec.structs.replace(found, size=why, newest=why, ctime_ns=why, problems=problems)

    def owner(self, uid: int) -> str:
        """User names are this machine's; a container has its own, which are unknown here."""
        return user_name(uid) if self.node.is_machine or uid == 0 else f"uid {uid}"

    def in_use(
        self, directory: NodeDirectory, name: str, found: TreeMeasurement, used: DirectoryUse
    ) -> tuple[bool | Unknown, str | None]:
        """And by which process."""
        user = open_files.user_of(name, found, used)
        if user is not None:
            return True, self.about(user)
        unseen = self.why_unseen(directory, name)
        return open_files.is_in_use(name, found, used) if unseen is None else unseen, None

    def why_unseen(self, directory: NodeDirectory, name: str) -> Unknown | None:
        """Of one entry: something inside of it may be exported, too."""
        unseen = self.unseen(directory)
        if unseen is not None:
            return unseen
        return why_unseen(str(Path(directory.real, name)), self.mounts, self.around.used.exports)

    def about(self, pid: int) -> str:
        if pid == KERNEL:
            return "the kernel itself uses a file of it"
        comm = next((one.comm for one in self.around.everyone if one.pid == pid), "")
        return f"pid {pid}{f' ({measure.printable(comm)})' if comm else ''} has files of it open"

    def unfinished(self, directory: NodeDirectory) -> list[Subject]:
        """What interrupted removals of ours left in that directory."""
        found = (self.unfinished_one(directory, taken) for taken in trash.leftovers(directory.fd))
        return [one for one in found if one is not None]

    def unfinished_one(self, directory: NodeDirectory, taken: TrashedTree) -> Subject | None:
        try:
            with measure.open_directory(taken.trash, directory.fd) as bin_:
                found = self.measure(bin_, taken.name)
        except FileNotFoundError:
            return None
        if found is None or not directory.counts(found.uid):
            return None
        user = open_files.users_of_trash(taken.trash, seen_from_here(directory, self.around.used))
        used: bool | Unknown = user if isinstance(user, Unknown) else user is not None or found.held_by is not None
        words = "its deletion had begun" if taken.deleting else "it was only taken, and is put back"
        facts = tree.TreeFacts(
            path=f"{directory.path}/{taken.trash}/{taken.name}",
            category=Category.UNFINISHED,
            in_use=used,
            owner=self.owner(found.uid),
            disk=directory.disk,
            root=directory.path,
            findings=(f"a removal of gpukeeper was interrupted: {words}",),
        )
        return tree.tree_subject(facts, found, self.at)


@contextmanager
def visiting(
    node: Node,
    around: MachineSnapshot,
    at: PlaceAndTime,
    until: float,
    limits: MeasureLimits | None = None,
    needed: ProtectedPaths | None = None,
) -> Iterator[Visit]:
    """FileNotFoundError: the node ended in the meantime."""
    with opened_node(node.door, around.proc) as root:
        named = msgspec.structs.replace(at, node=node.name)
        yield Visit(node, root, around, named, until, limits, needed)


def whose(uids: frozenset[int] | None, linkers: frozenset[int]) -> frozenset[int] | None:
    """The owner of a link chooses its target. Entries there count only if they belong to the same user, unless that is
    root or ourselves.
    """
    for uid in linkers - {0, os.geteuid()}:
        uids = frozenset({uid}) if uids is None else uids & {uid}
    return uids


def seen_from_here(directory: NodeDirectory, used: OpenFiles) -> OpenFiles:
    """Inside a container its own processes are all that can use its own layer, but not a volume."""
    if not directory.private or used.hidden != ONLY_HERE:
        return used
    return msgspec.structs.replace(used, hidden=None)


def _as_node_sees(node: Node, used: OpenFiles, known: tuple[MountEntry, ...]) -> OpenFiles:
    """Paths are those of the process that opened them: the same path in another node is another file. Files are the
    same everywhere by identity, and the check after the rename is exact for paths, too.
    """
    own = {one.pid for one in node.processes} | {KERNEL}
    paths = {path: pid for path, pid in used.paths.items() if pid in own}
    return msgspec.structs.replace(used, paths=paths, own_mounts=known)


def _identities(root: int, needed: ProtectedPaths) -> tuple[dict[tuple[int, int], str], set[tuple[int, int]]]:
    """What is, or contains, anything of it; and the roots of the host platform. By identity: a node may have
    directories of this machine mounted, under other names.
    """
    holding: dict[tuple[int, int], str] = {}
    hosts = set()
    with opened_node(NodeAccess()) as here:
        for at, paths in ((here, needed.machine), (root, needed.node)):
            for path in paths:
                holding |= dict.fromkeys(on_the_way(at, path), path)
        for path in needed.hosts:
            with suppress(OSError):
                hosts.add(identity_of_entry(here, path))
    return holding, hosts

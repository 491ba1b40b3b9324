"""Which Ray nodes exist: this machine, containers that the policy names, and whatever else a raylet runs in.

A node is a set of processes that see the same files, and one of them as the access to those. Reads only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from gpukeeper.model.decision import Unseen
from gpukeeper.platforms.ray.busy import foreign
from gpukeeper.platforms.ray.connect import NodeContainer
from gpukeeper.platforms.ray.processes import Process, Raylet, flags_of, raylet_of
from gpukeeper.platforms.ray.reach import NodeAccess

MACHINE = "machine"  # the uid of this machine as a node
_UNLISTED = re.compile(r"[0-9a-f]{12}|mnt:\[\d+\]")


class Node(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: str
    door: NodeAccess
    processes: tuple[Process, ...]
    raylets: tuple[Raylet, ...] = ()
    uids: frozenset[int] | None = None  # whose files count there; None: any user's

    @property
    def is_machine(self) -> bool:
        return self.door.pid is None


class NodeListing(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]
    unseen: tuple[Unseen, ...] = ()
    asleep: tuple[str, ...] = ()  # containers that are nodes and are not running: their files cannot be reached


SameFiles = Callable[[Process], bool]


def find(
    everyone: Sequence[Process], containers: Sequence[NodeContainer], machine: str, sees_ours: SameFiles
) -> NodeListing:
    """`machine`: the name of this machine. It is always among the nodes; the caller decides whether it counts."""
    nodes, unseen = [], []
    ours = tuple(one for one in everyone if sees_ours(one))
    nodes.append(_node(machine, MACHINE, NodeAccess(), ours))
    by_pid = {one.pid: one for one in everyone}
    for inside in containers:
        if not inside.pid:
            continue
        main = by_pid.get(inside.pid)
        if main is None or main.mounts is None:
            why = "its first process has ended" if main is None else "its namespaces could not be read; run as root"
            unseen.append(Unseen(inside.name, why))
            continue
        door = NodeAccess(main.pid, main.starttime)
        nodes.append(_node(inside.name, inside.uid, door, members_of(main, everyone, ours)))
    known = {one.pid for node in nodes for one in node.processes}
    others = [one for one in everyone if one.pid not in known and raylet_of(one) is not None]
    for main in _one_of_each(others):
        name = main.container[:12] if main.container else str(main.mounts)
        door = NodeAccess(main.pid, main.starttime)
        uid, members = main.container or str(main.mounts), members_of(main, everyone, ours)
        nodes.append(_node(name, uid, door, members, _whose(main, others)))
    return NodeListing(_with_unique_names(nodes), tuple(unseen), tuple(one.name for one in containers if not one.pid))


def is_found_by_raylet(name: str) -> bool:
    """Whether a node with that name was found and not configured."""
    return _UNLISTED.fullmatch(name) is not None


def members_of(main: Process, everyone: Iterable[Process], ours: Sequence[Process]) -> tuple[Process, ...]:
    """The processes that see its files, and those in its pid namespace unless that is the one of this machine."""
    shared = {one.pids for one in ours}
    return tuple(
        one
        for one in everyone
        if one.mounts is not None
        and (one.mounts == main.mounts or (one.pids == main.pids and main.pids is not None and main.pids not in shared))
    )


def sees_our_files(proc: str, paths: Sequence[str]) -> SameFiles:
    """By mount namespace; and if that differs (a service with a few mounts of its own), by the same root directory and
    the same paths. Read once for each namespace.
    """
    own = str(Path(proc, "self/ns/mnt").readlink())
    known: dict[tuple[str, str | None], bool] = {}

    def sees(process: Process) -> bool:
        if process.mounts is None or (process.mounts == own and process.container is None):
            return True
        key = process.mounts, process.container
        if key not in known:
            known[key] = all(_is_same(f"{proc}/{process.pid}/root", path) for path in ("/", *paths))
        return known[key]

    return sees


class RayRoot(msgspec.Struct, frozen=True):
    """A directory of sessions, as its node names it. `uids`: the users who claim that it is one; a session there counts
    only if it belongs to them, for any user may start a program with any argument. None: the policy's, so any
    user's.
    """

    path: str
    uids: frozenset[int] | None = None
    maybe: bool = False  # a root of the policy, which is one only if it looks like Ray's: see sessions.is_temp_dir

    def holds(self, owner: int) -> bool:
        return self.uids is None or owner in self.uids or 0 in self.uids


def reported_roots(node: Node) -> dict[str, frozenset[int]]:
    """Where its processes report sessions, and whose processes these are."""
    reported: dict[str, frozenset[int]] = {}
    for one in node.processes:
        flags = flags_of(one.argv) if is_rays_own(one) else {}
        session = flags.get("session_dir", "")
        paths = (flags.get("temp_dir", ""), str(Path(session).parent) if session else "")
        for path in (os.path.normpath(path) for path in paths if path.startswith("/")):
            reported[path] = reported.get(path, frozenset()) | {one.uid}
    return reported


def is_rays_own(process: Process) -> bool:
    """One of its programs, or an idle worker, by its title."""
    return foreign((process.title,)) is None


def _with_unique_names(found: Sequence[Node]) -> tuple[Node, ...]:
    """A container may have the name of its machine; then its id is added to the name."""
    known: set[str] = set()
    apart = []
    for node in found:
        name = f"{node.name}-{node.uid[:12]}" if node.name in known else node.name
        known.add(name)
        apart.append(msgspec.structs.replace(node, name=name))
    return tuple(apart)


def _whose(main: Process, raylets: Iterable[Process]) -> frozenset[int] | None:
    """That node was not configured: any user may name a program like that, and mount a stranger's files where it sees
    them. So only files of the user who runs it count; all only if that is root. Other processes of its pid namespace
    are ignored.
    """
    uids = frozenset(one.uid for one in raylets if one.mounts == main.mounts)
    return None if 0 in uids else uids


def _node(
    name: str, uid: str, door: NodeAccess, processes: tuple[Process, ...], uids: frozenset[int] | None = None
) -> Node:
    raylets = tuple(found for one in processes if (found := raylet_of(one)) is not None)
    return Node(name=name, uid=uid, door=door, processes=processes, raylets=raylets, uids=uids)


def _one_of_each(raylets: Iterable[Process]) -> list[Process]:
    """The oldest of each mount namespace."""
    first: dict[str | None, Process] = {}
    for one in sorted(raylets, key=lambda one: one.starttime):
        first.setdefault(one.mounts, one)
    return list(first.values())


def _is_same(root: str, path: str) -> bool:
    """Of a path that we have ourselves; one that neither has makes no difference."""
    try:
        ours = Path(path).stat()
    except OSError:
        return not os.path.lexists(f"{root}{path}")
    try:
        theirs = Path(f"{root}{path}").stat()
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

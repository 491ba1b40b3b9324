"""Which Ray nodes exist: this machine, containers that the policy names, and whatever else a raylet runs in; the
processes of each, and its files as it sees them itself. A node is a set of processes that see the same files, and
one of them is the access to those, through its root directory. Links of the node are resolved here, step by step by
descriptor, so that none leads out of it. A process whose namespaces may not be read is assumed to see this
machine's own files. A container's layers are not used: sockets and locks cannot be seen there. Reads only.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.devices.holders import ENDED_STATES, KERNEL_THREAD, parse_container, parse_uid, pids, text_of
from gpukeeper.disk import measure, trash
from gpukeeper.disk.kernel import read_proc_part
from gpukeeper.model.decision import Unseen
from gpukeeper.platforms.ray.busy import foreign
from gpukeeper.platforms.ray.settings import NodeContainer

COMMAND_LINE = 256 * 1024  # bytes read of one
TICKS = os.sysconf("SC_CLK_TCK")
_FLAG = re.compile(r"--([a-z_-]+)=(.*)", re.DOTALL)


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Identified by pid and starttime together."""

    pid: int
    starttime: int  # clock ticks since boot
    parent: int
    uid: int  # the real one
    ticks: int  # of CPU time, user and system
    comm: str
    argv: tuple[str, ...]
    mounts: str | None  # its mount namespace; None: it may not be read
    pids: str | None  # its pid namespace
    inside: int  # its pid in its own namespace
    container: str | None  # the id in its cgroup
    cut: bool = False  # its argv is longer than the part that was read

    @property
    def title(self) -> str:
        return " ".join(self.argv)


class Raylet(msgspec.Struct, frozen=True, kw_only=True):
    """What a running raylet reports about itself in its argv; an empty string where a version does not."""

    process: Process
    node_id: str
    session_name: str
    temp_dir: str


Everyone: TypeAlias = Callable[[], tuple[Process, ...]]


def read_processes(proc: str = "/proc") -> tuple[Process, ...]:
    return tuple(found for pid in pids(proc) if (found := read(pid, proc)) is not None)


def read(pid: int, proc: str = "/proc") -> Process | None:
    """None: it ended, or is a kernel thread."""
    home = Path(proc, str(pid))
    try:
        fields = _stat(home)
        if fields[0] in ENDED_STATES or int(fields[6]) & KERNEL_THREAD:
            return None
        words = read_proc_part(f"{home}/cmdline", COMMAND_LINE + 1)
        status = text_of(home / "status")
        again = _stat(home)
        if again[19] != fields[19]:
            return None  # the pid was reused between two reads
        return Process(
            pid=pid,
            starttime=int(fields[19]),
            parent=int(fields[1]),
            uid=parse_uid(status),
            ticks=int(again[11]) + int(again[12]),
            comm=text_of(home / "comm").rstrip("\n"),
            argv=tuple(os.fsdecode(word) for word in words[:COMMAND_LINE].rstrip(b"\0").split(b"\0")),
            cut=len(words) > COMMAND_LINE,
            mounts=_link(home / "ns/mnt"),
            pids=_link(home / "ns/pid"),
            inside=parse_inside(status, pid),
            container=_container(home),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_still(pid: int, starttime: int, proc: str = "/proc") -> bool:
    try:
        fields = _stat(Path(proc, str(pid)))
    except OSError:
        return False
    return int(fields[19]) == starttime and fields[0] not in ENDED_STATES


def parse_inside(status: str, pid: int) -> int:
    """The last number is the one of its own namespace. Only a newline ends a line: a name may contain other
    separators.
    """
    line = next((line for line in status.split("\n") if line.startswith("NSpid:")), "")
    numbers = line.split()[1:]
    return int(numbers[-1]) if numbers else pid


def raylet_of(process: Process) -> Raylet | None:
    """By its program, which never rewrites its argv. Flags are written with - and _, depending on the version."""
    if not process.argv or Path(process.argv[0]).name != "raylet":
        return None
    flags = flags_of(process.argv)
    return Raylet(
        process=process,
        node_id=flags.get("node_id", ""),
        session_name=flags.get("session_name") or Path(flags.get("session_dir", "")).name,
        temp_dir=flags.get("temp_dir", ""),
    )


def flags_of(argv: Iterable[str]) -> dict[str, str]:
    """Only arguments that begin with the flag: one of them contains whole command lines of others."""
    matches = (_FLAG.fullmatch(word) for word in argv)
    return {match[1].replace("-", "_"): match[2] for match in matches if match}


def descendants(parents: Iterable[int], everyone: Iterable[Process]) -> Iterator[Process]:
    """Of these pids, themselves not included."""
    children: dict[int, list[Process]] = {}
    for one in everyone:
        children.setdefault(one.parent, []).append(one)
    waiting = list(parents)
    while waiting:
        for child in children.pop(waiting.pop(), []):
            yield child
            waiting.append(child.pid)


def ancestors(pid: int, everyone: Iterable[Process]) -> frozenset[int]:
    """Of that process, itself included."""
    parents = {one.pid: one.parent for one in everyone}
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return frozenset(found)


def _stat(home: Path) -> list[str]:
    text = text_of(home / "stat")
    return text[text.rindex(")") + 2 :].split()


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except PermissionError:
        return None


def _container(home: Path) -> str | None:
    try:
        return parse_container(text_of(home / "cgroup"))
    except PermissionError:
        return None


LINKS = 40  # as the kernel allows
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
GONE = "the process through which its files are reached has ended"


class NodeAccess(msgspec.Struct, frozen=True):
    """The process through which a node's files are reached. No pid: our own, for this machine itself."""

    pid: int | None = None
    starttime: int = 0

    def is_open(self, proc: str = "/proc") -> bool:
        return self.pid is None or is_still(self.pid, self.starttime, proc)


@contextmanager
def opened_node(door: NodeAccess, proc: str = "/proc") -> Iterator[int]:
    """The root directory of a node. FileNotFoundError: its process ended, and its pid may have been reused."""
    root = os.open("/" if door.pid is None else f"{proc}/{door.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not door.is_open(proc):
            raise FileNotFoundError(errno.ENOENT, GONE)
        yield root
    finally:
        os.close(root)


@contextmanager
def opened_directory(root: int, path: str) -> Iterator[tuple[int, str, frozenset[int]]]:
    """A directory of the node, open for reading; its path without links; and the owners of the links that were
    followed.
    """
    links: list[os.stat_result] = []
    way = resolved(root, path, links)
    with ExitStack() as held:
        try:
            fd = held.enter_context(measure.open_directory(".", way[-1][0]))
        finally:
            _close(way[1:])
        yield fd, "/" + "/".join(name for _, name in way[1:]), frozenset(link.st_uid for link in links)


def identity_of_entry(root: int, path: str) -> tuple[int, int]:
    """Of the entry, links resolved within the node. FileNotFoundError also while a removal holds that name."""
    way = resolved(root, path)
    try:
        found = os.fstat(way[-1][0])
        if trash.holds_a_name(found):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found.st_dev, found.st_ino
    finally:
        _close(way[1:])


def on_the_way(root: int, path: str) -> set[tuple[int, int]]:
    """Everything on that path: directories, links that lead there, and itself; as far as it exists."""
    passed: list[os.stat_result] = []
    with suppress(OSError):
        _close(resolved(root, path, passed, steps=True)[1:])
    return {(one.st_dev, one.st_ino) for one in passed}


def resolved(
    root: int, path: str, passed: list[os.stat_result] | None = None, *, steps: bool = False
) -> list[tuple[int, str]]:
    """The path from the root down, one descriptor and name for each step; the caller closes all but the first. `passed`
    gets the links that were followed: the kernel would refuse some of a stranger's (protected_symlinks), and a caller
    that resolves links itself has to check them itself. With `steps` it gets every other step, too.
    """
    way = [(root, "")]
    left = [name for name in path.split("/") if name not in {"", "."}][::-1]
    links = 0
    try:
        while left:
            name = left.pop()
            if name == "..":
                if len(way) > 1:
                    os.close(way.pop()[0])
                continue
            step = os.open(name, _STEP, dir_fd=way[-1][0])
            about = os.fstat(step)
            is_link = stat.S_ISLNK(about.st_mode)
            if passed is not None and (is_link or steps):
                passed.append(about)
            if not is_link:
                way.append((step, name))
                continue
            links += 1
            target = _target(step, path, links)
            if target.startswith("/"):
                _close(way[1:])
                del way[1:]
            left += [part for part in target.split("/") if part not in {"", "."}][::-1]
    except BaseException:
        _close(way[1:])
        raise
    return way


def _target(link: int, path: str, links: int) -> str:
    try:
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _close(steps: list[tuple[int, str]]) -> None:
    for step, _ in steps:
        os.close(step)


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

"""Which nodes exist now, what to search for on each according to the policy and to raylets, and everything on one:
sessions, logs, temporary trees below the roots that the policy names, the rest of an interrupted removal. Reads
only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.disk import measure, mounts, trash, tree
from gpukeeper.disk.measure import KEEP, MeasureLimits
from gpukeeper.disk.open_files import DirectoryUse, OpenFiles
from gpukeeper.disk.trash import is_named
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import DAY, Policy, Temporary
from gpukeeper.model.subject import State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import nodes, sessions, translate
from gpukeeper.platforms.ray.nodes import (
    Everyone,
    Node,
    NodeAccess,
    NodeListing,
    Process,
    RayRoot,
    identity_of_entry,
    opened_directory,
    opened_node,
    read_processes,
)
from gpukeeper.platforms.ray.sessions import NAME, RaySession
from gpukeeper.platforms.ray.settings import (
    DEFAULT_TMP,
    RAY,
    Containers,
    NodeContainer,
    Timeouts,
    no_containers,
    settings_of,
    temporary_folders,
    unreadable,
)
from gpukeeper.platforms.ray.translate import LogFile
from gpukeeper.platforms.ray.visit import NodeDirectory, ProtectedPaths, Visit

KEPT = f"it contains a file named {KEEP}"


def names_of_trees(directory: NodeDirectory, temporary: Temporary) -> list[str]:
    """What is kept by name is listed, too: the rule reports it. A session is never a mere temporary tree."""
    with os.scandir(directory.fd) as listing:
        named = [entry for entry in listing if is_named(entry.name, temporary.names) and not NAME.fullmatch(entry.name)]
        return sorted(entry.name for entry in named if _tree_counts(directory, entry))


def _tree_counts(directory: NodeDirectory, entry: os.DirEntry[str]) -> bool:
    try:
        return directory.counts(entry.stat(follow_symlinks=False).st_uid)
    except FileNotFoundError:
        return False


def subject_of_tree(directory: NodeDirectory, name: str, visit: Visit, below: DirectoryUse) -> Subject | None:
    """None: it is gone since it was listed."""
    found = visit.measure(directory.fd, name)
    if found is None:
        return None
    found = visit.with_mounts(directory, name, found)
    in_use, keeps = visit.in_use(directory, name, found, below)
    facts = tree.TreeFacts(
        path=str(Path(directory.path, name)),
        in_use=in_use,
        kept=why_tree_kept(directory, name, (found.device, found.inode), visit),
        owner=visit.owner(found.uid),
        disk=directory.disk,
        root=directory.path,
        of_users=visit.node.is_machine,
        last_use=visit.last_use(directory, found),
        labels={"kept_by": keeps} if keeps else {},
    )
    return tree.tree_subject(facts, found, visit.at)


def why_tree_kept(directory: NodeDirectory, name: str, identity: tuple[int, int], visit: Visit) -> str | None:
    return KEPT if has_keep(directory.fd, name) else visit.holds(identity)


def has_keep(directory: int, name: str) -> bool:
    try:
        os.stat(f"{name}/{KEEP}", dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def is_tree_named(name: str, path: str, temporary: Sequence[Temporary]) -> bool:
    """Whether the policy matches an entry of that name of that root."""
    return any(os.path.normpath(one.root) == path and is_named(name, one.names) for one in temporary)


ESTIMATE = timedelta(minutes=2)
AT_ONCE = 1_000  # paths of one estimate
TRIES = 3  # files come and go while a live session is counted


class SurveyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to search for on one node."""

    ray_roots: tuple[RayRoot, ...]
    temporary: tuple[Temporary, ...]
    logs: timedelta | None  # minimum age of logs of ended processes; None: they are kept
    too_full: float  # share of a disk above which such logs may be removed sooner
    running_sessions: Mapping[str, str] = {}
    needed: ProtectedPaths = ProtectedPaths()


@dataclass
class NodeSurvey:
    subjects: list[Subject] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    live: int = 0  # sessions
    dead: int = 0
    sessions: list[str] = field(default_factory=list)  # paths of all of them
    others: list[str] = field(default_factory=list)  # paths of entries of temporary directories with other names
    disks: dict[int, NodeDirectory] = field(
        default_factory=dict
    )  # by device: one directory on each, the node's own first
    living: list[str] = field(default_factory=list)  # paths of live sessions
    folder: NodeDirectory | None = None  # the first one: its disk is the node's. Already closed
    there: set[str] = field(default_factory=set)  # the configured directories that exist
    visited: set[tuple[int, int, bool]] = field(default_factory=set)  # directories, each once whatever its name
    finished: set[tuple[int, int]] = field(default_factory=set)  # directories whose trash was read

    def size(self, living: int | Unknown) -> int | Unknown:
        """Of all of it, a lower bound: what could not be measured adds nothing."""
        return living if isinstance(living, Unknown) else living + tree.together(self.subjects)


def survey(visit: Visit, wants: SurveyOptions) -> NodeSurvey:
    found = NodeSurvey()
    for path, some in by_root(wants.temporary).items():
        within(visit, path, found, partial(_add_trees, temporary=some, visit=visit, wants=wants, found=found))
    for root in wants.ray_roots:
        work = partial(_add_sessions, root=root, visit=visit, wants=wants, found=found)
        within(visit, root.path, found, work, of_ray=True)
    found.findings += _not_found(wants, found)
    return found


def _not_found(wants: SurveyOptions, found: NodeSurvey) -> Iterator[str]:
    """Of the roots in the policy: explains why nothing of them is listed."""
    for root in (one.path for one in wants.ray_roots if one.maybe and one.path != DEFAULT_TMP):
        usual = str(Path(root, RAY))
        if root not in found.there:
            yield f"{root}, set in ray.roots, does not exist"
        elif usual not in found.there and not any(Path(one).parent == Path(root) for one in found.sessions):
            yield f"no Ray session was found for ray.roots {root}: there is no {usual}, and no session in {root} itself"


def within(
    visit: Visit, path: str, found: NodeSurvey, work: Callable[[NodeDirectory], None], *, of_ray: bool = False
) -> None:
    """In that directory of the node, if it exists. What could not be read is reported."""
    entered = False
    try:
        with visit.folder(path) as directory:
            entered = True
            found.there.add(path)
            found.folder = found.folder or directory
            about = os.fstat(directory.fd)
            found.disks.setdefault(about.st_dev, directory)
            if (about.st_dev, about.st_ino, of_ray) not in found.visited:
                found.visited.add((about.st_dev, about.st_ino, of_ray))
                found.findings += _limits(directory, visit)
                work(directory)
    except OSError as error:
        if entered or not isinstance(error, FileNotFoundError | NotADirectoryError):
            found.unseen.append(unreadable(f"{visit.node.name}:{path}", error))


def _limits(directory: NodeDirectory, visit: Visit) -> Iterator[str]:
    """Explains why files of others are not considered there."""
    if directory.uids != visit.node.uids:
        words = " and ".join(sorted(visit.owner(uid) for uid in directory.uids or ())) or "several people"
        yield f"{directory.path} is reached through a link of {words}, so only files that they own there are considered"


def by_root(temporary: Sequence[Temporary]) -> dict[str, list[Temporary]]:
    roots: dict[str, list[Temporary]] = {}
    for one in temporary:
        roots.setdefault(os.path.normpath(one.root), []).append(one)
    return roots


def logs_of(
    session: RaySession, directory: NodeDirectory, visit: Visit, wants: SurveyOptions
) -> tuple[Subject | None, tuple[str, ...]]:
    """Of one live session; and sentences about files that grow too large."""
    with sessions.opened(directory.fd, f"{session.name}/{sessions.LOGS}") as fd:
        if fd is None:
            return None, ()
        path = str(Path(session.path, sessions.LOGS))
        about = tuple(f"{path}: {words}" for words in sessions.too_long(fd))
        files = logs_to_go(fd, directory, visit, wants)
        if not files:
            return None, about
        top = os.fstat(fd)
        owner = visit.owner(session.uid)
        identity = top.st_dev, top.st_ino
        # Files that are seen in use are not among them; whether unseen processes use them is another question.
        hidden = visit.below(directory).open_files.hidden
        in_use = False if hidden is None else Unknown(hidden)
        return translate.logs_subject(path, identity, files, owner, directory.disk, visit.at, in_use=in_use), about


def logs_to_go(fd: int, directory: NodeDirectory, visit: Visit, wants: SurveyOptions) -> tuple[LogFile, ...]:
    """By the full hour: otherwise each pass would find one more that has become old enough, so never the same set
    twice.
    """
    age = logs_age(directory, visit, wants)
    if age is None:
        return ()
    before = (visit.at.now - age).replace(minute=0, second=0, microsecond=0)
    return tuple(
        one for one in sessions.removable(fd, visit, visit.reads(directory), before) if directory.counts(one.uid)
    )


def logs_age(directory: NodeDirectory, visit: Visit, wants: SurveyOptions) -> timedelta | None:
    """Sooner while the disk is certainly too full; between the two thresholds only the engine knows, and the longer age
    applies.
    """
    if wants.logs is None or visit.unseen(directory) is not None:
        return None
    return min(wants.logs, DAY) if directory.disk.full >= wants.too_full else wants.logs


def estimate(found: NodeSurvey, door: str, deadline: timedelta = ESTIMATE) -> int | Unknown:
    """The size of live sessions and of entries with other names, estimated. `door`: the path of the node's root
    directory here.
    """
    paths, until = [door + path for path in (*found.living, *found.others)], time.monotonic() + deadline.total_seconds()
    total = 0
    for start in range(0, len(paths), AT_ONCE):
        size: int | Unknown = 0
        for _ in range(TRIES):
            left = timedelta(seconds=max(until - time.monotonic(), 0.0))
            size = measure.estimate(paths[start : start + AT_ONCE], left)
            if not isinstance(size, Unknown):
                break
        if isinstance(size, Unknown):
            return size
        total += size
    return total


def _add_trees(
    directory: NodeDirectory, temporary: Sequence[Temporary], visit: Visit, wants: SurveyOptions, found: NodeSurvey
) -> None:
    hosts = visit.is_hosts(directory)
    names = dict.fromkeys(name for one in temporary for name in names_of_trees(directory, one)) if not hosts else {}
    found.others += _others(directory, names, visit, wants)
    if hosts:
        return
    below = visit.below(directory)
    for name in names:
        try:
            subject = subject_of_tree(directory, name, visit, below)
        except OSError as error:
            found.unseen.append(unreadable(f"{visit.node.name}:{directory.path}/{measure.printable(name)}", error))
            continue
        if subject is not None:
            found.subjects.append(subject)
    _add_unfinished(directory, visit, found)


def _add_unfinished(directory: NodeDirectory, visit: Visit, found: NodeSurvey) -> None:
    """Once, though a directory may contain trees and sessions: two steps on the same tree would conflict."""
    about = os.fstat(directory.fd)
    if (about.st_dev, about.st_ino) not in found.finished:
        found.finished.add((about.st_dev, about.st_ino))
        found.subjects += visit.unfinished(directory)


def _others(directory: NodeDirectory, named: Mapping[str, None], visit: Visit, wants: SurveyOptions) -> Iterator[str]:
    """Nothing that is mounted, which may hang, and no directory of sessions: those are counted one by one."""
    roots = {os.path.normpath(one.path) for one in wants.ray_roots if not one.maybe}
    with os.scandir(directory.fd) as listing:
        names = [entry.name for entry in listing if entry.name not in named and not trash.is_trash(entry.name)]
    for name in names:
        path = str(Path(directory.real, name))
        if sessions.NAME.fullmatch(name) or str(Path(directory.path, name)) in roots:
            continue
        if not mounts.has_mount_inside(path, visit.mounts):
            yield path


def _add_sessions(
    directory: NodeDirectory, root: RayRoot, visit: Visit, wants: SurveyOptions, found: NodeSurvey
) -> None:
    for session in sessions.listed(directory, root):
        found.sessions.append(session.path)
        state = sessions.standing(session, directory, visit, wants.running_sessions)
        subject = sessions.subject_of(session, state, directory, visit)
        if isinstance(subject, Unknown):
            found.unseen.append(Unseen(f"{visit.node.name}:{measure.printable(session.path)}", subject.why))
            continue
        found.subjects.append(subject)
        alive = subject.state is State.RUNNING
        found.live, found.dead = found.live + alive, found.dead + (subject.in_use is False)
        if alive:
            found.living.append(str(Path(directory.real, session.name)))
            of_the_dead, about = logs_of(session, directory, visit, wants)
            found.subjects += [] if of_the_dead is None else [of_the_dead]
            found.findings += about
            with sessions.opened(directory.fd, f"{session.name}/{sessions.LOGS}") as fd:
                found.subjects += [] if fd is None else unfinished_logs(fd, session, directory, visit)
    _add_unfinished(directory, visit, found)


def unfinished_logs(fd: int, session: RaySession, directory: NodeDirectory, visit: Visit) -> list[Subject]:
    """Of an interrupted removal of many log files."""
    found = []
    for place in sessions.FOLDERS:
        with sessions.opened(fd, place or ".") as inner:
            if inner is None:
                continue
            path = os.path.normpath(Path(session.path, sessions.LOGS, place))
            here = msgspec.structs.replace(directory, fd=inner, path=path)
            found += visit.unfinished(here)
    return found


HOST = "host"  # the platform that may own this machine's own roots
CONTAINERS = "containers that are nodes"


class DiscoveredNodes(msgspec.Struct, frozen=True):
    """What exists at one moment."""

    everyone: tuple[Process, ...]
    found: NodeListing
    listed: bool  # whether every container that the policy lists as a node is known

    def node(self, name: str) -> Node | None:
        return next((one for one in self.found.nodes if one.name == name), None)


class NodesAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes are read. `scan`: which files are open; `everyone`: which processes exist; None: all of `proc`."""

    proc: str = "/proc"
    scan: Callable[[], OpenFiles] | None = None
    everyone: Everyone | None = None
    limits: MeasureLimits | None = None
    timeouts: Timeouts = Timeouts()


DEFAULT_ACCESS = NodesAccess()


class Discovery:
    def __init__(
        self,
        place: str,
        policy: Policy,
        containers: Containers,
        environ: Mapping[str, str],
        *,
        access: NodesAccess = DEFAULT_ACCESS,
        directories: Sequence[str] = (),
    ) -> None:
        """`directories`: of gpukeeper itself."""
        self._place, self.policy, self._containers = place, policy, containers
        self._environ, self._proc, self._timeouts = environ, access.proc, access.timeouts
        self._everyone = access.everyone or partial(read_processes, access.proc)
        self._folders = tuple(directories)
        self._reported: dict[str, dict[str, frozenset[int]]] = {}  # by node: every Ray root ever reported there

    async def discover(self) -> DiscoveredNodes:
        """OSError or TimeoutError if not even the processes can be listed."""
        listed = await self._containers(settings_of(self.policy).workers)
        inside: tuple[NodeContainer, ...] = () if isinstance(listed, Unknown) else tuple(listed)
        here = await in_thread(lambda: self.find(inside), self._timeouts.processes)
        if isinstance(listed, Unknown):
            unseen = (*here.found.unseen, Unseen(CONTAINERS, listed.why))
            return DiscoveredNodes(here.everyone, msgspec.structs.replace(here.found, unseen=unseen), False)
        return here

    def wants(self, node: Node, running_sessions: Mapping[str, str] | None = None) -> SurveyOptions:
        settings = settings_of(self.policy)
        return SurveyOptions(
            ray_roots=self._ray_roots(node),
            temporary=self._temporary(),
            logs=settings.logs,
            too_full=self.policy.disk.high,
            running_sessions=running_sessions or {},
            needed=self._needed(),
        )

    def find(self, inside: tuple[NodeContainer, ...]) -> DiscoveredNodes:
        """Blocks."""
        everyone = self._everyone()
        paths = tuple(dict.fromkeys((DEFAULT_TMP, *settings_of(self.policy).roots)))
        found = nodes.find(everyone, inside, self._place, nodes.sees_our_files(self._proc, paths))
        ours = tuple(one for one in found.nodes if not one.is_machine or self._counts(one))
        queried = self._containers is not no_containers
        return DiscoveredNodes(everyone, msgspec.structs.replace(found, nodes=ours), queried)

    def again(self, name: str, uid: str, door: NodeAccess) -> Node | None:
        """With its current processes. Blocks. None: the process through which its files were reached has ended."""
        inside = () if door.pid is None else (NodeContainer(name, door.pid, uid),)
        now = self.find(inside).node(name)
        return now if now is not None and now.door == door else None

    def _counts(self, machine: Node) -> bool:
        """This machine is a node if a raylet runs here, or one left a root behind."""
        if machine.raylets:
            return True
        with opened_node(machine.door, self._proc) as root:
            return any(_is_there(root, one) for one in self._ray_roots(machine))

    def _ray_roots(self, node: Node) -> tuple[RayRoot, ...]:
        directories = temporary_folders(self._environ) if node.is_machine else (DEFAULT_TMP,)
        usual = [
            str(Path(directory, RAY)) for directory in dict.fromkeys((*directories, *settings_of(self.policy).roots))
        ]
        reported = self._reported.setdefault(node.uid, {})
        for path, uids in nodes.reported_roots(node).items():
            reported[path] = reported.get(path, frozenset()) | uids
        by_word = tuple(RayRoot(path, uids) for path, uids in reported.items() if path not in usual)
        known = {*usual, *reported}
        named = (os.path.normpath(path) for path in settings_of(self.policy).roots)
        itself = tuple(RayRoot(path, maybe=True) for path in dict.fromkeys(named) if path not in known)
        return (*(RayRoot(path) for path in usual), *by_word, *itself)

    def _temporary(self) -> tuple[Temporary, ...]:
        return tuple(one for one in self.policy.temporary if one.platform == translate.PLATFORM)

    def _needed(self) -> ProtectedPaths:
        policy = self.policy
        nodes = (*settings_of(policy).roots, *(one.root for one in self._temporary()))
        trees = tuple(one.root for one in policy.temporary if one.platform == HOST)
        reports = policy.reports.roots
        captured = () if policy.capture.to is None else (policy.capture.to,)
        hosts = (*reports, *(trees if HOST in policy.scope else ()))
        machine = (*trees, *reports, *captured, *self._folders)
        return ProtectedPaths(machine, nodes, hosts)


def names_here(place: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes that can be found without a container engine. OSError if processes cannot be listed."""
    here = Discovery(place, Policy(), no_containers, environ)
    return tuple(node.name for node in here.find(()).found.nodes)


def _is_there(root: int, one: RayRoot) -> bool:
    try:
        if not one.maybe:
            identity_of_entry(root, one.path)
            return True
        with opened_directory(root, one.path) as (fd, _, _):
            return sessions.is_temp_dir(fd)
    except OSError:
        return False

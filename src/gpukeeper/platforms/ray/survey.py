"""Everything on a node: sessions, logs, temporary trees, the rest of an interrupted removal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel, measure, mounts, trash
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import DAY, Temporary
from gpukeeper.model.subject import State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import errors, logs, sessions, translate, trees
from gpukeeper.platforms.ray.connect import DEFAULT_TMP, RAY
from gpukeeper.platforms.ray.nodes import RayRoot
from gpukeeper.platforms.ray.sessions import RaySession
from gpukeeper.platforms.ray.translate import LogFile
from gpukeeper.platforms.ray.visit import NodeDirectory, ProtectedPaths, Visit

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
        return living if isinstance(living, Unknown) else living + translate.together(self.subjects)


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
            found.unseen.append(errors.unreadable(f"{visit.node.name}:{path}", error))


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
    with opened_logs(directory, session.name) as fd:
        if fd is None:
            return None, ()
        path = str(Path(session.path, logs.LOGS))
        about = tuple(f"{path}: {words}" for words in logs.too_long(fd))
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
    return tuple(one for one in logs.removable(fd, visit, visit.reads(directory), before) if directory.counts(one.uid))


def logs_age(directory: NodeDirectory, visit: Visit, wants: SurveyOptions) -> timedelta | None:
    """Sooner while the disk is certainly too full; between the two thresholds only the engine knows, and the longer age
    applies.
    """
    if wants.logs is None or visit.unseen(directory) is not None:
        return None
    return min(wants.logs, DAY) if directory.disk.full >= wants.too_full else wants.logs


@contextmanager
def opened_logs(directory: NodeDirectory, name: str) -> Iterator[int | None]:
    """None: it has none, or one that Ray did not create."""
    try:
        fd = kernel.open_inside(directory.fd, f"{name}/{logs.LOGS}")
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


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
    names = dict.fromkeys(name for one in temporary for name in trees.names(directory, one)) if not hosts else {}
    found.others += _others(directory, names, visit, wants)
    if hosts:
        return
    below = visit.below(directory)
    for name in names:
        try:
            subject = trees.subject_of(directory, name, visit, below)
        except OSError as error:
            found.unseen.append(
                errors.unreadable(f"{visit.node.name}:{directory.path}/{measure.printable(name)}", error)
            )
            continue
        if subject is not None:
            found.subjects.append(subject)
    _add_unfinished(directory, visit, found)


def _add_unfinished(directory: NodeDirectory, visit: Visit, found: NodeSurvey) -> None:
    """Once, though a directory may contain trees and sessions: two steps on the same tree would conflict."""
    about = os.fstat(directory.fd)
    if (about.st_dev, about.st_ino) not in found.finished:
        found.finished.add((about.st_dev, about.st_ino))
        found.subjects += [subject for _, subject in visit.unfinished(directory)]


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
            with opened_logs(directory, session.name) as fd:
                found.subjects += [] if fd is None else unfinished_logs(fd, session, directory, visit)
    _add_unfinished(directory, visit, found)


def unfinished_logs(fd: int, session: RaySession, directory: NodeDirectory, visit: Visit) -> list[Subject]:
    """Of an interrupted removal of many log files."""
    found = []
    for place in logs.FOLDERS:
        with logs.opened(fd, place) as inner:
            if inner is None:
                continue
            path = os.path.normpath(Path(session.path, logs.LOGS, place))
            here = msgspec.structs.replace(directory, fd=inner, path=path)
            found += [subject for _, subject in visit.unfinished(here)]
    return found

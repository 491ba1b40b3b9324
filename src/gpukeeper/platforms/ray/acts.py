"""Blocking work on nodes, each in a thread of its own: reading all of one, finding one object again by its identity,
whatever its name is now, and removing what a node left behind: moved to the trash, checked again, and only then
deleted. The second check covers what only Ray's side shows: does a socket of it answer after all, does a process
name it, has work begun on its node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.disk import remove, trash, tree
from gpukeeper.disk.measure import MeasureLimits, printable
from gpukeeper.disk.mounts import identified
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import ExpectedTree, RemovalResult, StillFree, remove_files
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.disk.tree import TREE, PlaceAndTime
from gpukeeper.model.decision import Accepted, ActResult, Changed, Evidence, NothingToCapture, Refused
from gpukeeper.model.policy import HOUR, Temporary
from gpukeeper.model.subject import Category, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import sessions, survey, translate
from gpukeeper.platforms.ray.nodes import GONE, Everyone, Node, Process, RayRoot
from gpukeeper.platforms.ray.sessions import RaySession, ends_of, listener_of
from gpukeeper.platforms.ray.survey import (
    KEPT,
    NodeSurvey,
    SurveyOptions,
    by_root,
    has_keep,
    is_tree_named,
    logs_to_go,
    subject_of_tree,
)
from gpukeeper.platforms.ray.visit import (
    MachineSnapshot,
    NodeDirectory,
    Visit,
    seen_from_here,
    visiting,
)


class Location(msgspec.Struct, frozen=True):
    """Where it is now: the open directory that contains it. `name` of a session is that of the session, also for its
    logs.
    """

    folder: NodeDirectory
    name: str
    kind: str
    taken: TrashedTree | None = None  # it is in our trash
    session: RaySession | None = None
    logs: int = -1  # the open directory of its logs


@contextmanager
def locate(visit: Visit, ref: Ref, wants: SurveyOptions) -> Iterator[Location | Unknown | None]:
    """None: every directory where it can be was read, and it is in none."""
    wanted = translate.identity_in(ref.uid)
    if wanted is None:
        yield Unknown(f"{ref.uid!r} does not identify a tree")
        return
    with ExitStack() as held:
        yield _locate(visit, ref, wanted, wants, held)


def _locate(
    visit: Visit, ref: Ref, wanted: tuple[int, int], wants: SurveyOptions, held: ExitStack
) -> Location | Unknown | None:
    roots = {root.path: root for root in wants.ray_roots}
    on_this_disk = False
    for path in dict.fromkeys((*by_root(wants.temporary), *roots)):
        try:
            directory = held.enter_context(visit.folder(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return Unknown(f"{path} could not be read: {error.strerror}")
        hosts = visit.is_hosts(directory)
        if hosts and path not in roots:
            continue
        on_this_disk = on_this_disk or os.fstat(directory.fd).st_dev == wanted[0]
        temporary = () if hosts else wants.temporary
        spot = _in_folder(directory, roots.get(path), ref, wanted, temporary, held)
        if spot is not None:
            return spot
    return None if on_this_disk else Unknown("none of the directories that are read is on its filesystem now")


def _in_folder(
    directory: NodeDirectory,
    root: RayRoot | None,
    ref: Ref,
    wanted: tuple[int, int],
    temporary: Sequence[Temporary],
    held: ExitStack,
) -> Location | Unknown | None:
    """`root`: it is a directory of sessions."""
    known = [] if root is None else list(sessions.listed(directory, root))
    if (spot := _in_logs(directory, known, ref, wanted, held)) is not None or ref.kind == translate.LOGS:
        return spot
    session = next((one for one in known if one.identity == wanted), None)
    if session is not None:
        return Location(directory, session.name, translate.SESSION, session=session)
    for name in tree.names_of(directory.fd, wanted, tree.stat_entry, directory.counts):
        if is_tree_named(name, directory.path, temporary):
            return Location(directory, name, TREE)
        return Unknown(f"its name is {printable(str(Path(directory.path, name)))} now, which the policy does not match")
    taken = tree.taken_in(directory.fd, wanted, directory.counts)
    return None if taken is None else Location(directory, taken.name, TREE, taken)


def _in_logs(
    directory: NodeDirectory, known: Sequence[RaySession], ref: Ref, wanted: tuple[int, int], held: ExitStack
) -> Location | None:
    """The directory of logs itself, or something that an interrupted removal left in it."""
    for session in known:
        # Closed at once unless it is in there: what we have open ourselves looks used.
        with ExitStack() as open_:
            fd = open_.enter_context(sessions.opened(directory.fd, f"{session.name}/{sessions.LOGS}"))
            spot = None if fd is None else _in_logs_of(session, fd, directory, ref, wanted, open_)
            if spot is not None:
                held.push(open_.pop_all())
                return spot
    return None


def _in_logs_of(
    session: RaySession, fd: int, directory: NodeDirectory, ref: Ref, wanted: tuple[int, int], open_: ExitStack
) -> Location | None:
    top = os.fstat(fd)
    if ref.kind == translate.LOGS:
        same = (top.st_dev, top.st_ino) == wanted
        return Location(directory, session.name, translate.LOGS, session=session, logs=fd) if same else None
    for place in sessions.FOLDERS:
        inner = open_.enter_context(sessions.opened(fd, place or "."))
        if inner is None:
            continue
        path = os.path.normpath(Path(session.path, sessions.LOGS, place))
        here = msgspec.structs.replace(directory, fd=inner, path=path)
        if (taken := tree.taken_in(inner, wanted, directory.counts)) is not None:
            return Location(here, taken.name, TREE, taken)
    return None


Scan = Callable[[], OpenFiles]
NOT_THEIRS = Refused(
    "the owners of its files could not be determined, so only an admin may request it; nothing was done"
)
NOT_MEASURED = Refused("it was not measured completely, so nothing was done")


class NodeRemoval:
    """One removal on one node."""

    def __init__(self, visit: Visit, scan: Scan, everyone: Everyone, works: Callable[[Node], str | None]) -> None:
        """`works`: what runs on that node according to the titles of its processes, now."""
        self._visit, self._scan, self._everyone, self._works = visit, scan, everyone, works

    def remove(self, spot: Location, fresh: Subject, wants: SurveyOptions, uid: int | None = None) -> ActResult:
        if uid is not None and fresh.uids is None:
            return NOT_THEIRS
        trash.sweep(spot.folder.fd)
        if fresh.category is Category.UNFINISHED or spot.taken is not None:
            return self._finish(spot, fresh)
        if spot.kind != fresh.ref.kind:
            return Changed(f"it is a {spot.kind} now")
        if spot.kind == translate.LOGS:
            return self._remove_logs(spot, fresh, wants)
        exactly = tree.expected(fresh, uid)
        if exactly is None:
            return NOT_MEASURED
        needed = self._visit.holds(exactly.identity)
        if needed is not None:
            return Changed(f"it is kept: {needed}")
        if spot.kind == translate.SESSION:
            return self._remove_session(spot, fresh, exactly)
        if has_keep(spot.folder.fd, spot.name):
            return Changed(f"it is kept: {KEPT}")
        return self._remove_tree(spot, exactly, self._check_no_work)

    def _seen_from(self, spot: Location) -> Scan:
        return lambda: seen_from_here(spot.folder, self._scan())

    def _finish(self, spot: Location, fresh: Subject) -> ActResult:
        if spot.taken is None:
            return Changed("it is not in the trash any more")
        if fresh.category is not Category.UNFINISHED:
            return Changed("an interrupted removal has moved it to the trash; that is finished first")
        return answered(
            remove.finish(
                spot.folder.fd,
                spot.taken,
                scan=self._seen_from(spot),
                until=self._visit.until,
                still_free=self._is_reachable,
            )
        )

    def _remove_tree(
        self, spot: Location, exactly: ExpectedTree, still_free: StillFree, *, sockets: bool = False
    ) -> ActResult:
        scan, until = self._seen_from(spot), self._visit.until
        return answered(
            remove.remove(
                spot.folder.fd, spot.name, exactly, scan=scan, until=until, still_free=still_free, sockets=sockets
            )
        )

    def _remove_session(self, spot: Location, fresh: Subject, exactly: ExpectedTree) -> ActResult:
        session = spot.session
        if session is None:
            return Changed("it is not a session any more")
        if not isinstance(fresh.last_used, datetime) or self._visit.at.now - fresh.last_used < HOUR:
            why = f" ({fresh.use_evidence})" if fresh.use_evidence else ""
            return Changed(
                f"it is younger than an hour{why}, and a session that is starting has directories and no processes yet"
            )
        own = {one.pid for one in self._visit.node.processes}

        def still_dead(fd: int) -> str | Unknown | None:
            named = sessions.refers(session, self._everyone(), own, self._visit.around.proc)
            return self._is_reachable(fd) or named or listener_of(fd) or sessions.user_files(fd)

        return self._remove_tree(spot, exactly, still_dead, sockets=True)

    def _remove_logs(self, spot: Location, fresh: Subject, wants: SurveyOptions) -> ActResult:
        files = logs_to_go(spot.logs, spot.folder, self._visit, wants)
        inode = (translate.identity_in(fresh.ref.uid) or (0, 0))[1]
        if translate.logs_incarnation(inode, files) != fresh.seen.incarnation:
            return Changed("the set of logs of ended processes has changed")
        back, removed, kept = 0, 0, []
        for place in sessions.FOLDERS:
            some = [
                (one.name, ExpectedTree((one.device, one.inode), one.ctime_ns)) for one in files if one.folder == place
            ]
            with sessions.opened(spot.logs, place or ".") as directory:
                if directory is None or not some:
                    continue
                done = remove_files(directory, some, scan=self._seen_from(spot), until=self._visit.until)
            size = done.removal.bytes_back
            back += 0 if isinstance(size, Unknown) else size
            removed += len(done.removed)
            kept += [f"{printable(name)}: {why.why}" for name, why in done.kept.items()]
            kept += done.removal.left
        if kept and not removed:
            return Changed(f"none of the {len(files):,} files were removed: {kept[0]}")
        return Accepted(back)

    def _is_reachable(self, fd: int) -> str | None:
        """A container that stops in the meantime takes its files along; after a restart it has other ones."""
        return None if self._visit.node.door.is_open(self._visit.around.proc) else GONE

    def _check_no_work(self, fd: int) -> str | None:
        work = self._works(self._visit.node)
        return self._is_reachable(fd) or (None if work is None else f"work began beside it: {work}")


def answered(result: RemovalResult) -> ActResult:
    return tree.answered(
        result,
        lambda removal: Refused(f"{removal.entries:,} entries were removed, but not: {'; '.join(removal.left[:3])}"),
    )


NO_LOGS = NothingToCapture("temporary files have no logs, manifest or events of their own")


class NodeRead(msgspec.Struct, frozen=True):
    """Which node is read, for what, and the processes of that moment. `timeout`: then the rest is unknown."""

    node: Node
    everyone: tuple[Process, ...]
    wants: SurveyOptions
    timeout: timedelta


class NodeReader:
    def __init__(
        self,
        at: Callable[[], PlaceAndTime],
        scan: Callable[[], OpenFiles],
        everyone: Everyone,
        works: Callable[[Node], str | None],
        proc: str,
        limits: MeasureLimits | None,
    ) -> None:
        """`works`: what runs on that node according to the titles of its processes, now."""
        self._at, self._scan, self._everyone, self._works = at, scan, everyone, works
        self._proc, self._limits = proc, limits

    def everything(self, about: NodeRead) -> tuple[NodeSurvey, int | Unknown, OpenFiles]:
        """Of one node; and how much space it all takes."""
        around, door = self._around(about), about.node.door
        with self._visiting(about, around) as visit:
            found = survey.survey(visit, about.wants)
        found.subjects = list(identified(found.subjects))
        root = "" if door.pid is None else f"{self._proc}/{door.pid}/root"
        return found, found.size(survey.estimate(found, root)), around.used

    def one(self, ref: Ref, about: NodeRead) -> Subject | Unknown | None:
        """None: it does not exist any more."""
        with self._located(ref, about) as (visit, spot):
            found = self._subject(spot, visit, about.wants) if isinstance(spot, Location) else spot
        return identified([found])[0] if isinstance(found, Subject) else found

    def capture(self, subject: Subject, about: NodeRead) -> Evidence | NothingToCapture | Unknown:
        with self._located(subject.ref, about) as (visit, spot):
            if not isinstance(spot, Location):
                return spot if isinstance(spot, Unknown) else Unknown("it is gone")
            files = self._ends(spot, visit, about.wants)
        return Evidence(files) if files else NothingToCapture("its logs are empty, or it has none")

    def remove(self, fresh: Subject, about: NodeRead, uid: int | None = None) -> ActResult:
        """`uid`: of the user who requests it, if not an admin."""
        with self._located(fresh.ref, about) as (visit, spot):
            if spot is None:
                return Changed("it is gone already")
            if isinstance(spot, Unknown):
                return Changed(spot.why)
            act = NodeRemoval(visit, self._scan, self._everyone, self._works)
            return act.remove(spot, fresh, about.wants, uid)

    @contextmanager
    def _located(self, ref: Ref, about: NodeRead) -> Iterator[tuple[Visit, Location | Unknown | None]]:
        """Open files are read before anything of a session is opened; of a temporary tree nothing is opened while it is
        searched for, and one that is about to be moved is checked after that.
        """
        around = self._around(about)
        if ref.kind != TREE:
            _ = around.used
        with self._visiting(about, around) as visit, locate(visit, ref, about.wants) as spot:
            yield visit, spot

    def _around(self, about: NodeRead) -> MachineSnapshot:
        return MachineSnapshot(about.everyone, self._scan, self._proc)

    def _visiting(self, about: NodeRead, around: MachineSnapshot) -> AbstractContextManager[Visit]:
        until = time.monotonic() + about.timeout.total_seconds()
        return visiting(about.node, around, self._at(), until, self._limits, about.wants.needed)

    def _subject(self, spot: Location, visit: Visit, wants: SurveyOptions) -> Subject | Unknown | None:
        _ = visit.around.used  # before anything of it is opened
        if spot.taken is not None:
            return visit.unfinished_one(spot.folder, spot.taken)
        if spot.session is None:
            return subject_of_tree(spot.folder, spot.name, visit, visit.below(spot.folder))
        if spot.kind == translate.LOGS:
            return survey.logs_of(spot.session, spot.folder, visit, wants)[0]
        state = sessions.standing(spot.session, spot.folder, visit, wants.running_sessions)
        return sessions.subject_of(spot.session, state, spot.folder, visit)

    def _ends(self, spot: Location, visit: Visit, wants: SurveyOptions) -> dict[str, bytes]:
        if spot.kind == translate.LOGS:
            files = survey.logs_to_go(spot.logs, spot.folder, visit, wants)
            return ends_of(spot.logs, frozenset((one.folder, one.name) for one in files))
        with sessions.opened(spot.folder.fd, f"{spot.name}/{sessions.LOGS}") as fd:
            return {} if fd is None else ends_of(fd)

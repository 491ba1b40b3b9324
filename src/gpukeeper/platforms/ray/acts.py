"""Removing what a node left behind: moved to the trash first, checked again, and only then deleted.

The second check covers what only Ray's side shows: does a socket of it answer after all, does a process name it, has
work begun on its node. Blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from gpukeeper.disk import remove, trash
from gpukeeper.disk.measure import printable
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval
from gpukeeper.disk.remove_files import remove_files
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.policy import HOUR
from gpukeeper.model.subject import Category, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import logs, reach, sessions, sockets, translate, trees
from gpukeeper.platforms.ray.finding import Location
from gpukeeper.platforms.ray.nodes import Node
from gpukeeper.platforms.ray.processes import Everyone
from gpukeeper.platforms.ray.survey import SurveyOptions, logs_to_go
from gpukeeper.platforms.ray.visit import Visit, expected, seen_from_here

Scan = Callable[[], OpenFiles]
ActionResult = Accepted | Changed | Refused | Unknown
NOT_THEIRS = Refused(
    "the owners of its files could not be determined, so only an admin may request it; nothing was done"
)
NOT_MEASURED = Refused("it was not measured completely, so nothing was done")


class NodeRemoval:
    """One removal on one node."""

    def __init__(self, visit: Visit, scan: Scan, everyone: Everyone, works: Callable[[Node], str | None]) -> None:
        """`works`: what runs on that node according to the titles of its processes, now."""
        self._visit, self._scan, self._everyone, self._works = visit, scan, everyone, works

    def remove(self, spot: Location, fresh: Subject, wants: SurveyOptions, uid: int | None = None) -> ActionResult:
        if uid is not None and fresh.uids is None:
            return NOT_THEIRS
        trash.sweep(spot.folder.fd)
        if fresh.category is Category.UNFINISHED or spot.taken is not None:
            return self._finish(spot, fresh)
        if spot.kind != fresh.ref.kind:
            return Changed(f"it is a {spot.kind} now")
        if spot.kind == translate.LOGS:
            return self._remove_logs(spot, fresh, wants)
        exactly = expected(fresh, uid)
        if exactly is None:
            return NOT_MEASURED
        needed = self._visit.holds(exactly.identity)
        if needed is not None:
            return Changed(f"it is kept: {needed}")
        if spot.kind == translate.SESSION:
            return self._remove_session(spot, fresh, exactly)
        if trees.has_keep(spot.folder.fd, spot.name):
            return Changed(f"it is kept: {trees.KEPT}")
        return self._remove_tree(spot, exactly)

    def _seen_from(self, spot: Location) -> Scan:
        return lambda: seen_from_here(spot.folder, self._scan())

    def _finish(self, spot: Location, fresh: Subject) -> ActionResult:
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

    def _remove_tree(self, spot: Location, exactly: ExpectedTree) -> ActionResult:
        return answered(
            remove.remove(
                spot.folder.fd,
                spot.name,
                exactly,
                scan=self._seen_from(spot),
                until=self._visit.until,
                still_free=self._check_no_work,
            )
        )

    def _remove_session(self, spot: Location, fresh: Subject, exactly: ExpectedTree) -> ActionResult:
        session = spot.session
        if session is None:
            return Changed("it is not a session any more")
        if not isinstance(fresh.last_used, datetime) or self._visit.at.now - fresh.last_used < HOUR:
            why = f" ({fresh.use_evidence})" if fresh.use_evidence else ""
            return Changed(
                f"it is younger than an hour{why}, and a session that is starting has directories and no processes yet"
            )
        own = {one.pid for one in self._visit.node.processes}

        def still_dead(tree: int) -> str | Unknown | None:
            named = sessions.refers(session, self._everyone(), own, self._visit.around.proc)
            return self._is_reachable(tree) or named or sockets.listener(tree) or sessions.user_files(tree)

        return answered(
            remove.remove(
                spot.folder.fd,
                spot.name,
                exactly,
                scan=self._seen_from(spot),
                until=self._visit.until,
                still_free=still_dead,
                sockets=True,
            )
        )

    def _remove_logs(self, spot: Location, fresh: Subject, wants: SurveyOptions) -> ActionResult:
        files = logs_to_go(spot.logs, spot.folder, self._visit, wants)
        inode = (translate.identity_in(fresh.ref.uid) or (0, 0))[1]
        if translate.logs_incarnation(inode, files) != fresh.seen.incarnation:
            return Changed("the set of logs of ended processes has changed")
        back, removed, kept = 0, 0, []
        for place in logs.FOLDERS:
            some = [
                (one.name, ExpectedTree((one.device, one.inode), one.ctime_ns)) for one in files if one.folder == place
            ]
            with logs.opened(spot.logs, place) as directory:
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

    def _is_reachable(self, tree: int) -> str | None:
        """A container that stops in the meantime takes its files along; after a restart it has other ones."""
        return None if self._visit.node.door.is_open(self._visit.around.proc) else reach.GONE

    def _check_no_work(self, tree: int) -> str | None:
        work = self._works(self._visit.node)
        return self._is_reachable(tree) or (None if work is None else f"work began beside it: {work}")


def answered(answer: TreeRemoval | Changed | Refused | Unknown) -> ActionResult:
    if isinstance(answer, Unknown):
        # Nothing was done, and the reason is known: another read would not add anything.
        return Refused(f"it was not removed: {answer.why}")
    if not isinstance(answer, TreeRemoval):
        return answer
    if answer.left:
        return Refused(f"{answer.entries:,} entries were removed, but not: {'; '.join(answer.left[:3])}")
    return Accepted(answer.bytes_back)

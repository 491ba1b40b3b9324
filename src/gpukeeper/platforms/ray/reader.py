"""Blocking reads of nodes: all of one, one object of it, and acting on that. Each runs in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

from gpukeeper.disk import filesystems
from gpukeeper.disk.measure import MeasureLimits
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Accepted, Changed, Evidence, NothingToCapture, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import capture, finding, sessions, survey, translate, trees
from gpukeeper.platforms.ray.acts import NodeRemoval
from gpukeeper.platforms.ray.finding import Location
from gpukeeper.platforms.ray.nodes import Node
from gpukeeper.platforms.ray.processes import Everyone, Process
from gpukeeper.platforms.ray.survey import NodeSurvey, SurveyOptions
from gpukeeper.platforms.ray.visit import MachineSnapshot, Visit, visiting

NO_LOGS = NothingToCapture("temporary files have no logs, manifest or events of their own")


class NodeReader:
    def __init__(
        self,
        at: Callable[[], translate.PlaceAndTime],
        scan: Callable[[], OpenFiles],
        everyone: Everyone,
        works: Callable[[Node], str | None],
        proc: str,
        limits: MeasureLimits | None,
    ) -> None:
        """`works`: what runs on that node according to the titles of its processes, now."""
        self._at, self._scan, self._everyone, self._works = at, scan, everyone, works
        self._proc, self._limits = proc, limits

    def everything(
        self, node: Node, everyone: tuple[Process, ...], wants: SurveyOptions, timeouts: timedelta
    ) -> tuple[NodeSurvey, int | Unknown, OpenFiles]:
        """Of one node; and how much space it all takes."""
        around = self._around(everyone)
        with self._visiting(node, around, wants, timeouts) as visit:
            found = survey.survey(visit, wants)
        found.subjects = list(filesystems.identified(found.subjects))
        door = "" if node.door.pid is None else f"{self._proc}/{node.door.pid}/root"
        return found, found.size(survey.estimate(found, door)), around.used

    def one(
        self, ref: Ref, node: Node, everyone: tuple[Process, ...], wants: SurveyOptions, timeouts: timedelta
    ) -> Subject | Unknown | None:
        """None: it does not exist any more."""
        with (
            self._visit(ref, node, everyone, wants, timeouts) as visit,
            finding.found(visit, ref, wants) as spot,
        ):
            found = self._subject(spot, visit, wants) if isinstance(spot, Location) else spot
        return filesystems.identified([found])[0] if isinstance(found, Subject) else found

    def capture(
        self, subject: Subject, node: Node, everyone: tuple[Process, ...], wants: SurveyOptions, timeouts: timedelta
    ) -> Evidence | NothingToCapture | Unknown:
        with (
            self._visit(subject.ref, node, everyone, wants, timeouts) as visit,
            finding.found(visit, subject.ref, wants) as spot,
        ):
            if not isinstance(spot, Location):
                return spot if isinstance(spot, Unknown) else Unknown("it is gone")
            files = self._ends(spot, visit, wants)
        return Evidence(files) if files else NothingToCapture("its logs are empty, or it has none")

    def remove(
        self,
        fresh: Subject,
        node: Node,
        everyone: tuple[Process, ...],
        wants: SurveyOptions,
        timeouts: timedelta,
        uid: int | None = None,
    ) -> Accepted | Changed | Refused | Unknown:
        """`uid`: of the user who requests it, if not an admin."""
        with (
            self._visit(fresh.ref, node, everyone, wants, timeouts) as visit,
            finding.found(visit, fresh.ref, wants) as spot,
        ):
            if spot is None:
                return Changed("it is gone already")
            if isinstance(spot, Unknown):
                return Changed(spot.why)
            act = NodeRemoval(visit, self._scan, self._everyone, self._works)
            return act.remove(spot, fresh, wants, uid)

    def _visit(
        self, ref: Ref, node: Node, everyone: tuple[Process, ...], wants: SurveyOptions, timeouts: timedelta
    ) -> AbstractContextManager[Visit]:
        """Open files are read before anything of a session is opened; of a temporary tree nothing is opened while it is
        searched for, and one that is about to be moved is checked after that.
        """
        around = self._around(everyone)
        if ref.kind != translate.TREE:
            _ = around.used
        return self._visiting(node, around, wants, timeouts)

    def _around(self, everyone: tuple[Process, ...]) -> MachineSnapshot:
        return MachineSnapshot(everyone, self._scan, self._proc)

    def _visiting(
        self, node: Node, around: MachineSnapshot, wants: SurveyOptions, timeouts: timedelta
    ) -> AbstractContextManager[Visit]:
        until = time.monotonic() + timeouts.total_seconds()
        return visiting(node, around, self._at(), until, self._limits, wants.needed)

    def _subject(self, spot: Location, visit: Visit, wants: SurveyOptions) -> Subject | Unknown | None:
        _ = visit.around.used  # before anything of it is opened
        if spot.taken is not None:
            return visit.unfinished_one(spot.folder, spot.taken)
        if spot.session is None:
            return trees.subject_of(spot.folder, spot.name, visit, visit.below(spot.folder))
        if spot.kind == translate.LOGS:
            return survey.logs_of(spot.session, spot.folder, visit, wants)[0]
        state = sessions.standing(spot.session, spot.folder, visit, wants.running_sessions)
        return sessions.subject_of(spot.session, state, spot.folder, visit)

    def _ends(self, spot: Location, visit: Visit, wants: SurveyOptions) -> dict[str, bytes]:
        if spot.kind == translate.LOGS:
            files = survey.logs_to_go(spot.logs, spot.folder, visit, wants)
            return capture.ends_of(spot.logs, frozenset((one.folder, one.name) for one in files))
        with survey.opened_logs(spot.folder, spot.name) as fd:
            return {} if fd is None else capture.ends_of(fd)

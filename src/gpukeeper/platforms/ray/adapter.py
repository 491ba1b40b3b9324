"""The Ray nodes of this machine as a platform: what ended work left on them, and whether work runs there now.

Read from outside, through /proc: nothing is run in a node, and Ray need not be installed here. The temporary trees of
this machine's own roots are listed here only if the policy does not assign them to the host platform.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec

from gpukeeper.blocking import A_MOMENT, in_thread
from gpukeeper.disk import open_files
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import UNDER_WAY
from gpukeeper.disk.tree import PlaceAndTime, UnderWay, together
from gpukeeper.engine.ports import Platform, Shared, SharedQuestion
from gpukeeper.model.decision import (
    Accepted,
    Action,
    ActResult,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
    too_slow,
)
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Category, Cause, Diagnosis, Gone, Ref, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.ray import translate
from gpukeeper.platforms.ray.acts import NO_LOGS, NodeRead, NodeReader
from gpukeeper.platforms.ray.nodes import GONE, Node, NodeAccess, is_found_by_raylet, read_processes
from gpukeeper.platforms.ray.settings import (
    NODES_ARE_SHOWN,
    NOT_BROUGHT_BACK,
    Containers,
    Counted,
    no_containers,
    settings_of,
)
from gpukeeper.platforms.ray.state import DashboardQueries, Idleness, Load
from gpukeeper.platforms.ray.survey import DEFAULT_ACCESS, DiscoveredNodes, Discovery, NodesAccess, NodeSurvey

PAGE = 500
AT_ONCE = 100  # concurrent removals for which open files and processes are read together
HELD = 1_000_000_000  # bytes of deleted files held open, from which on they are reported
NOT_SUMMED = Unknown("the other trees of its node were not measured yet")
LOGS = "logs"  # the policy's name for this kind of evidence
T = TypeVar("T")


class RayPlatform(Platform):
    name, local = translate.PLATFORM, True
    guards: Mapping[Action, Guard] = {Action.REMOVE: Guard.ATOMIC}

    def __init__(
        self,
        place: str,
        policy: Policy,
        clock: Clock,
        containers: Containers = no_containers,
        *,
        environ: Mapping[str, str] = os.environ,
        directories: Sequence[str] = (),
        access: NodesAccess = DEFAULT_ACCESS,
    ) -> None:
        """`directories`: those of gpukeeper itself, which no removal may include."""
        self._place, self._clock = place, clock
        self._timeouts, proc = access.timeouts, access.proc
        # Many steps may be in progress at once, and each of them reads several times.
        files = Shared(access.scan or (lambda: self._scan(proc)))
        read = Shared(access.everyone or (lambda: read_processes(proc)))
        shared = msgspec.structs.replace(access, everyone=read)
        self._discovery = Discovery(place, policy, containers, environ, access=shared, directories=directories)
        self._idleness = Idleness(environ, read, proc, self._timeouts)
        works = Shared(self._query_work)
        self._reader = NodeReader(
            self._at, files, read, lambda node: works(node.name, node.uid, node.door), proc, access.limits
        )
        self._around: SharedQuestion[DiscoveredNodes] = SharedQuestion(self._discovery.discover)
        self._load_of: SharedQuestion[Load] = SharedQuestion(self._query_load)
        self._speaking: SharedQuestion[dict[str, str]] = SharedQuestion(self._query_dashboards)
        self._together: dict[str, int | Unknown] = {}  # by node, of the last observe
        self._under_way = UnderWay()

    @property
    def place(self) -> str:
        return self._place

    def at_once(self, kind: str) -> int:
        return AT_ONCE

    def follow(self, policy: Policy) -> None:
        """Of a policy that changed."""
        self._discovery.policy = policy

    async def busy_here(self, root: str) -> str | Unknown | None:
        """What work of Ray runs on this machine itself and may need the temporary files below that root; None: none."""
        if not _is_one_of(root, settings_of(self._policy).roots):
            return None
        try:
            here = await self._discover()
            machine = next((one for one in here.found.nodes if one.is_machine), None)
            if machine is None or not machine.raylets:
                return None
            return (await self._load_of(machine.name, machine.uid)).busy
        except PlatformError as problem:
            return Unknown(str(problem))

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        """Node by node, after one wait for all of them: their load is measured over a while."""
        if not any(fnmatch.fnmatchcase(self._place, pattern) for pattern in scope.places):
            return
        settings = settings_of(self._policy)
        here = await self._discover()
        yield self._page((), here.found.unseen)
        self._idleness.begin(here.everyone, settings.window)
        queries = self._idleness.queries(settings)
        running_sessions = await self._running_sessions(here, queries)
        surveyed = [(node, await self._survey(node, here, running_sessions)) for node in here.found.nodes]
        if surveyed:
            await self._idleness.measure(settings.window)
        known: set[str] = set()
        for node, found in surveyed:
            if isinstance(found, Unseen):
                yield self._page((), (found,))
                continue
            # Read again: measuring took a while, and work may have begun.
            load = await self._idleness.of(node, self._idleness.queries(settings), settings)
            for page in self._pages(node, found, load, queries, known):
                yield page

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        try:
            return await self._read(ref)
        except PlatformError as problem:
            return Unknown(str(problem))

    async def _read(self, ref: Ref) -> Subject | Gone | Unknown:
        here = await self._discover()
        if ref.kind == translate.NODE:
            return await self._read_node(ref, here)
        if ref.kind == translate.DISK:
            return await self._read_disk(ref, here)
        node = here.node(ref.namespace)
        if node is None:
            return await self._find_on_other_nodes(ref, here)
        running_sessions = await self._speaking() if ref.kind == translate.SESSION else {}
        found = await self._one(ref, node, here, running_sessions)
        if found is None:
            return Gone(ref, self._clock.now())
        if isinstance(found, Unknown) or found.category is not Category.TEMPORARY:
            return found
        return self._beside(found, node, await self._load_of(node.name, node.uid))

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return Unknown("the processes of Ray do not carry the id of a workload")

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        if subject.ref.kind not in {translate.SESSION, translate.LOGS} or subject.category is Category.UNFINISHED:
            return NO_LOGS
        if LOGS not in what:
            return NothingToCapture("the policy does not capture logs")
        here = await self._discover()
        node = here.node(subject.ref.namespace)
        if node is None:
            return Unknown(f"{subject.ref.namespace} is not available now")
        about = self._about(node, here, self._timeouts.tree)
        return await self._in_thread(lambda: self._reader.capture(subject, about), about.timeout, subject.ref.name)

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        if fresh.shape is not Shape.TREE:
            return NODES_ARE_SHOWN
        if step.decision.action is not Action.REMOVE:
            return Refused(f"a {fresh.ref.kind} can only be removed")
        here = await self._discover()
        node = here.node(fresh.ref.namespace)
        if node is None:
            return Changed(f"{fresh.ref.namespace} does not exist any more")
        about = self._about(node, here, self._timeouts.removal)
        if not self._under_way.claim(fresh.ref.uid):
            return UNDER_WAY

        def work() -> ActResult:
            with self._under_way.ending(fresh.ref.uid):
                try:
                    return self._reader.remove(fresh, about, step.uid)
                except FileNotFoundError:
                    return Changed(GONE)

        return await self._in_thread(work, about.timeout, fresh.ref.name)

    async def diagnose(self, ref: Ref) -> Diagnosis | Unknown:
        """Which process, socket or work keeps it."""
        found = await self.read(ref)
        if not isinstance(found, Subject):
            return Diagnosis() if isinstance(found, Gone) else found
        causes = [Cause(words) for words in (found.labels.get("kept_by"), found.kept) if words]
        if isinstance(found.busy, str):
            causes.append(Cause(f"work runs on {ref.namespace or ref.name}: {found.busy}"))
        causes += [Cause(fact.why) for fact in (found.in_use, found.busy) if isinstance(fact, Unknown)]
        return Diagnosis(tree=(ref.path,), causes=tuple(causes))

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        return NOT_BROUGHT_BACK

    def _query_work(self, name: str, uid: str, door: NodeAccess) -> str | None:
        now = self._discovery.again(name, uid, door)
        return None if now is None else self._idleness.works(now)

    def _scan(self, proc: str) -> OpenFiles:
        return open_files.scan(proc, unreadable=self._policy.disk.unreadable)

    @property
    def _policy(self) -> Policy:
        return self._discovery.policy

    async def _discover(self) -> DiscoveredNodes:
        try:
            return await self._around()
        except TimeoutError:
            raise PlatformError(f"the processes of {self._place} could not be listed in time") from None
        except OSError as error:
            raise PlatformError(f"the processes of {self._place} could not be listed: {error.strerror}") from error

    async def _running_sessions(self, here: DiscoveredNodes, queries: DashboardQueries) -> dict[str, str]:
        """Sessions that a dashboard reports as running, each with a sentence."""
        await queries.find(raylet for node in here.found.nodes for raylet in node.raylets)
        return {session: f"Ray at {one.api.address} runs it" for session, one in queries.answered().items()}

    async def _survey(
        self, node: Node, here: DiscoveredNodes, running_sessions: Mapping[str, str]
    ) -> tuple[NodeSurvey, int | Unknown, OpenFiles] | Unseen:
        about = self._about(node, here, self._timeouts.node, running_sessions)
        found = await self._in_thread(lambda: self._reader.everything(about), about.timeout, node.name)
        return Unseen(node.name, found.why) if isinstance(found, Unknown) else found

    async def _one(
        self, ref: Ref, node: Node, here: DiscoveredNodes, running_sessions: Mapping[str, str]
    ) -> Subject | Unknown | None:
        about = self._about(node, here, self._timeouts.tree, running_sessions)
        return await self._in_thread(lambda: self._reader.one(ref, about), about.timeout, ref.name)

    def _about(
        self,
        node: Node,
        here: DiscoveredNodes,
        timeout: timedelta,
        running_sessions: Mapping[str, str] | None = None,
    ) -> NodeRead:
        return NodeRead(node, here.everyone, self._discovery.wants(node, running_sessions), timeout)

    async def _query_dashboards(self) -> dict[str, str]:
        return await self._running_sessions(await self._discover(), self._idleness.queries(settings_of(self._policy)))

    async def _query_load(self, name: str, uid: str) -> Load:
        """What Ray and the processes of that node report now; CPU time as of this pass."""
        here = await self._discover()
        node = here.node(name)
        if node is None or node.uid != uid:
            gone = Unknown(f"{name} does not exist any more")
            return Load(gone, gone)
        settings = settings_of(self._policy)
        self._idleness.begin(here.everyone, settings.window)
        await self._idleness.measure(settings.window)
        return await self._idleness.of(node, self._idleness.queries(settings), settings)

    async def _read_node(self, ref: Ref, here: DiscoveredNodes) -> Subject | Gone | Unknown:
        node = next((one for one in here.found.nodes if one.uid == ref.uid), None)
        if node is None:
            listed = here.listed and ref.name not in here.found.asleep
            return Gone(ref, self._clock.now()) if listed else Unknown(f"{ref.name} is not running now")
        queries = self._idleness.queries(settings_of(self._policy))
        found = await self._survey(node, here, await self._running_sessions(here, queries))
        if isinstance(found, Unseen):
            return Unknown(found.why)
        return self._node(node, found, await self._load_of(node.name, node.uid), queries)

    async def _read_disk(self, ref: Ref, here: DiscoveredNodes) -> Subject | Gone | Unknown:
        node = here.node(ref.namespace)
        if node is None:
            return Unknown(f"{ref.namespace} is not available now")
        found = await self._survey(node, here, {})
        if isinstance(found, Unseen):
            return Unknown(found.why)
        return next(
            (one for one in self._disks(node, found[0]) if one.ref.uid == ref.uid), Gone(ref, self._clock.now())
        )

    async def _find_on_other_nodes(self, ref: Ref, here: DiscoveredNodes) -> Gone | Unknown:
        """Its node does not exist under that name. Gone only if every node was read, and it is on none; a node that was
        found by its raylet may exist without one.
        """
        for node in here.found.nodes:
            found = await self._one(ref, node, here, {})
            if isinstance(found, Subject):
                return Unknown(f"it is on {node.name} now")
        if not here.listed or here.found.asleep or here.found.unseen or is_found_by_raylet(ref.namespace):
            return Unknown(f"{ref.namespace} is not available now, so its files cannot be read")
        return Gone(ref, self._clock.now())

    def _pages(
        self,
        node: Node,
        found: tuple[NodeSurvey, int | Unknown, OpenFiles],
        load: Load,
        queries: DashboardQueries,
        known: set[str],
    ) -> Iterator[Snapshot]:
        """`known`: a directory that two nodes share is shown once."""
        surveyed = found[0]
        mine = [one for one in surveyed.subjects if one.ref.uid not in known]
        known.update(one.ref.uid for one in mine)
        named = together(one for one in mine if one.category is Category.TEMPORARY)
        self._together[node.name] = found[1] if settings_of(self._policy).above_counts is Counted.ALL else named
        subjects = [self._beside(one, node, load) for one in mine]
        yield self._page([self._node(node, found, load, queries), *self._disks(node, surveyed)], surveyed.unseen)
        for start in range(0, len(subjects), PAGE):
            yield self._page(subjects[start : start + PAGE])

    def _disks(self, node: Node, surveyed: NodeSurvey) -> list[Subject]:
        """Of the other roots: the disk of the first one is reported with the node."""
        at = msgspec.structs.replace(self._at(), node=node.name)
        others = list(surveyed.disks.items())[1:]
        facts = (translate.NodeDisk(f"{node.uid}:{device}", one.disk, one.size, one.free) for device, one in others)
        return [translate.disk_subject(one, at) for one in facts]

    def _beside(self, subject: Subject, node: Node, load: Load) -> Subject:
        """A temporary tree may be needed by work on its node; what has provably ended is not."""
        if subject.category is not Category.TEMPORARY:
            return subject
        together = self._together.get(node.name, NOT_SUMMED)
        return msgspec.structs.replace(subject, busy=load.busy, together=together)

    def _node(
        self, node: Node, found: tuple[NodeSurvey, int | Unknown, OpenFiles], load: Load, queries: DashboardQueries
    ) -> Subject:
        surveyed, size, used = found
        directory = surveyed.folder
        answered = {one.session_name: queries.answered().get(one.session_name) for one in node.raylets}
        boards = [one for one in answered.values() if one is not None]
        facts = translate.NodeFacts(
            name=node.name,
            uid=node.uid,
            incarnation=f"{node.door.pid or 0}@{node.door.starttime}",
            size=size,
            busy=load.busy,
            disk=None if directory is None else directory.disk,
            disk_size=None if directory is None else directory.size,
            disk_free=None if directory is None else directory.free,
            live=surveyed.live,
            dead=surveyed.dead,
            cpu=load.cpu,
            versions=tuple(sorted({one.version for one in boards})),
            addresses=tuple(sorted({one.api.address for one in boards})),
            sessions=tuple(sorted(answered)),
            findings=(
                *surveyed.findings,
                *self._complaints(node, load, directory is not None and directory.disk.full, used),
            ),
        )
        return translate.node_subject(facts, self._at())

    def _complaints(self, node: Node, load: Load, full: float, used: OpenFiles) -> Iterator[str]:
        if isinstance(load.busy, Unknown):
            yield f"whether work runs on it is unknown: {load.busy.why}"
        if full >= self._policy.disk.high:
            yield f"its disk is {full:.0%} full, allowed {self._policy.disk.high:.0%}"
        held = open_files.held_open(used)
        pids = {one.pid: one.comm for one in node.processes}
        for pid, size in ({} if isinstance(held, Unknown) else held).items():
            if pid in pids and size >= HELD:
                yield f"{size_in_words(size)} are used by deleted files that pid {pid} ({pids[pid]}) still has open"

    async def _in_thread(self, work: Callable[[], T], deadline: timedelta, what: str) -> T | Unknown:
        try:
            return await in_thread(work, deadline + A_MOMENT)
        except TimeoutError:
            return Unknown(too_slow(what, deadline).why)
        except OSError as error:
            return Unknown(f"it could not be read: {error.strerror or error}")

    def _page(self, subjects: Sequence[Subject], unseen: Sequence[Unseen] = ()) -> Snapshot:
        return Snapshot(self.name, self._place, self._clock.now(), tuple(subjects), tuple(unseen))

    def _at(self) -> PlaceAndTime:
        return PlaceAndTime(self.name, self._place, self._clock.now())


def _is_one_of(root: str, roots: Sequence[str]) -> bool:
    return os.path.realpath(root) in {os.path.realpath(one) for one in roots}

"""One cluster as a platform. Every action carries the uid and resourceVersion of the object that was read, so that the
API server refuses it after a change: all actions are ATOMIC. Only roots are acted on, together with what they own.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import PartialMetadata, Pod, Root, when
from gpukeeper.engine.ports import Platform
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
)
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import AtFinish, PlaceScope, Policy
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Diagnosis, Gone, Ref, Shape, Subject, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import diagnose, translate
from gpukeeper.platforms.kubernetes.acts import Annotations, ClusterActions, EventWriter
from gpukeeper.platforms.kubernetes.capture import Archive, EvidenceCapture
from gpukeeper.platforms.kubernetes.diagnose import Controllers
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery, ServerClock
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES
from gpukeeper.platforms.kubernetes.meter import RunningPod
from gpukeeper.platforms.kubernetes.objects import Bulk, ListPosition, ObjectReader, ReadObject
from gpukeeper.platforms.kubernetes.owners import ONE, OtherOwners
from gpukeeper.platforms.kubernetes.settings import settings_of
from gpukeeper.platforms.kubernetes.walk import (
    ONLY_REPORTED,
    SERVICE,
    ClusterWalk,
    Service,
    WalkSettings,
    absent,
    read_service,
    service_subject,
    services_of_runs,
)
from gpukeeper.platforms.kubernetes.watch import PendingRemovals, Watches
from gpukeeper.platforms.kubernetes.writes import cannot_remove

STUCK_MAX = 20  # in one full pass


class KubernetesPlatform(Platform):
    name = translate.PLATFORM
    precise = tidies = True
    guards: Mapping[Action, Guard] = {
        Action.STOP: Guard.ATOMIC,
        Action.TRIM: Guard.ATOMIC,
        Action.REMOVE: Guard.ATOMIC,
        Action.RELEASE: Guard.ATOMIC,
    }

    def __init__(self, cluster: Cluster, clock: Clock, policy: Policy) -> None:
        self._cluster, self._clock = cluster, clock
        self._discovery = ApiDiscovery(cluster)
        self._owners = OtherOwners(cluster, self._discovery)
        served = self._discovery.served
        self._actions, self._captures, self._archive = (
            ClusterActions(cluster, served),
            EvidenceCapture(cluster, served),
            Archive(cluster, served),
        )
        self._annotations = Annotations(cluster, served)
        self._bulk = Bulk(cluster, served)
        self._controllers = Controllers(cluster)
        self._events = EventWriter(cluster, clock)
        self._server_clock = ServerClock(cluster, clock)
        self._removals = PendingRemovals(cluster, clock)
        self._reader = ObjectReader(
            cluster,
            self._server_clock,
            self._discovery,
            self._owners,
            self._controllers,
            self._bulk,
            self._removals,
        )
        self._watches = Watches(cluster, self._discovery, cluster.place, self._removals.report_deleted)
        self.follow(policy)

    def follow(self, policy: Policy) -> None:
        """Use a changed policy."""
        self._policy = policy
        self._reader.follow(policy)

    @property
    def place(self) -> str:
        return self._cluster.place

    def at_once(self, kind: str) -> int:
        return 8

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        if not any(fnmatch.fnmatchcase(self.place, pattern) for pattern in scope.places):
            return
        async with self._cluster.opened():
            await self._cluster.get("/version", msgspec.Raw)  # is it there, and what time does it have?
            self._server_clock.check()
            walk = ClusterWalk(
                self._cluster, self._discovery, self._wanted(scope), self._server_clock.at(), self._owners
            )
            stuck = 0
            async for subjects, sources in walk.pages():
                for number, source in enumerate(sources):
                    if self._reader.is_stuck(source) and stuck < STUCK_MAX:
                        stuck += 1
                        subjects[number] = await self._reader.with_block(subjects[number], source, None)
                self._reader.holders.update(walk.holders)  # needed to measure this page
                yield self._page([self._server_clock.by_ours(one) for one in subjects])
            left = [one async for one in self._remnants(scope)] if walk.saw_pods else []
            yield self._page(left, walk.unseen)
            self._watches.parts, self._reader.dependents = walk.parts, walk.dependents
            self._reader.holders = walk.holders

    def running_pods(self, subject: Subject) -> Mapping[str, RunningPod]:
        """By name: those that hold its GPUs, for the meter. Names are reused, uids are not."""
        kind = BY_NAME.get(subject.ref.kind)
        if kind is not None and not kind.children:  # a pod of its own
            return {subject.ref.name: RunningPod(subject.ref.uid, _known(subject.started))}
        held = self._reader.holders.get(subject.ref.uid, [])
        return {name: RunningPod(uid, _known(when(started))) for name, uid, started in held}

    async def wake(self) -> AsyncIterator[Ref | None]:
        scope = self._policy.scope.get(self.name)
        if scope is None:
            return
        async with self._cluster.opened():
            self._removals.watching = True
            try:
                async for hint in self._watches.hints(self._wanted(scope)):
                    yield hint
            finally:
                self._removals.watching = False

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.kind == SERVICE.name:
            return await self._read_remnant(ref)
        kind = BY_NAME.get(ref.kind)
        if kind is None:
            return Unknown(f"gpukeeper does not support the kind {ref.kind}")
        async with self._cluster.opened():
            try:
                if await self._removals.deletion_reported(ref):
                    return await self._reader.after_removal(ref)
                return await self._reader.read(kind, ref)
            except PlatformError as problem:
                return Unknown(str(problem))

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return Unknown("the processes of a cluster are not on this machine")

    async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
        """A watch's report of a deletion, or else a list of the kind that does not contain the uid."""
        now = self._clock.now()
        followed = {ref.uid: ref for ref in refs if self._removals.follows(ref.uid)}
        others = [ref for ref in refs if ref.uid not in followed]
        announced = [ref for ref in others if self._removals.reported_gone(ref.uid)]
        remaining = [ref for ref in others if not self._removals.reported_gone(ref.uid)]
        scope = self._policy.scope.get(self.name)
        async with self._cluster.opened():
            everywhere = scope is not None and self._wanted(scope).named is None
            found = await absent(self._cluster, self._discovery.served, remaining, everywhere=everywhere)
            removed = await super().gone(list(followed.values()))  # what it had running may still need its grace
        return [*removed, *(Gone(ref, now, announced=True) for ref in announced), *(Gone(ref, now) for ref in found)]

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        if subject.shape is Shape.REMNANT:
            return Unknown(ONLY_REPORTED)
        kind, last_read = BY_NAME[subject.ref.kind], self._reader.last.get(subject.ref.uid)
        async with self._cluster.opened():
            if last_read is None:
                found = await self.read(subject.ref)
                if isinstance(found, Unknown):
                    return found
                last_read = self._reader.last.get(subject.ref.uid)
            if last_read is None:
                return NothingToCapture("it no longer exists")
            pods = (last_read.source,) if isinstance(last_read.source, Pod) else last_read.pods
            read = await self._bulk.current(subject.ref.uid)
            return await self._captures.capture(kind, subject.ref, what, pods, read)

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        if fresh.shape is Shape.REMNANT:
            return Refused(ONLY_REPORTED)
        kind, ref, action = BY_NAME[fresh.ref.kind], fresh.ref, step.decision.action
        async with self._cluster.opened():
            self._bulk.forget(ref.uid)  # from here on, only fresh reads count
            last_read = self._reader.last.get(ref.uid)
            if last_read is None or last_read.subject.seen.version != fresh.seen.version:
                found = await self.read(ref)
                if isinstance(found, Unknown):
                    return found
                last_read = self._reader.last.get(ref.uid)
                if isinstance(found, Gone) or last_read is None:
                    return Changed("it is already gone")
                if last_read.subject.seen.version != fresh.seen.version:
                    return Changed("it changed since it was read")
            try:
                answer = await self._act(kind, action, fresh, last_read)
            except ApiError as error:
                answer = Refused(str(error)) if error.is_denied else Unknown(str(error))
            except PlatformError as problem:
                answer = Unknown(str(problem))
            if isinstance(answer, Accepted):
                await self._write_event(kind, step, fresh)
            return answer

    @asynccontextmanager
    async def batch(self, refs: Sequence[Ref]) -> AsyncIterator[None]:
        """Lists instead of a request for each object, and one watch that reports deletions."""
        async with self._cluster.opened():
            listed = await self._bulk.read(refs, events="events" in self._policy.capture.what)
            watching = [asyncio.create_task(self._watch_deletions(one)) for one in listed]
            self._removals.batched = {ref.uid for ref in refs if self._bulk.get(ref.uid) is not None}
            try:
                yield
            finally:
                self._removals.batched = set()
                self._bulk.forget(*(ref.uid for ref in refs))
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)

    async def _watch_deletions(self, listed: ListPosition) -> None:
        """During the removal. If the watch ends early, each removal is verified separately."""
        with suppress(PlatformError):
            async with aclosing(
                self._cluster.watch(listed.path, listed.version, PartialMetadata, accept=ONE)
            ) as events:
                async for event in events:
                    if event.type == "DELETED":
                        self._removals.report_deleted(event.object.metadata.uid)

    async def _act(self, kind: Kind, action: Action, fresh: Subject, last_read: ReadObject) -> ActResult:
        living = tuple(one for one in last_read.pods if one.status.phase not in OVER_PHASES)
        match action:
            case Action.REMOVE:
                problem = cannot_remove(kind, last_read.source)
                if problem is not None:
                    return problem
                self._removals.remember(fresh, living)
                return await self._actions.remove(kind, fresh, lambda: self._read_again(fresh, last_read))
            case Action.STOP:
                if kind.evicted:
                    self._removals.remember(fresh, living)
                return await self._actions.stop(
                    kind, fresh, last_read.source, lambda: self._read_again(fresh, last_read)
                )
            case Action.TRIM if isinstance(last_read.source, Root):
                foreign = await self._why_not_trimmed(last_read)
                if foreign is not None:
                    return foreign
                everything = self._policy.at_finish is AtFinish.ALL
                return await self._actions.trim(kind, fresh, last_read.source, last_read.pods, everything=everything)
            case Action.RELEASE if fresh.blocked is not None:
                return await self._actions.release(kind, fresh, last_read.source, fresh.blocked.by)
            case _:
                return Refused(f"a {kind.kind} does not support {action}")

    async def _why_not_trimmed(self, last_read: ReadObject) -> Refused | Unknown | None:
        """A pod below it that it does not control, or that another owner keeps, must not be ended."""
        for pod in last_read.pods:
            name = f"pod {pod.metadata.name}"
            if pod.metadata.owner is None:
                return Refused(f"{name} names it as an owner but has no controller; remove that ownerReference")
            needed = await self._owners.keeping(pod.metadata)
            if needed is not None:
                return Unknown(f"{name}: {needed.why}") if isinstance(needed, Unknown) else Refused(f"{name}: {needed}")
        return None

    async def _read_again(self, fresh: Subject, before: ReadObject) -> Subject | Gone | Changed | Unknown:
        """After a conflict. Another generation means another spec, even if the status does not show it yet."""
        found = await self.read(fresh.ref)
        now = self._reader.last.get(fresh.ref.uid)
        if not isinstance(found, Subject) or now is None:
            return found
        same = now.source.metadata.generation == before.source.metadata.generation
        return found if same else Changed("its spec changed since it was read")

    async def announce(self, subject: Subject, message: str, warned: Warned) -> None:
        """As an Event and an annotation. Neither proves that it was read: nobody counts as notified here."""
        await self._write(subject.ref, "WillBeReclaimed", message, warning=True)
        async with self._cluster.opened():
            await self._annotations.warn(subject.ref, subject.marks.warned, warned)

    async def hold(self, subject: Subject, until: datetime | None) -> Accepted | Refused | Unknown:
        if subject.shape is Shape.REMNANT:
            return Refused(ONLY_REPORTED)
        async with self._cluster.opened():
            return await self._annotations.hold(subject.ref, until)

    async def parts(self, words: str) -> Sequence[Ref]:
        """By kind and name, as in jobset/run-7, in the namespaces of the policy."""
        kind_name, _, name = words.strip("/").rpartition("/")
        kind, scope = BY_NAME.get(kind_name.rpartition("/")[2].lower()), self._policy.scope.get(self.name)
        if kind is None or scope is None or not name:
            return ()
        wanted, found = self._wanted(scope), []
        async with self._cluster.opened():
            version = await self._discovery.served(kind)
            if not isinstance(version, str):
                return ()
            for namespace in wanted.named or (None,):
                path, selector = kind.path(version, namespace), f"metadata.name={name}"
                async for page in self._cluster.pages(path, PartialMetadata, fieldSelector=selector):
                    found += [self._server_clock.at().ref(kind, one.metadata) for one in page.items]
        return [ref for ref in found if wanted.covers(ref.namespace) and ref.ends_with(words)]

    async def diagnose(self, ref: Ref) -> Diagnosis | Unknown:
        async with self._cluster.opened():
            try:
                return await diagnose.diagnose(
                    self._cluster, self._discovery.served, ref, self._server_clock.at().now, self._controllers
                )
            except PlatformError as problem:
                return Unknown(str(problem))

    async def revert_stop(self, ref: Ref, evidence: Evidence) -> None:
        async with self._cluster.opened():
            try:
                await self._actions.revert_stop(BY_NAME[ref.kind], ref)
            except PlatformError:
                return  # a later pass finds the note, which is still correct

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        kind = BY_NAME.get(ref.kind)
        if kind is None:
            return Refused(f"gpukeeper does not support the kind {ref.kind}")
        async with self._cluster.opened():
            answer = await self._archive.restore_object(kind, ref, evidence)
            if isinstance(answer, Accepted):
                await self._write(ref, "Restored", "restored by gpukeeper")
            return answer

    # Helpers

    async def _remnants(self, scope: PlaceScope) -> AsyncIterator[Subject]:
        async for one in services_of_runs(self._cluster, self._wanted(scope), self._server_clock.at().now):
            yield await self._remnant(one)

    async def _read_remnant(self, ref: Ref) -> Subject | Gone | Unknown:
        async with self._cluster.opened():
            found = await read_service(self._cluster, ref, self._server_clock.at().now)
            return await self._remnant(found) if isinstance(found, Service) else found

    async def _remnant(self, one: Service) -> Subject:
        namespace = await self._reader.namespace(one.metadata.namespace)
        return service_subject(one, namespace, self._server_clock.at(), self._reader.reading)

    async def _write_event(self, kind: Kind, step: Step, fresh: Subject) -> None:
        """On the object, if it remains; removals are in the ledger."""
        words = {Action.STOP: "Stopped", Action.TRIM: "Trimmed", Action.RELEASE: "Released"}.get(step.decision.action)
        if words is not None and not kind.evicted:  # what was evicted is gone
            await self._write(fresh.ref, words, step.decision.reason)

    async def _write(self, ref: Ref, reason: str, words: str, *, warning: bool = False) -> None:
        kind = BY_NAME[ref.kind]
        async with self._cluster.opened():
            version = await self._discovery.served(kind)
            if isinstance(version, str):
                await self._events.write(kind, version, ref, reason, words, warning=warning)

    def _wanted(self, scope: PlaceScope) -> WalkSettings:
        settings = settings_of(self._policy)
        return WalkSettings(
            scope.namespaces,
            settings.environments,
            self._reader.reading,
            settings.page,
            count_dead=self._policy.at_finish is AtFinish.ALL,
        )

    def _page(self, subjects: Sequence[Subject], unseen: Sequence[Unseen] = ()) -> Snapshot:
        return Snapshot(self.name, self.place, self._clock.now(), tuple(subjects), tuple(unseen))


def _known(at: datetime | Unknown | None) -> datetime | None:
    return at if isinstance(at, datetime) else None

"""One Docker host as a platform. Objects are keyed by full id; every call has a timeout; a stuck container does not
block others.

A stop is LOOKED (the engine has no conditional stop). A removal is NOT_RUNNING: not forced, so that the engine refuses
to remove a running container; it does not refuse one that ran and ended since our read. An orphan is signalled through
a pidfd, which can only refer to the process that was read.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.docker import SLOW, ContainerSummary, Engine, Inspected
from gpukeeper.devices.counters import processes_of
from gpukeeper.devices.holders import Holder
from gpukeeper.engine.ports import Platform
from gpukeeper.model.decision import (
    Accepted,
    Action,
    ActResult,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
)
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.ports import Clock, StorageBytes
from gpukeeper.model.subject import Gone, Ref, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.terminals import notify_inside
from gpukeeper.platforms.docker import translate
from gpukeeper.platforms.docker.acts import ContainerActions, Orphans
from gpukeeper.platforms.docker.capture import ContainerCapture
from gpukeeper.platforms.docker.host_facts import HostInspector, HostSnapshot, Inventory, belongs, holders_of
from gpukeeper.platforms.docker.leftovers import Attachments, Leftovers, LogWatch, read_storage
from gpukeeper.platforms.docker.owners import UserDirectory
from gpukeeper.platforms.docker.records import FILTERS, Records

PAGE = 200
RECONCILE = timedelta(seconds=60)
RECONNECT = (1.0, 5.0, 15.0, 60.0)  # seconds between attempts to read the events again
TELLING = timedelta(seconds=5)
NO_POLICY = Policy()


class DockerPlatform(Platform):
    name = translate.PLATFORM
    guards: Mapping[Action, Guard] = {Action.STOP: Guard.LOOKED, Action.REMOVE: Guard.NOT_RUNNING}

    def __init__(
        self,
        engine: Engine,
        place: str,
        clock: Clock,
        inventory: Inventory,
        policy: Policy = NO_POLICY,
        *,
        proc: str = "/proc",
    ) -> None:
        self._engine, self._place, self._clock, self._proc = engine, place, clock, proc
        self.records = Records(engine)
        self._around = HostInspector(
            self.records,
            inventory,
            local=engine.local,
            directory=UserDirectory(clock),
            trusted_labels=policy.owner_labels,
            keep_alive=policy.keep_alive,
            proc=proc,
        )
        self._logs = LogWatch()
        self._captures = ContainerCapture(engine, clock)
        self._leftovers = Leftovers(self.records, engine, clock, self._at, policy)
        self._attachments = Attachments(self.records, engine, self._at, policy)
        self._acts = ContainerActions(engine, self.records, self._holders)
        self._orphans = Orphans(self.records, self._around, clock, self._at, proc)

    @property
    def place(self) -> str:
        return self._place

    @property
    def local(self) -> bool:
        """Whether the engine runs on this machine, so that its containers can be measured here."""
        return self._engine.local

    def follow(self, policy: Policy) -> None:
        """A label that is no longer trusted has no effect any more."""
        self._around.follow(policy.owner_labels, policy.keep_alive)
        self._leftovers.follow(policy)
        self._attachments.follow(policy)

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        if not any(fnmatch.fnmatchcase(self._place, pattern) for pattern in scope.places):
            return
        async with self._engine.opened():
            # The machine first: a process of a container that starts in between must not look orphaned.
            around = await self._around.snapshot()
            containers, unseen = await self.records.refresh()
            containers = await self._captures.sized(containers)
            if self._engine.local:
                await self._logs.look(containers, self._clock.now())
            yield self._page((), unseen)
            for start in range(0, len(containers), PAGE):
                page = containers[start : start + PAGE]
                await self._around.peek(page, around)
                subjects = [await self._subject(one, around) for one in page]
                yield self._page(subjects)
            yield self._page(self._orphans.find(around, containers))
            yield self._page(*await self._leftovers.observe(self.records.images_in_use()))
            yield self._page(*await self._attachments.observe())

    async def wake(self) -> AsyncIterator[Ref | None]:
        """On every relevant event, and once a minute: a listing finds what no event reported."""
        tries = 0
        while True:
            try:
                async with self._engine.opened():
                    first = True  # comes before any event was read, so it proves nothing
                    async for hint in self._read_events():
                        tries, first = tries if first else 0, False
                        yield hint
            except PlatformError:
                pass  # the next pass reports the problem
            self.records.forget()
            yield None
            await asyncio.sleep(RECONNECT[min(tries, len(RECONNECT) - 1)])
            tries += 1

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        try:
            async with self._engine.opened():
                match ref.kind:
                    case translate.CONTAINER:
                        return await self._read_container(ref)
                    case translate.PROCESS:
                        return await self._orphans.read(ref)
                    case translate.IMAGE:
                        return await self._leftovers.read_image(ref)
                    case translate.CACHE:
                        return await self._leftovers.read_cache(ref)
                    case translate.VOLUME | translate.NETWORK:
                        return await self._attachments.read(ref)
        except PlatformError as problem:
            return Unknown(str(problem))
        return Unknown(f"the engine has no kind {ref.kind!r}")

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return await self.read(Ref(self.name, self._place, translate.CONTAINER, uid, uid))

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        attachable = subject.shape in (Shape.VOLUME, Shape.NETWORK)
        if subject.shape is not Shape.WORKLOAD and not attachable:
            return NothingToCapture(f"a {subject.shape} has no log and no manifest of its own")
        try:
            async with self._engine.opened():
                if attachable:
                    return await self._attachments.capture(subject)
                return await self._captures.take(subject, what)
        except PlatformError as problem:
            return Unknown(str(problem))

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        action = step.decision.action
        if action not in self.guards:
            return Refused(f"the engine does not support {action}")
        try:
            async with self._engine.opened():
                match fresh.ref.kind, action:
                    case translate.CONTAINER, Action.STOP:
                        return await self._acts.stop(fresh, step.decision.grace)
                    case translate.CONTAINER, Action.REMOVE:
                        return await self._acts.remove(fresh)
                    case translate.PROCESS, Action.REMOVE:
                        return await self._orphans.end(fresh)
                    case translate.IMAGE, Action.REMOVE:
                        return await self._leftovers.remove_image(fresh)
                    case translate.CACHE, Action.REMOVE:
                        return await self._leftovers.remove_cache(fresh)
                    case ((translate.VOLUME | translate.NETWORK), Action.REMOVE):
                        return await self._attachments.remove(fresh)
        except PlatformError as problem:
            return Unknown(str(problem))
        return Refused(f"a {fresh.ref.kind} cannot be stopped, only removed")

    async def notify(self, subject: Subject, message: str) -> bool:
        """Sends it to the terminals inside, from outside: nothing is run or written in the container."""
        container = self.records.known(subject.ref.uid)
        if container is None or not container.state.pid or not self._engine.local:
            return False
        pid = container.state.pid
        if not belongs(pid, container.id, self._proc):
            return False
        try:
            return await in_thread(lambda: self._notify(pid, message), TELLING)
        except (TimeoutError, OSError):
            return False

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        if ref.kind != translate.CONTAINER:
            return Refused(f"a {ref.kind} cannot be restored")
        try:
            async with self._engine.opened():
                return await self._acts.restore(ref, evidence)
        except PlatformError as problem:
            return Unknown(str(problem))

    async def called(self, patterns: Sequence[str]) -> Sequence[Inspected] | Unknown:
        """Containers with these names, or with labels given as key=value, for platforms that read their files from this
        machine.
        """
        if not self._engine.local:
            return ()
        try:
            async with self._engine.opened():
                listed = await self._engine.get("/containers/json", list[ContainerSummary], all=1, deadline=SLOW)
                answers = [await self.records.inspect(one.id) for one in listed if translate.is_called(one, patterns)]
        except PlatformError as problem:
            return Unknown(str(problem))
        unknown = next((one for one in answers if isinstance(one, Unknown)), None)
        return [one for one in answers if isinstance(one, Inspected)] if unknown is None else unknown

    async def bound(self) -> Mapping[str, str] | Unknown:
        """Directories of this machine that are mounted in containers that are not running, each with a clause that
        names the container. No other source shows them: a stopped container has no mounts and no open files, and needs
        them when it starts.
        """
        if not self._engine.local:
            return {}
        try:
            async with self._engine.opened():
                listed = await self._engine.get("/containers/json", list[ContainerSummary], all=1, deadline=SLOW)
                answers = [await self.records.inspect(one.id) for one in listed if one.state != "running"]
        except PlatformError as problem:
            return Unknown(str(problem))
        found = {}
        for one in answers:
            if isinstance(one, Unknown):
                return one
            if one is None:
                continue  # removed since it was listed
            for mount in one.mounts or ():
                if mount.type == "bind":
                    found[mount.source] = f"the stopped container {one.plain_name} has {mount.source} mounted"
        return found

    async def read_storage(self) -> StorageBytes:
        async with self._engine.opened():
            return await read_storage(self._engine, self.records, self._clock.now())

    async def revert_stop(self, ref: Ref, evidence: Evidence) -> None:
        with suppress(PlatformError):
            async with self._engine.opened():
                await self._acts.revert_stop(ref, evidence)

    def _notify(self, pid: int, message: str) -> bool:
        pids = processes_of(pid, proc=self._proc)
        return not isinstance(pids, Unknown) and notify_inside(pids, message, self._proc) > 0

    async def _read_events(self) -> AsyncIterator[Ref | None]:
        since = self._clock.now().timestamp()
        self.records.forget()
        self.records.hearing = True  # nothing is missed from `since` on: the engine repeats the events
        stream = self._engine.events(FILTERS, since=f"{since:.9f}")
        waiting = asyncio.ensure_future(anext(stream))
        try:
            while True:
                yield None
                done, _ = await asyncio.wait({waiting}, timeout=RECONCILE.total_seconds())
                if done:
                    try:
                        self.records.record_event(waiting.result())
                    except StopAsyncIteration:
                        return
                    waiting = asyncio.ensure_future(anext(stream))
        finally:
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, PlatformError):
                await waiting
            await stream.aclose()

    async def _read_container(self, ref: Ref) -> Subject | Gone | Unknown:
        around = await self._around.snapshot()
        container = await self.records.inspect(ref.uid)
        if container is None:
            return Gone(ref, self._clock.now())
        if isinstance(container, Unknown):
            return container
        size, loses = await self._captures.losses(container)
        subject = await self._subject(msgspec.structs.replace(container, size_rw=size), around)
        return msgspec.structs.replace(subject, loses=loses)

    async def _holders(self, container: Inspected) -> Sequence[Holder]:
        """Processes that must get SIGTERM before a stop. PlatformError: they could not be listed, so nothing is
        stopped.
        """
        if not self._engine.local:
            return ()
        around = await self._around.snapshot()
        if around.blind is not None:
            raise PlatformError(f"the processes that hold its GPUs are unknown: {around.blind}")
        return holders_of(container, around, self._proc)

    async def _subject(self, container: Inspected, around: HostSnapshot) -> Subject:
        facts = await self._around.facts(container, around)
        return translate.container_subject(container, facts, self._at(), self._logs.finding(container))

    def _page(self, subjects: Sequence[Subject], unseen: Sequence[Unseen] = ()) -> Snapshot:
        return Snapshot(self.name, self._place, self._clock.now(), tuple(subjects), tuple(unseen))

    def _at(self) -> translate.PlaceAndTime:
        return translate.PlaceAndTime(self._place, self._clock.now())

"""One cluster as a platform. Every verb carries the uid and resourceVersion of what was looked at, so that the API
server itself refuses what changed: all of it is ATOMIC. Only roots are acted on; what they own goes with them.
"""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.missing import gone_by_looks
from gpukeeper.model.decision import (
    Accepted,
    Action,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
)
from gpukeeper.model.diagnosis import Diagnosis
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import Warned
from gpukeeper.model.policy import AtFinish, PlaceScope, Policy
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import diagnose, finalizers, gpus, remnants, translate
from gpukeeper.platforms.kubernetes.absence import absent
from gpukeeper.platforms.kubernetes.acts import Acts, cannot_remove
from gpukeeper.platforms.kubernetes.annotate import Annotations
from gpukeeper.platforms.kubernetes.archive import Archive
from gpukeeper.platforms.kubernetes.bulk import Bulk, Listed
from gpukeeper.platforms.kubernetes.capture import Captures
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.controllers import Controllers
from gpukeeper.platforms.kubernetes.discovery import Discovery
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.finish import OVER_PHASES
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.meter import Running
from gpukeeper.platforms.kubernetes.namespaces import NamespaceFacts, facts_of, unreadable
from gpukeeper.platforms.kubernetes.notes import Notes
from gpukeeper.platforms.kubernetes.other_owners import ONE, Named, OtherOwners, would_go_too
from gpukeeper.platforms.kubernetes.owners import Climb, Descendants, climb, descendants
from gpukeeper.platforms.kubernetes.settings import settings_of
from gpukeeper.platforms.kubernetes.tally import Tally
from gpukeeper.platforms.kubernetes.walk import Namespace, Walk, Wanted
from gpukeeper.platforms.kubernetes.watch import Watches
from gpukeeper.platforms.kubernetes.wire import Pod, Root, when

WRONG_CLOCK = timedelta(minutes=5)  # beyond this nothing that a time says can be believed
SLIGHT = timedelta(seconds=2)  # the server's clock is known to the second
WORD_OF_IT = 0.05  # seconds that a watch may take to tell of a removal
WORD_IN_BULK = 2.0  # the same while many are removed: a question would wait for its turn
STUCK_LOOKED_AT = 20  # in one look at everything
REMEMBERED = 500
REPORTED = 50_000  # deletions that watches reported and that are remembered
A_WHILE = timedelta(minutes=5)  # for which a namespace's labels are believed
REPORT_HOLDS = timedelta(minutes=10)  # for which a deletion that a watch reported is believed


class Looked(msgspec.Struct):
    """The last look at a root, for the verb that follows it."""

    subject: Subject
    source: Root | Pod
    pods: tuple[Pod, ...]


class KubernetesPlatform:
    precise = tidies = True
    local = False
    guards: Mapping[Action, Guard] = {
        Action.STOP: Guard.ATOMIC,
        Action.TRIM: Guard.ATOMIC,
        Action.REMOVE: Guard.ATOMIC,
        Action.RELEASE: Guard.ATOMIC,
    }

    def __init__(self, cluster: Cluster, clock: Clock, policy: Policy) -> None:
        self._cluster, self._clock = cluster, clock
        self._discovery = Discovery(cluster)
        self._owners = OtherOwners(cluster, self._discovery)
        served = self._discovery.served
        self._acts, self._captures, self._archive = (
            Acts(cluster, served),
            Captures(cluster, served),
            Archive(cluster, served),
        )
        self._annotations = Annotations(cluster, served)
        self._bulk = Bulk(cluster, served)
        self._controllers = Controllers(cluster)
        self._notes = Notes(cluster, clock)
        self._watches = Watches(cluster, self._discovery, cluster.place, self._heard_gone)
        self._watching = False
        self._looked: dict[str, Looked] = {}  # by uid
        self._following: dict[str, tuple[Subject, tuple[str, ...]]] = {}  # by uid: what was removed, its living pods
        self._gone: dict[str, float] = {}  # by uid: a watch said so
        self._telling: dict[str, asyncio.Event] = {}
        self._batched: set[str] = set()  # uids of what is being removed in bulk, whose deletions are watched
        self._holders: dict[
            str, list[tuple[str, str, str | None]]
        ] = {}  # by uid: pods that hold GPUs, when last listed
        self._dependents: dict[str, str] = {}  # by uid of an owner, when everything was last listed
        self._namespaces: dict[str, tuple[float, Namespace | Unknown]] = {}
        self.follow(policy)

    def follow(self, policy: Policy) -> None:
        """Of a policy that changed."""
        self._policy = policy

    @property
    def name(self) -> str:
        return translate.PLATFORM

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
            self._check_clock()
            walk = Walk(self._cluster, self._discovery, self._wanted(scope), self._at(), self._owners)
            stuck = 0
            async for subjects, sources in walk.pages():
                for number, source in enumerate(sources):
                    if self._is_stuck(source) and stuck < STUCK_LOOKED_AT:
                        stuck += 1
                        subjects[number] = await self._with_block(subjects[number], source, None)
                self._holders.update(walk.holders)  # whoever measures a page asks for them
                yield self._page([self._by_our_clock(one) for one in subjects])
            left = [one async for one in self._remnants(scope)] if walk.saw_pods else []
            yield self._page(left, walk.unseen)
            self._watches.parts, self._dependents = walk.parts, walk.dependents
            self._holders = walk.holders

    def running_pods(self, subject: Subject) -> Mapping[str, Running]:
        """By name: those that hold its GPUs, for whoever measures them. A name is used again, a uid is not."""
        if subject.ref.kind == POD.name:
            return {subject.ref.name: Running(subject.ref.uid, _known(subject.started))}
        held = self._holders.get(subject.ref.uid, [])
        return {name: Running(uid, _known(when(started))) for name, uid, started in held}

    async def wake(self) -> AsyncIterator[Ref | None]:
        scope = self._policy.scope.get(self.name)
        if scope is None:
            return
        async with self._cluster.opened():
            self._watching = True
            try:
                async for hint in self._watches.hints(self._wanted(scope)):
                    yield hint
            finally:
                self._watching = False

    async def look(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.kind == remnants.SERVICE.name:
            return await self._look_at_remnant(ref)
        kind = BY_NAME.get(ref.kind)
        if kind is None:
            return Unknown(f"{ref.kind} is no kind that gpukeeper knows")
        async with self._cluster.opened():
            try:
                if await self._was_told(ref):
                    return await self._after_removal(ref)
                return await self._look(kind, ref)
            except PlatformError as problem:
                return Unknown(str(problem))

    async def look_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return Unknown("the processes of a cluster are not on this machine")

    async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
        """A watch's report of a deletion, or else a list of the kind that does not contain the uid."""
        now = self._clock.now()
        followed = {ref.uid: ref for ref in refs if self._following.get(ref.uid, (None, ()))[1]}
        others = [ref for ref in refs if ref.uid not in followed]
        announced = [ref for ref in others if self._reported_gone(ref.uid)]
        asked = [ref for ref in others if not self._reported_gone(ref.uid)]
        scope = self._policy.scope.get(self.name)
        async with self._cluster.opened():
            everywhere = scope is not None and self._wanted(scope).named is None
            found = await absent(self._cluster, self._discovery.served, asked, everywhere=everywhere)
            looked = await gone_by_looks(
                self.look, list(followed.values())
            )  # what it had running may still need its grace
        return [*looked, *(Gone(ref, now, announced=True) for ref in announced), *(Gone(ref, now) for ref in found)]

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        if subject.shape is Shape.REMNANT:
            return Unknown(remnants.ONLY_REPORTED)
        kind, looked = BY_NAME[subject.ref.kind], self._looked.get(subject.ref.uid)
        async with self._cluster.opened():
            if looked is None:
                found = await self.look(subject.ref)
                if isinstance(found, Unknown):
                    return found
                looked = self._looked.get(subject.ref.uid)
            if looked is None:
                return NothingToCapture("it no longer exists")
            pods = (looked.source,) if isinstance(looked.source, Pod) else looked.pods
            read = self._bulk.get(subject.ref.uid)
            return await self._captures.capture(kind, subject.ref, what, pods, read)

    async def act(self, step: Step, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        if fresh.shape is Shape.REMNANT:
            return Refused(remnants.ONLY_REPORTED)
        kind, ref, action = BY_NAME[fresh.ref.kind], fresh.ref, step.decision.action
        async with self._cluster.opened():
            self._bulk.forget(ref.uid)  # from here on only what is asked for now counts
            looked = self._looked.get(ref.uid)
            if looked is None or looked.subject.seen.version != fresh.seen.version:
                found = await self.look(ref)
                if isinstance(found, Unknown):
                    return found
                looked = self._looked.get(ref.uid)
                if isinstance(found, Gone) or looked is None:
                    return Changed("it is gone already")
                if looked.subject.seen.version != fresh.seen.version:
                    return Changed("it changed since it was looked at")
            try:
                answer = await self._act(kind, action, fresh, looked)
            except ApiError as error:
                answer = Refused(str(error)) if error.says_refused else Unknown(str(error))
            except PlatformError as problem:
                answer = Unknown(str(problem))
            if isinstance(answer, Accepted):
                await self._tell_of(kind, step, fresh)
            return answer

    @asynccontextmanager
    async def batch(self, refs: Sequence[Ref]) -> AsyncIterator[None]:
        """Lists instead of questions about each, and one watch that reports what is gone."""
        async with self._cluster.opened():
            listed = await self._bulk.read(refs, events="events" in self._policy.capture.what)
            watching = [asyncio.create_task(self._hear_deletions(one)) for one in listed]
            self._batched = {ref.uid for ref in refs if self._bulk.get(ref.uid) is not None}
            try:
                yield
            finally:
                self._batched = set()
                self._bulk.forget(*(ref.uid for ref in refs))
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)

    async def _hear_deletions(self, listed: Listed) -> None:
        """While they are removed. Where it ends early, each removal is looked at by itself."""
        with suppress(PlatformError):
            async with aclosing(self._cluster.watch(listed.path, listed.version, Named, accept=ONE)) as events:
                async for event in events:
                    if event.type == "DELETED":
                        self._heard_gone(event.object.metadata.uid)

    async def _act(
        self, kind: Kind, action: Action, fresh: Subject, looked: Looked
    ) -> Accepted | Changed | Refused | Unknown:
        living = tuple(one for one in looked.pods if one.status.phase not in OVER_PHASES)
        match action:
            case Action.REMOVE:
                problem = cannot_remove(kind, looked.source)
                if problem is not None:
                    return problem
                self._remember_removal(fresh, living)
                return await self._acts.remove(kind, fresh, lambda: self._look_again(fresh, looked))
            case Action.STOP:
                if kind is POD:
                    self._remember_removal(fresh, living)
                return await self._acts.stop(kind, fresh, looked.source, lambda: self._look_again(fresh, looked))
            case Action.TRIM if isinstance(looked.source, Root):
                foreign = await self._also_of_others(looked)
                if foreign is not None:
                    return foreign
                everything = self._policy.at_finish is AtFinish.ALL
                return await self._acts.trim(kind, fresh, looked.source, looked.pods, everything=everything)
            case Action.RELEASE if fresh.blocked is not None:
                return await self._acts.release(kind, fresh, looked.source, fresh.blocked.by)
            case _:
                return Refused(f"a {kind.kind} offers no {action}")

    async def _also_of_others(self, looked: Looked) -> Refused | Unknown | None:
        """A pod below it that it does not control, or that another owner keeps, is not its to end."""
        for pod in looked.pods:
            name = f"pod {pod.metadata.name}"
            if pod.metadata.owner is None:
                return Refused(f"{name} names it as an owner and is controlled by nothing; remove that ownerReference")
            needed = await self._owners.keeping(pod.metadata)
            if needed is not None:
                return Unknown(f"{name}: {needed.why}") if isinstance(needed, Unknown) else Refused(f"{name}: {needed}")
        return None

    async def _look_again(self, fresh: Subject, before: Looked) -> Subject | Gone | Changed | Unknown:
        """After a conflict. Another generation is another wish, though nothing came of it yet that a look shows."""
        found = await self.look(fresh.ref)
        now = self._looked.get(fresh.ref.uid)
        if not isinstance(found, Subject) or now is None:
            return found
        same = now.source.metadata.generation == before.source.metadata.generation
        return found if same else Changed("somebody changed what it wishes for")

    async def tell(self, subject: Subject, message: str) -> bool:
        return False  # nobody is known to read an Event

    async def announce(self, subject: Subject, message: str, warned: Warned) -> None:
        await self._write(subject.ref, "WillBeReclaimed", message, warning=True)
        async with self._cluster.opened():
            await self._annotations.warn(subject.ref, subject.marks.warned, warned)

    async def hold(self, subject: Subject, until: datetime | None) -> Accepted | Refused | Unknown:
        if subject.shape is Shape.REMNANT:
            return Refused(remnants.ONLY_REPORTED)
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
                path, asked = kind.path(version, namespace), f"metadata.name={name}"
                async for page in self._cluster.pages(path, Namespace, fieldSelector=asked):
                    found += [self._at().ref(kind, one.metadata) for one in page.items]
        return [ref for ref in found if wanted.wants(ref.namespace) and ref.ends_with(words)]

    async def diagnose(self, ref: Ref) -> Diagnosis | Unknown:
        async with self._cluster.opened():
            try:
                return await diagnose.diagnose(
                    self._cluster, self._discovery.served, ref, self._at().now, self._controllers
                )
            except PlatformError as problem:
                return Unknown(str(problem))

    async def take_back(self, ref: Ref, evidence: Evidence) -> None:
        async with self._cluster.opened():
            try:
                await self._acts.take_back(BY_NAME[ref.kind], ref)
            except PlatformError:
                return  # a later look finds the note; it says nothing wrong

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        kind = BY_NAME.get(ref.kind)
        if kind is None:
            return Refused(f"{ref.kind} is no kind that gpukeeper knows")
        async with self._cluster.opened():
            answer = await self._archive.bring_back(kind, ref, evidence)
            if isinstance(answer, Accepted):
                await self._write(ref, "Restored", "gpukeeper brought it back")
            return answer

    # Below here: how.

    async def _look(self, kind: Kind, ref: Ref) -> Subject | Gone | Unknown:
        version = await self._discovery.served(kind)
        if isinstance(version, Unknown):
            return version
        if version is None:
            return Gone(ref, self._clock.now())  # its kind was uninstalled, and everything of it with that
        read = self._bulk.get(ref.uid)
        if read is not None:
            self._check_clock()
            return await self._as_found(kind, ref, read.source, read.below)
        type_: type[Root | Pod] = Pod if kind is POD else Root
        try:
            source = await self._cluster.get(kind.path(version, ref.namespace, ref.name), type_)
        except ApiError as error:
            if error.says_gone:
                return await self._after_removal(ref)
            raise
        self._check_clock()
        if not source.metadata.uid:
            return Unknown(f"what was answered about {ref.path} has no uid, so it proves nothing")
        if source.metadata.uid != ref.uid:
            return await self._after_removal(ref)
        return await self._as_found(kind, ref, source)

    async def _as_found(
        self, kind: Kind, ref: Ref, source: Root | Pod, below: Descendants | None = None
    ) -> Subject | Gone | Unknown:
        """`below`: where it was read already."""
        above = await climb(self._cluster, self._discovery.served, source.metadata)
        namespace = await self._namespace(ref.namespace)
        tally = Tally()
        if isinstance(source, Pod):
            below = Descendants()
            subject = translate.pod_subject(source, namespace, self._at(), self._reading, part_of(above, ref))
        else:
            if below is None:
                served = self._discovery.served
                below = await descendants(self._cluster, served, kind, source.metadata, narrow=True, seen=source)
            for pod in below.pods():
                tally.add_pod(pod, gpus.asked(pod.spec))
            tally.ran = any(translate.ran(one.seen.status) for one in below.every() if isinstance(one.seen, Root))
            if below.unseen:
                tally.unclear = below.unseen[0]
            ttl_field = await self._discovery.ttl_field(kind, (source,))
            reading = msgspec.structs.replace(self._reading, ttl_field=ttl_field)
            subject = translate.root_subject(kind, source, tally, namespace, self._at(), reading, part_of(above, ref))
        subject = msgspec.structs.replace(subject, needed=await self._needed(source, below))
        if self._is_stuck(source):
            subject = await self._with_block(subject, source, above)
        subject = self._by_our_clock(subject)
        if tally.pods:
            self._holders[ref.uid] = tally.pods
        self._remember(Looked(subject, source, tuple(below.pods())))
        return subject

    async def _remnants(self, scope: PlaceScope) -> AsyncIterator[Subject]:
        async for one in remnants.left_by_runs(self._cluster, self._wanted(scope), self._at().now):
            yield await self._remnant(one)

    async def _look_at_remnant(self, ref: Ref) -> Subject | Gone | Unknown:
        async with self._cluster.opened():
            found = await remnants.look(self._cluster, ref, self._at().now)
            return await self._remnant(found) if isinstance(found, remnants.Service) else found

    async def _remnant(self, one: remnants.Service) -> Subject:
        namespace = await self._namespace(one.metadata.namespace)
        return remnants.subject_of(one, namespace, self._at(), self._reading)

    async def _needed(self, source: Root | Pod, below: Descendants) -> str | Unknown | None:
        """By an owner that does not control it, or by what lives and would be deleted together with it."""
        needed = await self._owners.keeping(source.metadata)
        tree = (source.metadata.uid, *(one.meta.uid for one in below.every()))
        dependent = next((self._dependents[uid] for uid in tree if uid in self._dependents), None)
        return would_go_too(dependent) if needed is None and dependent is not None else needed

    async def _after_removal(self, ref: Ref) -> Subject | Gone | Unknown:
        """The root is not there. What it had running may need its grace: only when that is gone, all is back."""
        self._looked.pop(ref.uid, None)
        subject, pods = self._following.get(ref.uid, (None, ()))
        if subject is None or not pods:
            return Gone(ref, self._clock.now())
        left = []
        for one in pods:
            name, _, uid = one.partition(" ")
            try:
                found = await self._cluster.get(POD.path("v1", ref.namespace, name), Pod)
            except ApiError as error:
                if error.says_gone:
                    continue
                return Unknown(str(error))
            if not found.metadata.uid:
                return Unknown(f"what was answered about its pod {name} has no uid, so it proves nothing")
            if found.metadata.uid == uid and found.status.phase not in OVER_PHASES:
                left.append(one)
        if not left:
            self._following.pop(ref.uid, None)
            return Gone(ref, self._clock.now())
        self._following[ref.uid] = (subject, tuple(left))
        seen = msgspec.structs.replace(subject.seen, at=self._clock.now())
        return msgspec.structs.replace(subject, seen=seen, state=State.REMOVING)

    def _remember_removal(self, fresh: Subject, living: Sequence[Pod]) -> None:
        if len(self._following) >= REMEMBERED:
            self._following.pop(next(iter(self._following)))
        pods = tuple(f"{one.metadata.name} {one.metadata.uid}" for one in living)
        self._following[fresh.ref.uid] = (fresh, pods)
        if self._watching or fresh.ref.uid in self._batched:
            self._telling[fresh.ref.uid] = asyncio.Event()

    def _remember(self, looked: Looked) -> None:
        if len(self._looked) >= REMEMBERED:
            self._looked.pop(next(iter(self._looked)))
        self._looked[looked.subject.ref.uid] = looked

    def _heard_gone(self, uid: str) -> None:
        now = time.monotonic()
        self._gone.pop(uid, None)
        self._gone[uid] = now  # the newest last
        oldest = next(iter(self._gone))
        while len(self._gone) > REPORTED or now - self._gone[oldest] > REPORT_HOLDS.total_seconds():
            del self._gone[oldest]
            oldest = next(iter(self._gone))
        told = self._telling.pop(uid, None)
        if told is not None:
            told.set()

    async def _was_told(self, ref: Ref) -> bool:
        """A watch said that it is gone. After a removal of ours it says so in a moment, which saves a question."""
        waiting = self._telling.get(ref.uid)
        if waiting is not None:
            try:
                async with asyncio.timeout(WORD_IN_BULK if ref.uid in self._batched else WORD_OF_IT):
                    await waiting.wait()
            except TimeoutError:
                self._telling.pop(ref.uid, None)
        return self._reported_gone(ref.uid)

    def _reported_gone(self, uid: str) -> bool:
        """Lately. Not for ever: a cluster that is set back to a backup has it again."""
        heard = self._gone.get(uid)
        return heard is not None and time.monotonic() - heard < REPORT_HOLDS.total_seconds()

    def _is_stuck(self, source: Root | Pod) -> bool:
        asked = when(source.metadata.deletion_timestamp)
        return isinstance(asked, datetime) and self._at().now - asked > finalizers.PATIENCE

    async def _with_block(self, subject: Subject, source: Root | Pod, above: Climb | None) -> Subject:
        """What keeps its removal from ending. Asked only when it takes long."""
        kind, meta, now = BY_NAME[subject.ref.kind], source.metadata, self._at().now
        served = self._discovery.served
        try:
            below = await descendants(self._cluster, served, kind, meta)
            standing = {one.name: await self._controllers.ask(one, now) for one in finalizers.controllers_of(meta)}
            above = above or await climb(self._cluster, served, meta)
        except PlatformError:
            return subject  # it shows as being removed, and nothing is done about it
        pod = source if isinstance(source, Pod) else None
        blocked = finalizers.blocked(meta, kind, below, standing, now, pod=pod, owner_gone=above.owner_gone)
        if blocked is not None and blocked.proven is True and above.owner_gone is True:
            # Nothing is left that it could be part of, and nobody else ends its removal.
            subject = msgspec.structs.replace(subject, root=None)
        return msgspec.structs.replace(subject, blocked=blocked)

    async def _namespace(self, name: str) -> NamespaceFacts:
        now = time.monotonic()
        read = self._namespaces.get(name)
        if read is None or now - read[0] > A_WHILE.total_seconds():
            try:
                found: Namespace | Unknown = await self._cluster.get(f"/api/v1/namespaces/{name}", Namespace)
            except PlatformError as problem:
                found = Unknown(str(problem))
            read = self._namespaces[name] = (now, found)
        if isinstance(read[1], Unknown):
            return unreadable(name, read[1].why)
        return facts_of(read[1].metadata, settings_of(self._policy).environments, self._at().now)

    async def _tell_of(self, kind: Kind, step: Step, fresh: Subject) -> None:
        """On the object, where it stays; what was removed is in the ledger."""
        words = {Action.STOP: "Stopped", Action.TRIM: "Trimmed", Action.RELEASE: "Released"}.get(step.decision.action)
        if words is not None and kind is not POD:
            await self._write(fresh.ref, words, step.decision.reason)

    async def _write(self, ref: Ref, reason: str, words: str, *, warning: bool = False) -> None:
        kind = BY_NAME[ref.kind]
        async with self._cluster.opened():
            version = await self._discovery.served(kind)
            if isinstance(version, str):
                await self._notes.write(kind, version, ref, reason, words, warning=warning)

    @property
    def _reading(self) -> translate.Reading:
        return translate.Reading.of(self._policy)

    def _wanted(self, scope: PlaceScope) -> Wanted:
        settings = settings_of(self._policy)
        return Wanted(
            scope.namespaces,
            settings.environments,
            self._reading,
            settings.page,
            count_dead=self._policy.at_finish is AtFinish.ALL,
        )

    def _at(self) -> translate.At:
        """By the server's clock, which wrote the times that are compared with it."""
        return translate.At(self.place, self._clock.now() + (self._cluster.skew or timedelta()))

    def _check_clock(self) -> None:
        skew = self._cluster.skew
        if skew is not None and abs(skew) > WRONG_CLOCK:
            ahead = "ahead of" if skew > timedelta() else "behind"
            raise PlatformError(
                f"the cluster's clock is {in_words(abs(skew))} {ahead} ours; no time there can be believed, so nothing "
                "is touched. Mend the clock that is wrong"
            )

    def _by_our_clock(self, subject: Subject) -> Subject:
        """The rules compare with our clock. Where the two differ, whatever keeps longer."""
        skew = self._cluster.skew or timedelta()
        seen = msgspec.structs.replace(subject.seen, at=self._clock.now())
        late = max(-skew, timedelta()) if abs(skew) > SLIGHT else timedelta()
        ended, created = subject.ended, subject.created
        if late and isinstance(ended, datetime):
            ended += late
        if late and isinstance(created, datetime):
            created += late
        return msgspec.structs.replace(subject, seen=seen, ended=ended, created=created)

    def _page(self, subjects: Sequence[Subject], unseen: Sequence[Unseen] = ()) -> Snapshot:
        return Snapshot(self.name, self.place, self._clock.now(), tuple(subjects), tuple(unseen))


def _known(at: datetime | Unknown | None) -> datetime | None:
    return at if isinstance(at, datetime) else None


def part_of(above: Climb, ref: Ref) -> str | Unknown | None:
    """The path of its root; None: it is one."""
    root = above.root
    if isinstance(root, Unknown):
        return root
    if above.gone is not None:
        return Unknown(f"{above.gone.kind} {above.gone.name}, which owned it, is gone; the cluster should remove it")
    if root is None:
        return None
    return Ref(ref.platform, ref.place, root.kind.name, root.meta.name, root.meta.uid, ref.namespace).path

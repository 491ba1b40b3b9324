"""Hints that something changed: one watch for each kind, restarted whenever it ends, never facts; and removals in
progress, with the deletions that a watch reported: known to be gone without a request.

A hint names a root. A change below a root changes its status too, so pods matter only without a controller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Meta, Owner, PartialMetadata, Pod
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS, known_owner
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, WatchedObject
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, POD
from gpukeeper.platforms.kubernetes.owners import LIST
from gpukeeper.platforms.kubernetes.walk import WalkSettings

FOLLOWED_MAX = 500
REPORTED_MAX = 50_000  # deletions that watches reported and that are remembered
REPORT_HOLDS = timedelta(minutes=10)  # how long a deletion reported by a watch is used
REPORT_WAIT = 0.05  # seconds to wait for the report of a watch
REPORT_WAIT_IN_BULK = 2.0  # the same in bulk removals: a request would wait for the rate limit


class PendingRemovals:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self.watching = False
        self.batched: set[str] = set()  # uids of what is being removed in bulk, whose deletions are watched
        self._following: dict[str, tuple[Subject, tuple[str, ...]]] = {}  # by uid: what was removed, its living pods
        self._gone: dict[str, float] = {}  # by uid: time of the report
        self._awaited: dict[str, asyncio.Event] = {}

    def follows(self, uid: str) -> bool:
        """It was removed, and some of its pods may still be there."""
        return bool(self._following.get(uid, (None, ()))[1])

    def remember(self, fresh: Subject, living: Sequence[Pod]) -> None:
        if len(self._following) >= FOLLOWED_MAX:
            self._following.pop(next(iter(self._following)))
        pods = tuple(f"{one.metadata.name} {one.metadata.uid}" for one in living)
        self._following[fresh.ref.uid] = (fresh, pods)
        if self.watching or fresh.ref.uid in self.batched:
            self._awaited[fresh.ref.uid] = asyncio.Event()

    async def after(self, ref: Ref) -> Subject | Gone | Unknown:
        """The root is gone. Its running pods may need their grace period: it is gone only when they are."""
        subject, pods = self._following.get(ref.uid, (None, ()))
        if subject is None or not pods:
            return Gone(ref, self._clock.now())
        left = []
        for one in pods:
            name, _, uid = one.partition(" ")
            try:
                found = await self._cluster.get(POD.path("v1", ref.namespace, name), Pod)
            except ApiError as error:
                if error.is_not_found:
                    continue
                return Unknown(str(error))
            if not found.metadata.uid:
                return Unknown(f"the response for its pod {name} has no uid, so the pod cannot be identified")
            if found.metadata.uid == uid and found.status.phase not in OVER_PHASES:
                left.append(one)
        if not left:
            self._following.pop(ref.uid, None)
            return Gone(ref, self._clock.now())
        self._following[ref.uid] = (subject, tuple(left))
        seen = msgspec.structs.replace(subject.seen, at=self._clock.now())
        return msgspec.structs.replace(subject, seen=seen, state=State.REMOVING)

    def report_deleted(self, uid: str) -> None:
        now = time.monotonic()
        self._gone.pop(uid, None)
        self._gone[uid] = now  # the newest last
        oldest = next(iter(self._gone))
        while len(self._gone) > REPORTED_MAX or now - self._gone[oldest] > REPORT_HOLDS.total_seconds():
            del self._gone[oldest]
            oldest = next(iter(self._gone))
        awaited = self._awaited.pop(uid, None)
        if awaited is not None:
            awaited.set()

    async def deletion_reported(self, ref: Ref) -> bool:
        """A watch reported its deletion. After a removal it waits for that report, which saves a request."""
        waiting = self._awaited.get(ref.uid)
        if waiting is not None:
            try:
                async with asyncio.timeout(REPORT_WAIT_IN_BULK if ref.uid in self.batched else REPORT_WAIT):
                    await waiting.wait()
            except TimeoutError:
                self._awaited.pop(ref.uid, None)
        return self.reported_gone(ref.uid)

    def reported_gone(self, uid: str) -> bool:
        """Recently. Not for ever: a cluster that is restored from a backup has it again."""
        reported_at = self._gone.get(uid)
        return reported_at is not None and time.monotonic() - reported_at < REPORT_HOLDS.total_seconds()


RECONNECT = (1.0, 5.0, 15.0, 60.0)  # seconds between tries
AGAIN = 600.0  # seconds until a kind that was not installed is checked again
SHORT = 5.0  # seconds; a watch that ends sooner was none, and the next one waits
ENDS = frozenset(end for kind in KINDS for end in (*kind.succeeded, *kind.failed))


class Watches:
    """`on_gone` gets the uid of everything that the API server reports as deleted."""

    def __init__(
        self,
        cluster: Cluster,
        discovery: ApiDiscovery,
        place: str,
        on_gone: Callable[[str], None],
        *,
        pauses: tuple[float, ...] = RECONNECT,
    ) -> None:
        self._cluster, self._discovery, self._place, self._on_gone = cluster, discovery, place, on_gone
        self._pauses = pauses
        # By kind and namespace, then by uid: what of it may matter to a rule, as a number.
        self._known: dict[tuple[str, str | None], dict[str, int]] = {}
        self.parts: Mapping[str, Owner] = {}  # by uid of a child: what owns it; as of the last full pass

    async def hints(self, wanted: WalkSettings) -> AsyncIterator[Ref | None]:
        queue: asyncio.Queue[Ref | None] = asyncio.Queue(maxsize=10_000)
        tasks = [
            asyncio.create_task(self._follow(kind, namespace, wanted, queue))
            for kind in KINDS
            if kind.watched
            for namespace in wanted.named or (None,)
        ]
        waiting: asyncio.Task[Ref | None] | None = None
        try:
            while True:
                waiting = asyncio.create_task(queue.get())
                done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {waiting}:
                    task.result()  # they never end by themselves: an error is a bug and must be seen
                yield await waiting
        finally:
            begun = [*tasks] if waiting is None else [*tasks, waiting]
            for one in begun:
                one.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _follow(
        self, kind: Kind, namespace: str | None, wanted: WalkSettings, queue: asyncio.Queue[Ref | None]
    ) -> None:
        """For ever. After every gap, a full pass follows. A watch that lasted for a while was no failure: the next
        retry comes soon."""
        tries, begun = 0, False
        while True:
            watched: float | None = None
            try:
                version = await self._discovery.served(kind)
                if version is None:
                    self._known.pop((kind.name, namespace), None)
                    await asyncio.sleep(AGAIN)
                    continue
                if isinstance(version, str):
                    path = kind.path(version, namespace)
                    known = self._known.setdefault((kind.name, namespace), {})
                    at = await (self._forget_missing(path, known) if begun else self._newest(path))
                    if begun:
                        await queue.put(None)
                    begun, watched = True, time.monotonic()
                    await self._watch(kind, path, at, wanted, queue, known)
            except PlatformError:
                pass  # a full pass reports the problem
            if watched is not None and time.monotonic() - watched >= SHORT:
                tries = 0
            await self._pause(tries)
            tries += 1

    async def _pause(self, tries: int) -> None:
        await asyncio.sleep(self._pauses[min(tries, len(self._pauses) - 1)])

    async def _newest(self, path: str) -> str:
        async with aclosing(self._cluster.pages(path, PartialMetadata, limit=1)) as pages:
            async for page in pages:
                return page.version
        return "0"

    async def _forget_missing(self, path: str, known: dict[str, int]) -> str:
        """After a gap, in which deletions were not reported. The version of the list; the full pass that
        follows finds what changed."""
        version, listed, whole = "0", set[str](), True
        async for page in self._cluster.pages(path, PartialMetadata, accept=LIST):
            version = page.version
            listed.update(one.metadata.uid for one in page.items)
            whole = whole and not page.problems and not page.inconsistent
        if whole:
            for uid in known.keys() - listed:
                del known[uid]
        return version

    async def _watch(
        self,
        kind: Kind,
        path: str,
        version: str,
        wanted: WalkSettings,
        queue: asyncio.Queue[Ref | None],
        known: dict[str, int],
    ) -> None:
        """Watches follow one another without a gap until the server has forgotten the version or a connection fails.
        One that ends at once is useless; the next ones wait, so that the server is not flooded."""
        short = 0
        while True:
            began = time.monotonic()
            try:
                async with aclosing(self._cluster.watch(path, version, kind.watched_as)) as events:
                    async for event in events:
                        version = event.version
                        if event.type != "BOOKMARK" and wanted.covers(event.object.metadata.namespace):
                            ref = self._hint(kind, event.type, event.object, known)
                            if ref is not None:
                                await queue.put(ref)
            except ApiError as error:
                if error.expired:
                    return
                raise
            short = short + 1 if time.monotonic() - began < SHORT else 0
            if short:
                await self._pause(short - 1)

    def _hint(self, kind: Kind, what: str, seen: WatchedObject, known: dict[str, int]) -> Ref | None:
        meta = seen.metadata
        if what == "DELETED":
            known.pop(meta.uid, None)
            self._on_gone(meta.uid)
        elif not _matters(seen, known):
            return None
        owner = meta.owner
        if owner is None:
            return Ref("kubernetes", self._place, kind.name, meta.name, meta.uid, meta.namespace)
        return self._root(owner, meta) if kind.children else None

    def _root(self, owner: Owner, meta: Meta) -> Ref | None:
        """Up, as far as is known; reading the object finds the rest."""
        for _ in range(8):
            above = self.parts.get(owner.uid)
            if above is None:
                break
            owner = above
        kind = known_owner(owner.api_version, owner.kind)
        if kind is None:
            return None
        return Ref("kubernetes", self._place, kind.name, owner.name, owner.uid, meta.namespace)


def _matters(seen: WatchedObject, known: dict[str, int]) -> bool:
    """Counts of pods and heartbeats come by the thousand; ends, marks and removals are what rules go by."""
    meta, status = seen.metadata, seen.status
    ends = tuple(c.type for c in status.conditions or () if c.type in ENDS and c.status == "True")
    marks = tuple(sorted((meta.annotations or {}).items())), tuple(sorted((meta.labels or {}).items()))
    now = hash(
        (
            meta.generation,
            meta.deletion_timestamp,
            meta.finalizers,
            ends,
            marks,
            status.stage,
            seen.spec.suspend,
        )
    )
    before, known[meta.uid] = known.get(meta.uid), now
    return before != now

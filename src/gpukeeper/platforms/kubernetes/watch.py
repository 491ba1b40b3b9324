"""Hints that something changed: one watch for each kind, restarted whenever it ends. Never facts.

A hint names a root. A change below a root changes its status too, so pods matter only without a controller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS, known_owner
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, WatchedObject
from gpukeeper.platforms.kubernetes.other_owners import LIST, PartialMetadata
from gpukeeper.platforms.kubernetes.walk import Namespace, WalkSettings
from gpukeeper.platforms.kubernetes.wire import Meta, Owner

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
        async with aclosing(self._cluster.pages(path, Namespace, limit=1)) as pages:
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

"""What many removals need, read by a few lists instead of several requests for each of them.

Only for Jobs and pods without a controller, of which there are thousands. A list is used for a minute; then what is
left of the batch is listed again. The DELETE carries the uid and resourceVersion that were read, so the API server
refuses what changed since. What could not be listed completely is not cached: each object is read separately.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, TreeNode
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.other_owners import PartialMetadata
from gpukeeper.platforms.kubernetes.tree import Descendants
from gpukeeper.platforms.kubernetes.wire import Pod, Root, Wire

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

FEW = 5  # of one kind in one namespace: read one by one
PAGE = 500
CACHE_SECONDS = 60.0  # how long a list is used
EVENTS_OF_ONE = 200

Json: TypeAlias = dict[str, Any]
Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]  # `ApiDiscovery.served`


class _Involved(Wire, frozen=True):
    uid: str = ""


class _Event(Wire, frozen=True):
    involved_object: _Involved = _Involved()


class ListedObject(msgspec.Struct):
    """One object as it was listed, and what belongs to it."""

    source: Root | Pod
    manifest: bytes  # an item of a list: without apiVersion and kind
    api_version: str
    kind: str
    at: float
    pods: list[tuple[Pod, bytes]] = []
    events: dict[str, list[bytes]] | None = None  # by uid, of it and its pods; None: not listed

    @property
    def below(self) -> Descendants:
        nodes = tuple(TreeNode(POD, pod) for pod, _ in self.pods)
        return Descendants({self.source.metadata.uid: nodes} if nodes else {}, narrowed=True)

    @property
    def description(self) -> Json:
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            **reading.decode(self.manifest, type=dict[str, Any]),
        }

    def pod(self, uid: str) -> Json | None:
        found = next((raw for pod, raw in self.pods if pod.metadata.uid == uid), None)
        if found is None:
            return None
        return {"apiVersion": "v1", "kind": POD.kind, **reading.decode(found, type=dict[str, Any])}


class ListPosition(msgspec.Struct, frozen=True):
    """A list that was read, and the version from which a watch continues."""

    path: str
    version: str


class Bulk:
    """Empty while nothing is removed in bulk."""

    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served
        self._read: dict[str, ListedObject] = {}  # by uid
        self._left: dict[str, Ref] = {}  # by uid: of the batch, and not yet acted on
        self._events = False
        self._listing = asyncio.Lock()

    def get(self, uid: str) -> ListedObject | None:
        found = self._read.get(uid)
        return found if found is not None and time.monotonic() - found.at < CACHE_SECONDS else None

    async def current(self, uid: str) -> ListedObject | None:
        """As `get`. When a list is too old, what is left of its batch is listed again: one by one, a thousand objects
        take so long that none of them would come from a list."""
        if self._is_old(uid):
            async with self._listing:
                if self._is_old(uid):
                    old = [one for one in self._read if self._is_old(one)]
                    for one in old:
                        del self._read[one]
                    await self._list([self._left[one] for one in old if one in self._left])
        return self.get(uid)

    def _is_old(self, uid: str) -> bool:
        return uid in self._read and self.get(uid) is None

    def forget(self, *uids: str) -> None:
        for uid in uids:
            self._read.pop(uid, None)
            self._left.pop(uid, None)

    async def read(self, refs: Sequence[Ref], *, events: bool) -> list[ListPosition]:
        """What was listed. Raises nothing: what could not be read is read later, separately."""
        self._left, self._events = {ref.uid: ref for ref in refs}, events
        return await self._list(refs)

    async def _list(self, refs: Sequence[Ref]) -> list[ListPosition]:
        groups: dict[tuple[str, str], list[Ref]] = {}
        for ref in refs:
            groups.setdefault((ref.kind, ref.namespace), []).append(ref)
        listed: list[ListPosition] = []
        for (name, namespace), group in groups.items():
            kind = BY_NAME.get(name)
            if kind is not None and kind.in_bulk and len(group) > FEW:
                try:
                    one = await self._group(kind, namespace, {ref.uid for ref in group}, events=self._events)
                except (PlatformError, msgspec.DecodeError):
                    one = None
                listed += [one] if one is not None else []
        return listed

    async def _group(self, kind: Kind, namespace: str, uids: set[str], *, events: bool) -> ListPosition | None:
        version = await self._served(kind)
        if not isinstance(version, str):
            return None
        path, api_version = kind.path(version, namespace), f"{kind.group}/{version}".strip("/")
        found: dict[str, ListedObject] = {}
        most, at, newest = max(FEW, len(uids)), time.monotonic(), ""
        type_: type[Root | Pod] = kind.type_
        async for newest, raw in self._items(path, most):  # noqa: B007 (the version of the list)
            uid = reading.decode(raw, type=PartialMetadata).metadata.uid
            if uid in uids:
                found[uid] = ListedObject(reading.decode(raw, type=type_), bytes(raw), api_version, kind.kind, at)
        if kind.uid_label:
            await self._add_pods(kind.uid_label, namespace, found, most)
        if events:
            await self._add_events(namespace, found, most)
        self._read |= {
            uid: one for uid, one in found.items() if uid in self._left
        }  # acted on meanwhile: only fresh reads
        return ListPosition(path, newest) if found else None

    async def _add_pods(self, label: str, namespace: str, found: dict[str, ListedObject], most: int) -> None:
        for uid in [uid for uid, one in found.items() if not _labels_its_pods(one.source, label)]:
            del found[uid]
        async for _, raw in self._items(POD.path("v1", namespace), most, label):
            owners = reading.decode(raw, type=PartialMetadata).metadata.owner_references or ()
            owner = next((found[one.uid] for one in owners if one.uid in found), None)
            if owner is not None:
                owner.pods.append((reading.decode(raw, type=Pod), bytes(raw)))

    async def _add_events(self, namespace: str, found: Mapping[str, ListedObject], most: int) -> None:
        wanted = {*found, *(pod.metadata.uid for one in found.values() for pod, _ in one.pods)}
        kept: dict[str, list[bytes]] = {}
        try:
            async for _, raw in self._items(f"/api/v1/namespaces/{namespace}/events", most):
                uid = reading.decode(raw, type=_Event).involved_object.uid
                if uid in wanted and len(kept.setdefault(uid, [])) < EVENTS_OF_ONE:
                    kept[uid].append(bytes(raw))
        except PlatformError:
            return  # each is read separately, which reports the reason
        for one in found.values():
            mine = (one.source.metadata.uid, *(pod.metadata.uid for pod, _ in one.pods))
            one.events = {uid: kept.get(uid, []) for uid in mine}

    async def _items(self, path: str, most: int, labels: str | None = None) -> AsyncIterator[tuple[str, msgspec.Raw]]:
        """Of a list of one moment, with its version. One that is longer than this many pages is not read: the questions
        that it saves would be fewer."""
        pages = 0
        async with aclosing(self._cluster.pages(path, msgspec.Raw, limit=PAGE, labelSelector=labels)) as listed:
            async for page in listed:
                pages += 1
                if page.inconsistent or page.problems or pages > most:
                    raise PlatformError(f"{path} could not be listed completely")
                for raw in page.items:
                    yield page.version, raw


def _labels_its_pods(root: Root | Pod, label: str) -> bool:
    selector = root.spec.selector if isinstance(root, Root) else None
    return selector is not None and label in (selector.match_labels or {})

"""Reads objects with what is above and below them, and what blocks their removal: one of them, or many by a few lists.

Lists are only for Jobs and pods without a controller, of which there are thousands. A list is used for a minute;
then what is left of the batch is listed again. The DELETE carries the uid and resourceVersion that were read, so
the API server refuses what changed since. What could not be listed completely is read object by object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import PartialMetadata, Pod, Reference, Root, Wire, when
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Gone, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import finalizers, gpus, translate
from gpukeeper.platforms.kubernetes.diagnose import Controllers
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery, ServerClock
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Served, TreeNode
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.marks import (
    NamespaceFacts,
    TranslationSettings,
    namespace_facts,
    unreadable_namespace,
)
from gpukeeper.platforms.kubernetes.owners import (
    Climb,
    Descendants,
    OtherOwners,
    climb,
    descendants,
    kept_for_dependent,
)
from gpukeeper.platforms.kubernetes.settings import settings_of
from gpukeeper.platforms.kubernetes.watch import PendingRemovals

FEW = 5  # of one kind in one namespace: read one by one
PAGE = 500
CACHE_SECONDS = 60.0  # how long a list is used
EVENTS_OF_ONE = 200

Json: TypeAlias = dict[str, Any]


class _EventTarget(Wire, frozen=True):
    """An event as far as a list of thousands is read."""

    involved_object: Reference = Reference()


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
                uid = reading.decode(raw, type=_EventTarget).involved_object.uid
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


CACHE_MAX = 500
NAMESPACE_CACHE_TIME = timedelta(minutes=5)  # of labels of a namespace


class ReadObject(msgspec.Struct):
    """A root as it was last read, for the action that follows."""

    subject: Subject
    source: Root | Pod
    pods: tuple[Pod, ...]


class ObjectReader:
    """Of one cluster. Caches each root as it was last read, for the action that follows."""

    def __init__(
        self,
        cluster: Cluster,
        clock: ServerClock,
        discovery: ApiDiscovery,
        owners: OtherOwners,
        controllers: Controllers,
        bulk: Bulk,
        removals: PendingRemovals,
    ) -> None:
        self._cluster, self._clock, self._discovery, self._owners = cluster, clock, discovery, owners
        self._controllers, self._bulk, self._removals = controllers, bulk, removals
        self.last: dict[str, ReadObject] = {}  # by uid
        self.holders: dict[str, list[tuple[str, str, str | None]]] = {}  # by uid: pods that hold GPUs, when last listed
        self.dependents: dict[str, str] = {}  # by uid of an owner, when everything was last listed
        self._namespaces: dict[str, tuple[float, PartialMetadata | Unknown]] = {}

    def follow(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def reading(self) -> TranslationSettings:
        return TranslationSettings.of(self._policy)

    async def read(self, kind: Kind, ref: Ref) -> Subject | Gone | Unknown:
        version = await self._discovery.served(kind)
        if isinstance(version, Unknown):
            return version
        if version is None:
            return Gone(ref, self._clock.now())  # its kind was uninstalled with all its objects
        read = await self._bulk.current(ref.uid)
        if read is not None:
            self._clock.check()
            return await self._as_found(kind, ref, read.source, read.below)
        try:
            source = await self._cluster.get(kind.path(version, ref.namespace, ref.name), kind.type_)
        except ApiError as error:
            if error.is_not_found:
                return await self.after_removal(ref)
            raise
        self._clock.check()
        if not source.metadata.uid:
            return Unknown(f"the response for {ref.path} has no uid, so the object cannot be identified")
        if source.metadata.uid != ref.uid:
            return await self.after_removal(ref)
        return await self._as_found(kind, ref, source)

    async def _as_found(
        self, kind: Kind, ref: Ref, source: Root | Pod, below: Descendants | None = None
    ) -> Subject | Gone | Unknown:
        """`below`: where it was read already."""
        above = await climb(self._cluster, self._discovery.served, source.metadata)
        namespace = await self.namespace(ref.namespace)
        totals = PodTotals()
        if isinstance(source, Pod):
            below = Descendants()
            subject = translate.pod_subject(source, namespace, self._clock.at(), self.reading, part_of(above, ref))
        else:
            if below is None:
                served = self._discovery.served
                below = await descendants(self._cluster, served, kind, source.metadata, narrow=True, seen=source)
            for pod in below.pods():
                totals.add_pod(pod, gpus.requested(pod.spec))
            totals.ran = any(translate.ran(one.seen.status) for one in below.every() if isinstance(one.seen, Root))
            if below.unseen:
                totals.unclear = below.unseen[0]
            ttl_field = await self._discovery.ttl_field(kind, (source,))
            reading = msgspec.structs.replace(self.reading, ttl_field=ttl_field)
            subject = translate.root_subject(
                kind, source, totals, namespace, self._clock.at(), reading, part_of(above, ref)
            )
        subject = msgspec.structs.replace(subject, needed=await self._needed(source, below))
        if self.is_stuck(source):
            subject = await self.with_block(subject, source, above)
        subject = self._clock.by_ours(subject)
        if totals.pods:
            self.holders[ref.uid] = totals.pods
        self._remember(ReadObject(subject, source, tuple(below.pods())))
        return subject

    async def after_removal(self, ref: Ref) -> Subject | Gone | Unknown:
        self.last.pop(ref.uid, None)
        return await self._removals.after(ref)

    async def _needed(self, source: Root | Pod, below: Descendants) -> str | Unknown | None:
        """By an owner that does not control it, or by what lives and would be deleted together with it."""
        needed = await self._owners.keeping(source.metadata)
        tree = (source.metadata.uid, *(one.meta.uid for one in below.every()))
        dependent = next((self.dependents[uid] for uid in tree if uid in self.dependents), None)
        return kept_for_dependent(dependent) if needed is None and dependent is not None else needed

    def _remember(self, read_object: ReadObject) -> None:
        if len(self.last) >= CACHE_MAX:
            self.last.pop(next(iter(self.last)))
        self.last[read_object.subject.ref.uid] = read_object

    def is_stuck(self, source: Root | Pod) -> bool:
        deleted_at = when(source.metadata.deletion_timestamp)
        return isinstance(deleted_at, datetime) and self._clock.at().now - deleted_at > finalizers.PATIENCE

    async def with_block(self, subject: Subject, source: Root | Pod, above: Climb | None) -> Subject:
        """What blocks its removal. Read only if it takes long."""
        kind, meta, now = BY_NAME[subject.ref.kind], source.metadata, self._clock.at().now
        served = self._discovery.served
        try:
            below = await descendants(self._cluster, served, kind, meta)
            controller_state = {
                one.name: await self._controllers.state(one, now) for one in finalizers.controllers_of(meta)
            }
            above = above or await climb(self._cluster, served, meta)
        except PlatformError:
            return subject  # it shows as being removed, and nothing is done about it
        pod = source if isinstance(source, Pod) else None
        blocked = finalizers.blocked(meta, kind, below, controller_state, now, pod=pod, owner_gone=above.owner_gone)
        if blocked is not None and blocked.proven is True and above.owner_gone is True:
            # It is part of nothing that exists, and no controller completes its removal.
            subject = msgspec.structs.replace(subject, root=None)
        return msgspec.structs.replace(subject, blocked=blocked)

    async def namespace(self, name: str) -> NamespaceFacts:
        now = time.monotonic()
        read = self._namespaces.get(name)
        if read is None or now - read[0] > NAMESPACE_CACHE_TIME.total_seconds():
            try:
                found: PartialMetadata | Unknown = await self._cluster.get(
                    f"/api/v1/namespaces/{name}", PartialMetadata
                )
            except PlatformError as problem:
                found = Unknown(str(problem))
            read = self._namespaces[name] = (now, found)
        if isinstance(read[1], Unknown):
            return unreadable_namespace(name, read[1].why)
        return namespace_facts(read[1].metadata, settings_of(self._policy).environments, self._clock.at().now)


def part_of(above: Climb, ref: Ref) -> str | Unknown | None:
    """The path of its root; None: it is one."""
    root = above.root
    if isinstance(root, Unknown):
        return root
    if above.gone is not None:
        return Unknown(f"its owner {above.gone.kind} {above.gone.name} no longer exists; the cluster should remove it")
    if root is None:
        return None
    return Ref(ref.platform, ref.place, root.kind.name, root.meta.name, root.meta.uid, ref.namespace).path

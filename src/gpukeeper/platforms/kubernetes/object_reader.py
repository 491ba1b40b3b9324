"""Reads one object with what is above and below it, and what blocks its removal."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import finalizers, gpus, translate
from gpukeeper.platforms.kubernetes.bulk import Bulk
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.controllers import Controllers
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.namespaces import NamespaceFacts, facts_of, unreadable
from gpukeeper.platforms.kubernetes.other_owners import OtherOwners, kept_for_dependent
from gpukeeper.platforms.kubernetes.owners import climb, descendants
from gpukeeper.platforms.kubernetes.pod_totals import PodTotals
from gpukeeper.platforms.kubernetes.removals import PendingRemovals
from gpukeeper.platforms.kubernetes.server_clock import ServerClock
from gpukeeper.platforms.kubernetes.settings import settings_of
from gpukeeper.platforms.kubernetes.tree import Climb, Descendants
from gpukeeper.platforms.kubernetes.walk import Namespace
from gpukeeper.platforms.kubernetes.wire import Pod, Root, when

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
        self._namespaces: dict[str, tuple[float, Namespace | Unknown]] = {}

    def follow(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def reading(self) -> translate.TranslationSettings:
        return translate.TranslationSettings.of(self._policy)

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
                found: Namespace | Unknown = await self._cluster.get(f"/api/v1/namespaces/{name}", Namespace)
            except PlatformError as problem:
                found = Unknown(str(problem))
            read = self._namespaces[name] = (now, found)
        if isinstance(read[1], Unknown):
            return unreadable(name, read[1].why)
        return facts_of(read[1].metadata, settings_of(self._policy).environments, self._clock.at().now)


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

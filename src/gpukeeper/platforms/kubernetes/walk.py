"""Reads a cluster by lists: every kind page by page, children before the kinds that create them; which of many objects
are gone; and Services that an acceptance run left behind (reported only). What runs below a root is added up on the
way, so memory is bounded by the page and the running work. What could not be listed is unseen, and makes every
count that needs it unclear. A list proves absence only if it is complete and consistent, every item could be read
and has a uid, and it covers the namespace of the object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.clients.kubernetes.connect import QUICK, Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError, ListPage
from gpukeeper.clients.kubernetes.wire import Meta, Owner, PartialMetadata, Pod, Root, Wire, when
from gpukeeper.model.decision import Unseen
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.subject import Gone, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes import gpus
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME, KINDS, known_owner, makes_runs
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Matters, Served
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, POD
from gpukeeper.platforms.kubernetes.marks import (
    RUN_APPS,
    NamespaceFacts,
    TranslationSettings,
    ending_of_run,
    is_of_run,
    namespace_facts,
    unreadable_namespace,
)
from gpukeeper.platforms.kubernetes.owners import (
    LIST,
    ONE,
    OtherOwners,
    kept_for_dependent,
    other_owners,
)
from gpukeeper.platforms.kubernetes.translate import (
    CLUSTER,
    ONLY_RUN,
    SHOWN,
    Observation,
    ending_of,
    owner_of,
    pod_subject,
    ran,
    root_subject,
)


class WalkSettings(msgspec.Struct, frozen=True):
    """The part of the policy that a walk needs."""

    namespaces: tuple[str, ...]  # patterns
    environments: Mapping[str, str]
    reading: TranslationSettings
    page: int = 500
    count_dead: bool = False  # pods that ended are counted below their roots, too

    @property
    def named(self) -> tuple[str, ...] | None:
        """Only these namespaces, each listed separately. None: the whole cluster, filtered by pattern."""
        if any(set(pattern) & set("*?[") for pattern in self.namespaces):
            return None
        return self.namespaces

    def covers(self, namespace: str) -> bool:
        return any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)


class Subtree(msgspec.Struct):
    """What was found below an owner that is not listed yet."""

    totals: PodTotals
    owner: Owner
    sample: Pod | None = None  # one of the pods that hold GPUs


class ClusterWalk:
    def __init__(
        self,
        cluster: Cluster,
        discovery: ApiDiscovery,
        wanted: WalkSettings,
        at: Observation,
        owners: OtherOwners | None = None,
    ) -> None:
        self._cluster, self._discovery, self._wanted, self._at = cluster, discovery, wanted, at
        self._owners = owners or OtherOwners(cluster, discovery)
        self._reading = wanted.reading
        self.unseen: list[Unseen] = []
        self.parts: dict[str, Owner] = {}  # by uid of a living child: what owns it
        self.holders: dict[str, list[tuple[str, str, str | None]]] = {}  # by uid of a root: its pods that hold GPUs
        self.dependents: dict[str, str] = {}  # by uid of an owner that does not control it: something that lives
        self._facts: dict[str, NamespaceFacts] = {}
        self._below: dict[str, Subtree] = {}  # by uid of the owner
        self._ran: set[str] = set()  # uids of owners with a child that has run
        self._unlisted: dict[str, str] = {}  # by kind: why not all of it was listed

    async def pages(self) -> AsyncIterator[tuple[list[Subject], list[Root | Pod]]]:
        """Subjects, with the objects they were made of."""
        await self._read_namespaces()
        self._owners.begin()
        for kind in KINDS:
            if not self._lists(kind):
                continue
            async for items in self._list(kind):
                ttl_field = await self._discovery.ttl_field(kind, items)
                self._reading = msgspec.structs.replace(self._wanted.reading, ttl_field=ttl_field)
                made: list[Subject] = []
                sources: list[Root | Pod] = []
                for item in items:
                    subject = self._pod(item) if isinstance(item, Pod) else self._root(kind, item)
                    if subject is not None:
                        made.append(subject)
                        sources.append(item)
                yield await self._with_owners(made, sources), sources
        left = self._left_behind()
        yield left, []

    async def _with_owners(self, subjects: list[Subject], sources: Sequence[Root | Pod]) -> list[Subject]:
        needed = dict(await self._owners.keeping_each(one.metadata for one in sources))
        for one in subjects:
            if (dependent := self.dependents.get(one.ref.uid)) is not None:
                needed.setdefault(one.ref.uid, kept_for_dependent(dependent))
        return [
            msgspec.structs.replace(one, needed=needed[one.ref.uid]) if one.ref.uid in needed else one
            for one in subjects
        ]

    def _lists(self, kind: Kind) -> bool:
        """What is never a workload itself is listed only if it is between a root and pods that were found."""
        return (
            kind.matters is not Matters.NEVER
            or kind.in_runs
            or any(_owner(one) is kind for one in self._below.values())
        )

    async def _list(self, kind: Kind) -> AsyncIterator[Sequence[Root | Pod]]:
        version = await self._discovery.served(kind)
        if version is None:
            return
        if isinstance(version, Unknown):
            self._not_seen(kind, kind.plural, version.why)
            return
        type_: type[Root | Pod] = kind.type_
        for namespace in self._wanted.named or (None,):
            what = kind.plural if namespace is None else f"{kind.plural} in {namespace}"
            pages = self._cluster.pages(kind.path(version, namespace), type_, limit=self._wanted.page)
            try:
                async for page in pages:
                    self._problems(kind, what, page)
                    yield [one for one in page.items if self._wanted.covers(one.metadata.namespace)]
            except PlatformError as problem:
                self._not_seen(kind, what, str(problem))

    @property
    def saw_pods(self) -> bool:
        """All of them: only then can none of something be left."""
        return POD.name not in self._unlisted

    def _problems(self, kind: Kind, what: str, page: ListPage[Root | Pod]) -> None:
        for problem in page.problems:
            self._not_seen(kind, what, problem)
        if page.inconsistent:
            self._not_seen(kind, what, "the list expired before its end; the rest is of a later version")

    def _not_seen(self, kind: Kind, what: str, why: str) -> None:
        self._unlisted.setdefault(kind.name, f"{what} could not be listed completely: {why}")
        if all(one.what != what for one in self.unseen):
            self.unseen.append(Unseen(what, why))

    async def _read_namespaces(self) -> None:
        """Whose each is and which environment. One that may not be read has neither."""
        now = self._at.now
        for name in self._wanted.named or ():
            try:
                found = await self._cluster.get(f"/api/v1/namespaces/{name}", PartialMetadata)
                self._facts[name] = namespace_facts(found.metadata, self._wanted.environments, now)
            except PlatformError as problem:
                self._facts[name] = unreadable_namespace(name, str(problem))
        if self._wanted.named is None:
            try:
                async for page in self._cluster.pages("/api/v1/namespaces", PartialMetadata, limit=self._wanted.page):
                    for one in page.items:
                        self._facts[one.metadata.name] = namespace_facts(one.metadata, self._wanted.environments, now)
            except PlatformError as problem:
                self._facts_missing = str(problem)

    _facts_missing = "it is not in the list of namespaces"

    def _of(self, namespace: str) -> NamespaceFacts:
        found = self._facts.get(namespace)
        return found if found is not None else unreadable_namespace(namespace, self._facts_missing)

    def _note_dependent(self, kind: Kind, meta: Meta) -> None:
        """It lives, and the garbage collector would delete it together with an owner that does not control it."""
        for owner in other_owners(meta):
            self.dependents.setdefault(owner.uid, f"{kind.kind} {meta.name}")

    def _pod(self, pod: Pod) -> Subject | None:
        owner = pod.metadata.owner
        if pod.status.phase not in OVER_PHASES:
            self._note_dependent(POD, pod.metadata)
        if owner is None or makes_runs(owner.api_version, owner.kind):
            return pod_subject(pod, self._of(pod.metadata.namespace), self._at, self._wanted.reading, None)
        if known_owner(owner.api_version, owner.kind) is None:
            return self._of_unknown_kind(pod, owner)
        over = pod.status.phase in OVER_PHASES
        if not over or self._wanted.count_dead:
            requested = gpus.requested(pod.spec)
            below = self._below.setdefault(owner.uid, Subtree(PodTotals(), owner))
            below.totals.add_pod(pod, requested)
            if requested and not over and pod.spec.node_name:
                below.sample = below.sample or pod
        if over and pod.metadata.deletion_timestamp and pod.metadata.finalizers:
            # Ended, deleted, and blocked, perhaps by an owner that is gone: reading it alone decides.
            part = Unknown(f"it is owned by {owner.kind} {owner.name}")
            return pod_subject(pod, self._of(pod.metadata.namespace), self._at, self._wanted.reading, part)
        return None

    def _of_unknown_kind(self, pod: Pod, owner: Owner) -> Subject | None:
        """Part of a kind we do not know: shown where it has GPUs, and kept."""
        if pod.status.phase in OVER_PHASES or not gpus.requested(pod.spec):
            return None
        return pod_subject(pod, self._of(pod.metadata.namespace), self._at, self._wanted.reading, _unknown_owner(owner))

    def _root(self, kind: Kind, root: Root) -> Subject | None:
        meta = root.metadata
        if meta.owner_references and ending_of(kind, root, self._at.now)[0].over is not True:
            self._note_dependent(kind, meta)
        below = self._below.pop(meta.uid, None)
        totals = below.totals if below is not None else PodTotals()
        totals.ran = meta.uid in self._ran
        owner = meta.owner
        part_of: Unknown | None = None
        if owner is not None and not makes_runs(owner.api_version, owner.kind):
            if known_owner(owner.api_version, owner.kind) is not None:
                self._add_to_owner(root, owner, below)
                return None
            part_of = _unknown_owner(owner)
        if not self._matters(kind, root, totals):
            return None
        totals.unclear = totals.unclear or self._why_unlisted(kind)
        totals.dead_counted = self._wanted.count_dead
        if totals.pods:
            self.holders[meta.uid] = totals.pods
        return root_subject(kind, root, totals, self._of(meta.namespace), self._at, self._reading, part_of)

    def _add_to_owner(self, part: Root, owner: Owner, below: Subtree | None) -> None:
        self.parts[part.metadata.uid] = owner
        if part.metadata.uid in self.dependents:
            self.dependents.setdefault(owner.uid, self.dependents[part.metadata.uid])
        if part.metadata.uid in self._ran or ran(part.status):
            self._ran.add(owner.uid)
        if below is not None:
            above = self._below.setdefault(owner.uid, Subtree(PodTotals(), owner))
            above.totals.add(below.totals)
            above.sample = above.sample or below.sample

    def _matters(self, kind: Kind, root: Root, totals: PodTotals) -> bool:
        """To rules. An acceptance run does, whatever it is made of."""
        if is_of_run(kind, root.metadata.labels):
            return True
        if kind.matters is Matters.WITH_GPU:
            return bool(totals.devices) or gpus.any_requested(kind.templates(root.spec))
        return kind.matters is Matters.ALWAYS

    def _why_unlisted(self, kind: Kind) -> str | None:
        """Why what is below this kind may be more than was seen."""
        return next((self._unlisted[child.name] for child in kind.below if child.name in self._unlisted), None)

    def _left_behind(self) -> list[Subject]:
        """Pods that hold GPUs and whose owner was not listed. The garbage collector removes them; if not, they are
        shown. An incomplete list proves nothing."""
        if self._unlisted:
            return []
        left = [one for one in self._below.values() if one.sample is not None and one.totals.holding]
        return [self._orphan(one) for one in left if (kind := _owner(one)) and kind.matters is not Matters.NEVER]

    def _orphan(self, one: Subtree) -> Subject:
        assert one.sample is not None
        gone = Unknown(f"its owner {one.owner.kind} {one.owner.name} was not found; the cluster should remove it")
        namespace = self._of(one.sample.metadata.namespace)
        return pod_subject(one.sample, namespace, self._at, self._wanted.reading, gone)


def _owner(below: Subtree) -> Kind | None:
    return known_owner(below.owner.api_version, below.owner.kind)


def _unknown_owner(owner: Owner) -> Unknown:
    return Unknown(
        f"it belongs to {owner.kind} {owner.name} ({owner.api_version}), a kind that gpukeeper does not know"
    )


FEW_REFS = 5  # of one kind in one list: each is read separately
ABSENCE_PAGE = 500


async def absent(cluster: Cluster, served: Served, refs: Iterable[Ref], *, everywhere: bool) -> list[Ref]:
    """Those that are provably gone. `everywhere`: the whole cluster may be listed, so one list of each kind is enough;
    otherwise each namespace is listed by itself."""
    groups: dict[tuple[str, str | None], list[Ref]] = {}
    for ref in refs:
        groups.setdefault((ref.kind, None if everywhere else ref.namespace), []).append(ref)
    found: list[Ref] = []
    for (name, namespace), group in groups.items():
        kind = BY_NAME.get(name)
        version = await served(kind) if kind is not None else None
        if kind is None or isinstance(version, Unknown):
            continue
        if version is None:
            found += group  # its kind was uninstalled, and everything of it with that
            continue
        try:
            if len(group) > FEW_REFS:
                found += await _not_listed(cluster, kind.path(version, namespace), group)
            else:
                found += [ref for ref in group if await _not_found(cluster, kind, version, ref)]
        except PlatformError:
            continue  # nothing is proven
    return found


async def _not_listed(cluster: Cluster, path: str, refs: Sequence[Ref]) -> list[Ref]:
    left = {ref.uid: ref for ref in refs}
    async for page in cluster.pages(path, PartialMetadata, limit=ABSENCE_PAGE, accept=LIST):
        if page.problems or page.inconsistent or any(not one.metadata.uid for one in page.items):
            return []
        for one in page.items:
            left.pop(one.metadata.uid, None)
    return list(left.values())


async def _not_found(cluster: Cluster, kind: Kind, version: str, ref: Ref) -> bool:
    try:
        seen = await cluster.get(kind.path(version, ref.namespace, ref.name), PartialMetadata, accept=ONE)
    except ApiError as error:
        if error.is_not_found:
            return True
        raise
    return bool(seen.metadata.uid) and seen.metadata.uid != ref.uid


SERVICE = Kind(kind="Service", plural="services", versions=("v1",), runs=True)
SERVICES_OF_RUNS = f"app in ({','.join(sorted(RUN_APPS))})"
HEADLESS = "None"
ONLY_REPORTED = "gpukeeper does not remove Services; delete it with kubectl"


class _ServiceSpec(Wire, frozen=True):
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    selector: Mapping[str, str] | None = None


class Service(PartialMetadata, frozen=True, gc=True):
    spec: _ServiceSpec = _ServiceSpec()


class _AnyObject(Wire, frozen=True):
    """That there is one is enough."""


async def services_of_runs(cluster: Cluster, wanted: WalkSettings, now: datetime) -> AsyncIterator[Service]:
    """Those whose run has ended and that have no pods left."""
    for namespace in wanted.named or (None,):
        listed = cluster.pages(
            SERVICE.path("v1", namespace), Service, limit=wanted.page, deadline=QUICK, labelSelector=SERVICES_OF_RUNS
        )
        try:
            async for page in listed:
                for one in page.items:
                    if wanted.covers(one.metadata.namespace) and await _is_left_by_run(cluster, one, now):
                        yield one
        except PlatformError:
            continue  # nothing is decided by them: no right on Services is no reason to doubt the rest


async def read_service(cluster: Cluster, ref: Ref, now: datetime) -> Service | Gone | Unknown:
    try:
        found = await cluster.get(SERVICE.path("v1", ref.namespace, ref.name), Service)
        if found.metadata.uid == ref.uid:
            left = await _is_left_by_run(cluster, found, now)
            return found if left else Unknown("it is no longer a Service that an acceptance run left behind")
    except ApiError as error:
        if not error.is_not_found:
            return Unknown(str(error))
    except PlatformError as error:
        return Unknown(str(error))
    return Gone(ref, now)


async def _is_left_by_run(cluster: Cluster, service: Service, now: datetime) -> bool:
    meta, chosen = service.metadata, service.spec.selector
    if meta.owner_references or meta.deletion_timestamp or service.spec.cluster_ip != HEADLESS or not chosen:
        return False  # it goes with its owner, or is going, or serves something else
    if ending_of_run(SERVICE, meta, now)[0].over is not True:
        return False
    labels = ",".join(f"{key}={value}" for key, value in chosen.items())
    pods = cluster.pages(POD.path("v1", meta.namespace), _AnyObject, limit=1, deadline=QUICK, labelSelector=labels)
    async with aclosing(pods):
        return not [one async for page in pods for one in page.items]


def service_subject(
    service: Service, namespace: NamespaceFacts, at: Observation, settings: TranslationSettings
) -> Subject:
    meta = service.metadata
    owned = owner_of(meta, namespace, settings.owner_labels)
    created = when(meta.creation_timestamp)
    age = "of unknown age"
    if isinstance(created, datetime):
        age = f"created {in_words(max(at.now - created, timedelta()))} ago"
    whose = owned.owner[:SHOWN] if isinstance(owned.owner, str) else "unknown"
    label = (meta.labels or {}).get("app", "")
    words = (
        f"a headless Service of an acceptance run (app={label}), {age}, owner {whose}: no pod of the run is left."
        f" gpukeeper does not remove Services; delete it with kubectl -n {meta.namespace} delete service {meta.name}"
    )
    return Subject(
        seen=Seen(at.ref(SERVICE, meta), ONLY_RUN, meta.resource_version, at.now),
        shape=Shape.REMNANT,
        state=State.ENDED,
        owner=owned.owner,
        owner_verified=owned.verified,
        class_=CLUSTER,
        environment=namespace.environment,
        created=created if created is not None else Unknown("the cluster reports no creation time"),
        size=0,
        evidence=owned.evidence,
        findings=(*owned.findings, words),
        labels=meta.labels or {},
    )

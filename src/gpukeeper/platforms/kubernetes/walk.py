"""Lists a whole cluster: every kind page by page, children before the kinds that create them.

What runs below a root is added up on the way, so that memory is bounded by the page and the running work, not by what
ended. What could not be listed is unseen, and makes every count that needs it unclear.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.model.decision import Unseen
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import acceptance, gpus
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.decoding import ListPage
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS, known_owner, makes_runs
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Matters
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, POD
from gpukeeper.platforms.kubernetes.namespaces import NamespaceFacts, facts_of, unreadable
from gpukeeper.platforms.kubernetes.other_owners import OtherOwners, kept_for_dependent, others
from gpukeeper.platforms.kubernetes.pod_totals import PodTotals
from gpukeeper.platforms.kubernetes.translate import (
    Observation,
    TranslationSettings,
    ending_of,
    pod_subject,
    ran,
    root_subject,
)
from gpukeeper.platforms.kubernetes.wire import Meta, Owner, Pod, Root, Wire


class Namespace(Wire, frozen=True, gc=True):
    metadata: Meta = Meta()


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
                found = await self._cluster.get(f"/api/v1/namespaces/{name}", Namespace)
                self._facts[name] = facts_of(found.metadata, self._wanted.environments, now)
            except PlatformError as problem:
                self._facts[name] = unreadable(name, str(problem))
        if self._wanted.named is None:
            try:
                async for page in self._cluster.pages("/api/v1/namespaces", Namespace, limit=self._wanted.page):
                    for one in page.items:
                        self._facts[one.metadata.name] = facts_of(one.metadata, self._wanted.environments, now)
            except PlatformError as problem:
                self._facts_missing = str(problem)

    _facts_missing = "it is not in the list of namespaces"

    def _of(self, namespace: str) -> NamespaceFacts:
        found = self._facts.get(namespace)
        return found if found is not None else unreadable(namespace, self._facts_missing)

    def _note_dependent(self, kind: Kind, meta: Meta) -> None:
        """It lives, and the garbage collector would delete it together with an owner that does not control it."""
        for owner in others(meta):
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
        if acceptance.is_run(kind, root.metadata.labels):
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

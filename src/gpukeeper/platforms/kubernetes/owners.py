"""Who is part of what: up to the root by controller ownerReferences, with a look at every owner, and down by owner uid.

Names are reused, so a name never proves anything here: an owner of another uid is gone, and a child is found by the uid
it names. What could not be read is said (`Climb.unknown`, `Descendants.unseen`); it is never taken for absent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS, known_owner, makes_runs
from gpukeeper.platforms.kubernetes.kinds.job import JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER
from gpukeeper.platforms.kubernetes.kinds.training_operator import V1_KINDS
from gpukeeper.platforms.kubernetes.kinds.trainjob import TRAINJOB
from gpukeeper.platforms.kubernetes.wire import Meta, Owner, Pod, Root

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]  # `Discovery.served`

HIGHEST = 8  # owners above one another; the longest chain that we know has four
MOST_UIDS = 40  # in one label selector: it travels in the address
LONGEST_LABEL = 63  # a longer name is in no label
PAGE = 500
JOB_UID = "batch.kubernetes.io/controller-uid"


class Node(msgspec.Struct, frozen=True):
    """One object of a tree, as it was just read."""

    kind: Kind
    seen: Root | Pod

    @property
    def meta(self) -> Meta:
        return self.seen.metadata

    @property
    def words(self) -> str:
        """How people write it: jobset/run-7."""
        return f"{self.kind.name}/{self.meta.name}"


class Climb(msgspec.Struct, frozen=True):
    """What is above one object."""

    above: tuple[Node, ...] = ()  # the nearest first
    gone: Owner | None = None  # the topmost seen names this owner, and it is proven gone
    made_by: Owner | None = None  # a generator made the topmost: the run is the root, its generator never
    unknown: Unknown | None = None  # an owner that we do not know or could not read; who the root is, is not known

    @property
    def root(self) -> Node | Unknown | None:
        """None: it is a root itself."""
        if self.unknown is not None:
            return self.unknown
        return self.above[-1] if self.above else None

    @property
    def owner_gone(self) -> bool | Unknown:
        """The nearest owner alone: of a Job that is there, the JobSet may be gone."""
        if self.above:
            return False
        return self.unknown if self.unknown is not None else self.gone is not None


async def climb(cluster: Cluster, served: Served, meta: Meta) -> Climb:
    """Up to the root, with one GET for each owner."""
    above: list[Node] = []
    climbed = {meta.uid}
    while (owner := meta.owner) is not None:
        if makes_runs(owner.api_version, owner.kind):
            return Climb(tuple(above), made_by=owner)
        if owner.uid in climbed or len(above) == HIGHEST:
            return Climb(
                tuple(above), unknown=Unknown(f"the owners of {meta.name} go round in a circle, or have no end")
            )
        found = await _owner(cluster, served, owner, meta.namespace)
        if isinstance(found, Unknown):
            return Climb(tuple(above), unknown=found)
        if found is None:
            return Climb(tuple(above), gone=owner)
        climbed.add(owner.uid)
        above.append(found)
        meta = found.meta
    return Climb(tuple(above))


async def root_of(cluster: Cluster, served: Served, meta: Meta) -> Node | Unknown | None:
    """The topmost living owner. None: it is the root itself. Whether an owner is gone, only `climb` tells."""
    return (await climb(cluster, served, meta)).root


async def _owner(cluster: Cluster, served: Served, owner: Owner, namespace: str) -> Node | Unknown | None:
    """None: proven gone."""
    called = f"{owner.kind} {owner.name}"
    kind = known_owner(owner.api_version, owner.kind)
    if kind is None:
        return Unknown(f"it belongs to {called} ({owner.api_version}), a kind that gpukeeper does not know")
    version = await served(kind)
    if isinstance(version, Unknown):
        return Unknown(f"it belongs to {called}, which cannot be looked at: {version.why}")
    if version is None:
        return Unknown(f"it belongs to {called}, a kind that this cluster does not serve")
    try:
        seen = await cluster.get(kind.path(version, namespace, owner.name), Root)
    except ApiError as error:
        if error.says_gone:
            return None
        if error.says_refused:
            return Unknown(f"it belongs to {called}, which may not be read: {error}")
        return Unknown(f"it belongs to {called}, which could not be read: {error}")
    except PlatformError as error:
        return Unknown(f"it belongs to {called}, which could not be read: {error}")
    if not seen.metadata.uid:
        return Unknown(f"it belongs to {called}, and what was answered has no uid")
    return Node(kind, seen) if seen.metadata.uid == owner.uid else None


class Descendants(msgspec.Struct, frozen=True):
    """Everything below one object, by the uid of its owner."""

    below: Mapping[str, tuple[Node, ...]] = {}
    unseen: tuple[str, ...] = ()  # sentences: what could not be listed
    narrowed: bool = False  # asked for by labels, which anybody can change

    @property
    def complete(self) -> bool:
        """What is not in it is not there."""
        return not self.unseen and not self.narrowed

    def of(self, uid: str) -> tuple[Node, ...]:
        return self.below.get(uid, ())

    def every(self) -> Iterator[Node]:
        for nodes in self.below.values():
            yield from nodes

    def pods(self) -> Iterator[Pod]:
        for node in self.every():
            if isinstance(node.seen, Pod):
                yield node.seen


async def descendants(
    cluster: Cluster,
    served: Served,
    kind: Kind,
    meta: Meta,
    *,
    narrow: bool = False,
    page: int = PAGE,
    seen: Root | None = None,
) -> Descendants:
    """What is below it, of the kinds that its kind makes, found by owner uid in its namespace, page by page.

    `narrow` asks the API for less by the labels that controllers put on what they make: fit for looking at one of ten
    thousand, not for proving that nothing is left. Either way only what names the owner's uid counts. `seen`: the whole
    object, where it was just read.
    """
    below: dict[str, list[Node]] = {}
    owners: dict[str, Node] = {meta.uid: Node(kind, seen or Root(metadata=meta))}
    unseen: list[str] = []
    wanted = kind.below
    for child in (one for one in reversed(KINDS) if one in wanted):  # makers first
        makers = [node for node in owners.values() if child in node.kind.children]
        if not makers:
            continue
        found, problems = await _children(cluster, served, child, makers, meta.namespace, narrow, page)
        unseen += problems
        for owner, node in found:
            below.setdefault(owner, []).append(node)
            owners.setdefault(node.meta.uid, node)
    return Descendants({owner: tuple(nodes) for owner, nodes in below.items()}, tuple(unseen), narrow)


async def _children(
    cluster: Cluster, served: Served, child: Kind, makers: list[Node], namespace: str, narrow: bool, page: int
) -> tuple[list[tuple[str, Node]], list[str]]:
    """Pairs of owner uid and what it owns, and what went wrong."""
    version = await served(child)
    if version is None:
        return [], []  # not installed: there are none
    if isinstance(version, Unknown):
        return [], [f"{child.plural}: {version.why}"]
    uids = {node.meta.uid for node in makers}
    found: dict[str, tuple[str, Node]] = {}
    problems: list[str] = []
    path = child.path(version, namespace)
    for query in _queries(child, makers) if narrow else [{}]:
        try:
            async for nodes, said in _listed(cluster, child, path, page, query):
                problems += said
                found |= {n.meta.uid: (owner, n) for n in nodes if (owner := _owned_by(n.meta, uids)) is not None}
        except PlatformError as error:
            problems.append(f"{child.plural} in {namespace} could not be listed: {error}")
    return list(found.values()), problems


async def _listed(
    cluster: Cluster, child: Kind, path: str, page: int, query: Mapping[str, str]
) -> AsyncIterator[tuple[list[Node], list[str]]]:
    type_: type[Root] | type[Pod] = Pod if child is POD else Root
    labels, fields = query.get("labelSelector"), query.get("fieldSelector")
    async for one in cluster.pages(path, type_, limit=page, labelSelector=labels, fieldSelector=fields):
        said = [f"{child.plural}: {problem}" for problem in one.problems]
        if one.inconsistent:
            said.append(f"the list of {child.plural} broke off and was continued at a later state")
        yield [Node(child, seen) for seen in one.items], said


def _owned_by(meta: Meta, uids: Iterable[str]) -> str | None:
    return next((one.uid for one in meta.owner_references or () if one.uid in uids), None)


def _queries(child: Kind, makers: list[Node]) -> list[dict[str, str]]:
    """One query for each kind of maker, or a single one for everything where we know no label for one of them."""
    by_kind: dict[str, list[Node]] = {}
    for node in makers:
        by_kind.setdefault(node.kind.name, []).append(node)
    asked = [_query(child, nodes[0].kind, nodes) for nodes in by_kind.values()]
    return [{}] if any(one is None for one in asked) else [one for one in asked if one is not None]


def _query(child: Kind, maker: Kind, nodes: list[Node]) -> dict[str, str] | None:
    if len(nodes) > MOST_UIDS or any(len(node.meta.name) > LONGEST_LABEL for node in nodes):
        return None
    names = ",".join(sorted(node.meta.name for node in nodes))
    if child is JOBSET and maker is TRAINJOB and len(nodes) == 1:
        return {"fieldSelector": f"metadata.name={names}"}  # of the same name in every release
    if child is JOB and maker is JOBSET:
        return {"labelSelector": f"jobset.sigs.k8s.io/jobset-name in ({names})"}
    if child is POD and maker is JOB:
        if not all(_labels_its_pods(node) for node in nodes):
            return None
        uids = ",".join(sorted(node.meta.uid for node in nodes))
        return {"labelSelector": f"{JOB_UID} in ({uids})"}
    if child is POD and maker is RAYCLUSTER:
        return {"labelSelector": f"ray.io/cluster in ({names})"}
    if child is POD and maker in V1_KINDS:
        return {"labelSelector": f"training.kubeflow.org/job-name in ({names})"}
    return None


def _labels_its_pods(job: Node) -> bool:
    """By its own selector. One that was made before 1.27 has an older label, and whoever sets `manualSelector` any."""
    selector = job.seen.spec.selector if isinstance(job.seen, Root) else None
    return selector is None or JOB_UID in (selector.match_labels or {})

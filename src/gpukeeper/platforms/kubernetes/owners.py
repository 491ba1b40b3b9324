"""Owners and children: up to the root by controller ownerReferences, reading every owner, and down by owner uid; and
owners that do not control an object: while one of them exists the object is kept, as the garbage collector would.
Names are reused and prove nothing: an owner with another uid no longer exists. What could not be read is reported,
never treated as absent; an owner that could not be checked counts as existing. Generators such as CronJob do not
keep their runs: `kubectl create job --from=cronjob/NAME` writes the reference without `controller: true`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from gpukeeper.clients.kubernetes.api import Resource
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Meta, Owner, PartialMetadata, Pod, Root
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS, known_owner, makes_runs
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Served, TreeNode

if TYPE_CHECKING:
    from gpukeeper.clients.kubernetes.connect import Cluster


class Climb(msgspec.Struct, frozen=True):
    """What is above one object."""

    above: tuple[TreeNode, ...] = ()  # the nearest first
    gone: Owner | None = None  # the topmost seen names this owner, and it is proven gone
    made_by: Owner | None = None  # a generator made the topmost: the run is the root, its generator never
    unknown: Unknown | None = None  # an owner that we do not know or could not read; who the root is, is unknown

    @property
    def root(self) -> TreeNode | Unknown | None:
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


class Descendants(msgspec.Struct, frozen=True):
    """Everything below one object, by the uid of its owner."""

    below: Mapping[str, tuple[TreeNode, ...]] = {}
    unseen: tuple[str, ...] = ()  # sentences: what could not be listed
    narrowed: bool = False  # selected by labels, which users can change

    @property
    def complete(self) -> bool:
        """What is not in it is not there."""
        return not self.unseen and not self.narrowed

    def of(self, uid: str) -> tuple[TreeNode, ...]:
        return self.below.get(uid, ())

    def every(self) -> Iterator[TreeNode]:
        for nodes in self.below.values():
            yield from nodes

    def pods(self) -> Iterator[Pod]:
        for node in self.every():
            if isinstance(node.seen, Pod):
                yield node.seen


HIGHEST = 8  # owners above one another; the longest chain that we know has four
MOST_UIDS = 40  # in one label selector: it travels in the address
LONGEST_LABEL = 63  # a longer name is in no label
PAGE = 500


async def climb(cluster: Cluster, served: Served, meta: Meta) -> Climb:
    """Up to the root, with one GET for each owner."""
    above: list[TreeNode] = []
    climbed = {meta.uid}
    while (owner := meta.owner) is not None:
        if makes_runs(owner.api_version, owner.kind):
            return Climb(tuple(above), made_by=owner)
        if owner.uid in climbed or len(above) == HIGHEST:
            return Climb(
                tuple(above),
                unknown=Unknown(f"the owners of {meta.name} form a cycle, or a chain of more than {HIGHEST}"),
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


async def _owner(cluster: Cluster, served: Served, owner: Owner, namespace: str) -> TreeNode | Unknown | None:
    """None: proven gone."""
    called = f"{owner.kind} {owner.name}"
    kind = known_owner(owner.api_version, owner.kind)
    if kind is None:
        return Unknown(f"it belongs to {called} ({owner.api_version}), a kind that gpukeeper does not know")
    version = await served(kind)
    if isinstance(version, Unknown):
        return Unknown(f"it belongs to {called}, which cannot be read: {version.why}")
    if version is None:
        return Unknown(f"it belongs to {called}, a kind that this cluster does not serve")
    try:
        # Of a pod that owns something no more than of a root is needed.
        seen = await cluster.get(kind.path(version, namespace, owner.name), kind.root)
    except ApiError as error:
        if error.is_not_found:
            return None
        if error.is_denied:
            return Unknown(f"it belongs to {called}, which may not be read: {error}")
        return Unknown(f"it belongs to {called}, which could not be read: {error}")
    except PlatformError as error:
        return Unknown(f"it belongs to {called}, which could not be read: {error}")
    if not seen.metadata.uid:
        return Unknown(f"it belongs to {called}, but the response has no uid")
    return TreeNode(kind, seen) if seen.metadata.uid == owner.uid else None


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
    below: dict[str, list[TreeNode]] = {}
    owners: dict[str, TreeNode] = {meta.uid: TreeNode(kind, seen or Root(metadata=meta))}
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
    cluster: Cluster, served: Served, child: Kind, makers: list[TreeNode], namespace: str, narrow: bool, page: int
) -> tuple[list[tuple[str, TreeNode]], list[str]]:
    """Pairs of owner uid and what it owns, and what went wrong."""
    version = await served(child)
    if version is None:
        return [], []  # not installed: there are none
    if isinstance(version, Unknown):
        return [], [f"{child.plural}: {version.why}"]
    uids = {node.meta.uid for node in makers}
    found: dict[str, tuple[str, TreeNode]] = {}
    problems: list[str] = []
    path = child.path(version, namespace)
    for query in _queries(makers) if narrow else [{}]:
        try:
            async for nodes, said in _listed(cluster, child, path, page, query):
                problems += said
                found |= {n.meta.uid: (owner, n) for n in nodes if (owner := _owned_by(n.meta, uids)) is not None}
        except PlatformError as error:
            problems.append(f"{child.plural} in {namespace} could not be listed: {error}")
    return list(found.values()), problems


async def _listed(
    cluster: Cluster, child: Kind, path: str, page: int, query: Mapping[str, str]
) -> AsyncIterator[tuple[list[TreeNode], list[str]]]:
    labels, fields = query.get("labelSelector"), query.get("fieldSelector")
    async for one in cluster.pages(path, child.type_, limit=page, labelSelector=labels, fieldSelector=fields):
        problems = [f"{child.plural}: {problem}" for problem in one.problems]
        if one.inconsistent:
            problems.append(f"the list of {child.plural} expired and was continued at a later version")
        yield [TreeNode(child, seen) for seen in one.items], problems


def _owned_by(meta: Meta, uids: Iterable[str]) -> str | None:
    return next((one.uid for one in meta.owner_references or () if one.uid in uids), None)


def _queries(makers: list[TreeNode]) -> list[dict[str, str]]:
    """One query for each kind of maker, or a single one for everything where we know no label for one of them."""
    by_kind: dict[str, list[TreeNode]] = {}
    for node in makers:
        by_kind.setdefault(node.kind.name, []).append(node)
    queries = [_query(nodes) for nodes in by_kind.values()]
    return [{}] if any(one is None for one in queries) else [one for one in queries if one is not None]


def _query(nodes: list[TreeNode]) -> dict[str, str] | None:
    """Of one kind."""
    if len(nodes) > MOST_UIDS or any(len(node.meta.name) > LONGEST_LABEL for node in nodes):
        return None
    return nodes[0].kind.parts_query([node.seen for node in nodes])


FEW_OWNERS = 5  # owners of one kind in one namespace that are read one by one; more are listed
MOST_CALLS = 200  # in one pass
OWNERS_PAGE = 500
CACHE_TIME = timedelta(minutes=10)
CACHE_MAX = 50_000
SHOWN = 80  # characters of a foreign name
ONE, LIST = (
    f"application/json;as={kind};g=meta.k8s.io;v=v1,application/json"
    for kind in ("PartialObjectMetadata", "PartialObjectMetadataList")
)

Exists: TypeAlias = bool | Unknown


def other_owners(meta: Meta) -> tuple[Owner, ...]:
    """Its owners that do not control it, generators left out. The first controller is the one that `Meta.owner` is."""
    control = meta.owner
    return tuple(
        one for one in meta.owner_references or () if one is not control and not makes_runs(one.api_version, one.kind)
    )


class OtherOwners:
    """Results are cached for full passes, never for a re-check just before acting."""

    def __init__(self, cluster: Cluster, discovery: ApiDiscovery) -> None:
        self._cluster, self._discovery = cluster, discovery
        self._known: dict[str, tuple[float, Exists]] = {}  # by uid
        self._left = MOST_CALLS

    def begin(self) -> None:
        """A new full pass, with a new limit of calls."""
        self._left = MOST_CALLS
        if len(self._known) > CACHE_MAX:
            self._known.clear()

    async def keeping(self, meta: Meta) -> str | Unknown | None:
        """Which of its other owners keeps it. Reads each of them now."""
        found = other_owners(meta)
        if not found or meta.deletion_timestamp is not None:
            return None
        exists = {one.uid: await self._read(one, meta.namespace) for one in found}
        return _words(found, exists)

    async def keeping_each(self, metas: Iterable[Meta]) -> Mapping[str, str | Unknown]:
        """The same of many objects, by their uid; those that no other owner keeps are left out."""
        owned = [(meta, found) for meta in metas if not meta.deletion_timestamp and (found := other_owners(meta))]
        exists = await self._check({(meta.namespace, one.uid): one for meta, found in owned for one in found})
        kept = {meta.uid: _words(found, exists) for meta, found in owned}
        return {uid: words for uid, words in kept.items() if words is not None}

    async def _check(self, owners: Mapping[tuple[str, str], Owner]) -> dict[str, Exists]:
        exists: dict[str, Exists] = {}
        open_: dict[tuple[str, str, str], list[Owner]] = {}
        for (namespace, uid), owner in owners.items():
            at, known = self._known.get(uid, (None, None))
            if at is not None and known is not None and time.monotonic() - at < CACHE_TIME.total_seconds():
                exists[uid] = known
            else:
                open_.setdefault((owner.api_version, owner.kind, namespace), []).append(owner)
        for (_, _, namespace), group in open_.items():
            found = await self._check_group(group, namespace)
            exists |= found
            now = time.monotonic()
            self._known |= {uid: (now, one) for uid, one in found.items() if not isinstance(one, Unknown)}
        return exists

    async def _check_group(self, owners: Sequence[Owner], namespace: str) -> dict[str, Exists]:
        """Of one kind, named by objects of one namespace."""
        if len(owners) > FEW_OWNERS:
            listed = await self._listed(owners[0], namespace)
            if not isinstance(listed, Unknown):
                return {one.uid: one.uid in listed for one in owners}
        found: dict[str, Exists] = {}
        for one in owners:
            found[one.uid] = await self._read(one, namespace) if self._allowed() else _too_many()
        return found

    async def _listed(self, owner: Owner, namespace: str) -> set[str] | Unknown:
        """The uids of everything of its kind. Where that may not be listed, each is read by itself."""
        resource = await self._resource(owner)
        if isinstance(resource, Unknown):
            return resource
        uids: set[str] = set()
        try:
            async for page in self._cluster.pages(
                resource.path(namespace), PartialMetadata, limit=OWNERS_PAGE, accept=LIST
            ):
                if not self._allowed() or page.problems or page.inconsistent:
                    return Unknown(f"{resource.plural} could not be listed completely")
                uids |= {one.metadata.uid for one in page.items}
        except PlatformError as error:
            return Unknown(str(error))
        return uids

    async def _read(self, owner: Owner, namespace: str) -> Exists:
        resource = await self._resource(owner)
        if isinstance(resource, Unknown):
            return resource
        try:
            seen = await self._cluster.get(resource.path(namespace, owner.name), PartialMetadata, accept=ONE)
        except ApiError as error:
            if error.is_not_found:
                return False
            right = f"; gpukeeper needs `get` on {resource.words}" if error.is_denied else ""
            return Unknown(f"{error}{right}")
        except PlatformError as error:
            return Unknown(str(error))
        return seen.metadata.uid == owner.uid if seen.metadata.uid else Unknown("the response has no uid")

    async def _resource(self, owner: Owner) -> Resource | Unknown:
        if not (owner.api_version and owner.kind and owner.name and owner.uid):
            return Unknown("its ownerReference is incomplete")
        return await self._discovery.resource(owner.api_version, owner.kind)

    def _allowed(self) -> bool:
        self._left -= 1
        return self._left >= 0


def _words(owners: Sequence[Owner], exists: Mapping[str, Exists]) -> str | Unknown | None:
    """An owner that exists takes precedence over one that may exist."""
    there = next((one for one in owners if exists[one.uid] is True), None)
    if there is not None:
        return (
            f"its owner {called(there)} exists; it stays until that owner is deleted or the ownerReference is removed"
        )
    for one in owners:
        found = exists[one.uid]
        if isinstance(found, Unknown):
            return Unknown(f"whether its owner {called(one)} still exists is unknown: {found.why}")
    return None


def kept_for_dependent(dependent: str) -> str:
    return (
        f"{dependent} has not ended and names it as an owner, so the garbage collector would delete it as well; kept"
        " until that has ended or its ownerReference is removed"
    )


def called(owner: Owner) -> str:
    return f"{owner.kind[:SHOWN]} {owner.name[:SHOWN]} ({owner.api_version[:SHOWN]})"


def _too_many() -> Unknown:
    return Unknown(f"one pass makes at most {MOST_CALLS} calls to check owners; a later pass continues")

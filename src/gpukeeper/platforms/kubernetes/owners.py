"""Owners and children: up to the root by controller ownerReferences, reading every owner, and down by owner uid.

Names are reused, so a name proves nothing: an owner with another uid no longer exists, and children are found by uid.
What could not be read is reported (`Climb.unknown`, `Descendants.unseen`), never treated as absent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS, known_owner, makes_runs
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, TreeNode
from gpukeeper.platforms.kubernetes.tree import Climb, Descendants
from gpukeeper.platforms.kubernetes.wire import Meta, Owner, Root

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]  # `ApiDiscovery.served`

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

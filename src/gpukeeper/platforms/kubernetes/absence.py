"""Which of many objects are gone: read by lists, compared by uid.

A list proves absence only if it is complete and consistent, every item could be read and has a uid, and it covers the
namespace of the object. Any other list proves nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.other_owners import LIST, ONE, PartialMetadata

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

FEW = 5  # of one kind in one list: each is read separately
PAGE = 500

Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]  # `ApiDiscovery.served`


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
            if len(group) > FEW:
                found += await _not_listed(cluster, kind.path(version, namespace), group)
            else:
                found += [ref for ref in group if await _not_found(cluster, kind, version, ref)]
        except PlatformError:
            continue  # nothing is proven
    return found


async def _not_listed(cluster: Cluster, path: str, refs: Sequence[Ref]) -> list[Ref]:
    left = {ref.uid: ref for ref in refs}
    async for page in cluster.pages(path, PartialMetadata, limit=PAGE, accept=LIST):
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

"""Owners that do not control an object. They do not decide what its root is, but while one of them exists the object is
kept, as the garbage collector would keep it.

Only metadata is read, by apiVersion, kind and name, and compared by uid. An owner that could not be checked counts as
existing until it can be. Generators such as CronJob do not keep their runs, with or without `controller: true`:
`kubectl create job --from=cronjob/NAME` writes the reference without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery, Resource
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.catalog import makes_runs
from gpukeeper.platforms.kubernetes.wire import Meta, Owner, Wire

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

FEW = 5  # owners of one kind in one namespace that are read one by one; more are listed
MOST_CALLS = 200  # in one pass
PAGE = 500
CACHE_TIME = timedelta(minutes=10)
CACHE_MAX = 50_000
SHOWN = 80  # characters of a foreign name
ONE, LIST = (
    f"application/json;as={kind};g=meta.k8s.io;v=v1,application/json"
    for kind in ("PartialObjectMetadata", "PartialObjectMetadataList")
)

Exists: TypeAlias = bool | Unknown


class PartialMetadata(Wire, frozen=True, gc=True):
    """Metadata only, of any kind."""

    metadata: Meta = Meta()


def others(meta: Meta) -> tuple[Owner, ...]:
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
        found = others(meta)
        if not found or meta.deletion_timestamp is not None:
            return None
        exists = {one.uid: await self._read(one, meta.namespace) for one in found}
        return _words(found, exists)

    async def keeping_each(self, metas: Iterable[Meta]) -> Mapping[str, str | Unknown]:
        """The same of many objects, by their uid; those that no other owner keeps are left out."""
        owned = [(meta, found) for meta in metas if not meta.deletion_timestamp and (found := others(meta))]
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
        if len(owners) > FEW:
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
            async for page in self._cluster.pages(resource.path(namespace), PartialMetadata, limit=PAGE, accept=LIST):
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

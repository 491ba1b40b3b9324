"""Objects of a cluster, by kind and name, as the types that a caller names. What is written is plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.discovery import PODS, Resource, ServedKinds
from gpukeeper.clients.kubernetes.exchange import CONFLICT, ApiError
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
Manifest: TypeAlias = Mapping[str, Any]
PatchType: TypeAlias = Literal["merge", "json", "strategic"]
LOG = timedelta(seconds=60)


class Listing(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A list that was read to its end. `complete` False: an object can be missing, although it exists."""

    items: Sequence[T]
    complete: bool = True
    problems: tuple[str, ...] = ()  # objects that exist and cannot be read


class Api:
    """Of one cluster. The connection opens at the first request. No answer is a PlatformError, an error as the answer
    an ApiError."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.place, self.namespace = cluster, cluster.place, cluster.namespace  # that of the login
        self._served = ServedKinds(cluster)
        self._opened: AsyncExitStack | None = None

    @property
    def requests(self) -> int:
        """Sent so far."""
        return self.cluster.asked.total()

    async def open(self) -> None:
        """Again is allowed."""
        if self._opened is None:
            self._opened = AsyncExitStack()
            await self._opened.enter_async_context(self.cluster.opened())

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def get(self, resource: Resource, name: str, type_: type[T], *, namespace: str = "") -> T | None:
        """None: it does not exist. A kind that is not installed is an ApiError."""
        await self.open()
        try:
            return await self.cluster.get(resource.path(namespace, name), type_)
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    async def list(
        self, resource: Resource, type_: type[T], *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> Listing[T]:
        """Page by page. Without a namespace: of all of them."""
        await self.open()
        items: list[T] = []
        problems: list[str] = []
        complete = True
        path = resource.path(namespace)
        async for page in self.cluster.pages(path, type_, labelSelector=labels or None, fieldSelector=fields or None):
            items += page.items
            problems += page.problems
            complete = complete and not page.inconsistent
        return Listing(items=items, complete=complete, problems=tuple(problems))

    async def create(
        self, resource: Resource, manifest: Manifest, type_: type[T], *, namespace: str = "", dry_run: bool = False
    ) -> T:
        """The object as the server stored it. One of that name exists: an ApiError that `is_name_taken`."""
        await self.open()
        path = resource.path(namespace)
        dry = "All" if dry_run else None
        return _decoded(await self.cluster.post(path, manifest, dryRun=dry, fieldValidation="Strict"), type_, path)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: Manifest | Sequence[Manifest],
        type_: type[T],
        *,
        namespace: str = "",
        how: PatchType = "merge",
        subresource: str = "",
    ) -> T:
        """With `metadata.uid` and `metadata.resourceVersion` in a merge patch the server refuses if it has changed.
        Empty ones would be no condition, and are refused here."""
        if isinstance(patch, Mapping):
            _conditional(patch.get("metadata", {}), resource, name)
        await self.open()
        path = resource.path(namespace, name, subresource)
        return _decoded(await self.cluster.patch(path, patch, how), type_, path)

    async def delete(
        self,
        resource: Resource,
        name: str,
        uid: str,
        *,
        namespace: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> bool:
        """Exactly the object with this uid (and resourceVersion, if one is given), and in the background what it owns.
        False: it does not exist any more, or the name belongs to another one."""
        _conditional({"uid": uid}, resource, name)
        await self.open()
        options = delete_options({"uid": uid} | ({"resourceVersion": version} if version else {}), "Background")
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            await self.cluster.delete(resource.path(namespace, name), options)
        except ApiError as error:
            if error.is_not_found or (error.status == CONFLICT and "uid" in error.words.lower()):
                return False
            raise
        return True

    async def log(
        self,
        name: str,
        *,
        namespace: str,
        container: str = "",
        previous: bool = False,
        since: str = "",
        timestamps: bool = False,
        limit: int = 16 * 1024 * 1024,
    ) -> bytes:
        """The first `limit` bytes of the log of a pod, from the time `since` on."""
        await self.open()
        return await self.cluster.raw(
            PODS.path(namespace, name, "log"),
            most=limit,
            tail_ok=True,
            deadline=LOG,
            container=container or None,
            previous=previous or None,
            sinceTime=since or None,
            timestamps=timestamps or None,
            limitBytes=limit,
        )

    async def version(self) -> str:
        """Of the server."""
        await self.open()
        return await self.cluster.version()

    async def serves(self, resource: Resource) -> bool | Unknown:
        """Whether this kind is installed in this version."""
        await self.open()
        try:
            return await self._served.serves(resource)
        except PlatformError as error:
            return Unknown(f"whether the cluster has {resource.words} is unknown: {error}")


def _conditional(metadata: Mapping[str, Any], resource: Resource, name: str) -> None:
    """The API server always says which object it has read. A proxy or a hostile server may leave it out."""
    missing = [field for field in ("uid", "resourceVersion") if field in metadata and not metadata[field]]
    if missing:
        words = f"the cluster's answer about {resource.kind} {name} has no {' and no '.join(missing)}"
        raise PlatformError(f"{words}, so it cannot be changed safely; nothing was changed")


def delete_options(conditions: Mapping[str, str], propagation: str) -> dict[str, Any]:
    """Without a grace period: that of the object applies."""
    return {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": dict(conditions),
        "propagationPolicy": propagation,
    }


def _decoded(answer: bytes, type_: type[T], path: str) -> T:
    try:
        return reading.decode(answer, type_)
    except msgspec.DecodeError as error:
        raise PlatformError(f"the cluster's answer about {path} cannot be read: {error}") from error

"""The cluster that acceptance runs use, over the same connection as the platform: its Protocol, the launcher, and
marks of nodes: plan them, or write them; one program at a time takes nodes out.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpukeeper.acceptance.fleet.marks import MarkPlan, NodeMarks
from gpukeeper.acceptance.launchers.kubernetes.api import Api, Listing, Manifest, PatchType, Refused, Resource
from gpukeeper.acceptance.launchers.marks import Applied, Replan, Turn, Work, marks_of, nodes_of, planned
from gpukeeper.blocking import SystemClock
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import CONFLICT, ApiError
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import MarkSettings
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.lease import Leadership

if TYPE_CHECKING:
    from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher


T = TypeVar("T")
REQUESTS, BURST = 100.0, 200  # per second; a run over 512 nodes creates as many objects
LOG = timedelta(seconds=60)


class ClusterApi:
    """Errors of the platform are translated; the connection opens at the first request."""

    def __init__(self, cluster: Cluster) -> None:
        self.place, self.namespace = cluster.place, cluster.namespace
        self.cluster = self._cluster = cluster
        self._discovery = ApiDiscovery(cluster)
        self._opened: AsyncExitStack | None = None

    @property
    def requests(self) -> int:
        return self._cluster.asked.total()

    async def open(self) -> None:
        if self._opened is None:
            self._opened = AsyncExitStack()
            await self._opened.enter_async_context(self._cluster.opened())

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def get(self, resource: Resource, name: str, type_: type[T], *, namespace: str = "") -> T | None:
        await self.open()
        try:
            return await self._cluster.get(resource.path(namespace, name), type_)
        except ApiError as error:
            if error.is_not_found:
                return None
            raise _refused(error) from error

    async def list(
        self, resource: Resource, type_: type[T], *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> Listing[T]:
        await self.open()
        items: list[T] = []
        problems: list[str] = []
        complete = True
        path = resource.path(namespace)
        try:
            async for page in self._cluster.pages(
                path, type_, labelSelector=labels or None, fieldSelector=fields or None
            ):
                items += page.items
                problems += page.problems
                complete = complete and not page.inconsistent
        except ApiError as error:
            raise _refused(error) from error
        return Listing(items=items, complete=complete, problems=tuple(problems))

    async def create(
        self, resource: Resource, manifest: Manifest, type_: type[T], *, namespace: str = "", dry_run: bool = False
    ) -> T:
        await self.open()
        path = resource.path(namespace)
        try:
            answer = await self._cluster.post(
                path, manifest, dryRun="All" if dry_run else None, fieldValidation="Strict"
            )
        except ApiError as error:
            raise _refused(error) from error
        return _decoded(answer, type_, path)

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
        await self.open()
        path = resource.path(namespace, name, subresource)
        try:
            answer = await self._cluster.patch(path, patch, how)
        except ApiError as error:
            raise _refused(error) from error
        return _decoded(answer, type_, path)

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
        await self.open()
        conditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": conditions,
            "propagationPolicy": "Background",
            **({} if grace is None else {"gracePeriodSeconds": grace}),
        }
        try:
            await self._cluster.delete(resource.path(namespace, name), options)
        except ApiError as error:
            if error.is_not_found or (error.status == CONFLICT and "uid" in error.words.lower()):
                return False
            raise _refused(error) from error
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
        await self.open()
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/log"
        try:
            return await self._cluster.raw(
                path,
                most=limit,
                tail_ok=True,
                deadline=LOG,
                container=container or None,
                previous=previous or None,
                sinceTime=since or None,
                timestamps=timestamps or None,
                limitBytes=limit,
            )
        except ApiError as error:
            raise _refused(error) from error

    async def version(self) -> str:
        await self.open()
        return await self._cluster.version()

    async def serves(self, resource: Resource) -> bool | Unknown:
        await self.open()
        try:
            return await self._discovery.serves(resource.group, resource.version, resource.plural, resource.kind)
        except PlatformError as error:
            return Unknown(f"whether the cluster has {resource.words} is unknown: {error}")


def cluster_api(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> ClusterApi:
    """`options`: context."""
    return ClusterApi(Cluster.from_environment(environ, options.get("context") or None, REQUESTS, BURST))


def _refused(error: ApiError) -> Refused:
    return Refused(str(error), error.status, error.reason)


def _decoded(answer: bytes, type_: type[T], path: str) -> T:
    try:
        return reading.decode(answer, type_)
    except msgspec.DecodeError as error:
        raise PlatformError(f"the cluster's answer about {path} cannot be read: {error}") from error


def kubernetes_launcher(options: Mapping[str, str]) -> KubernetesLauncher:
    # Marks of nodes do not need it.
    from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher

    return KubernetesLauncher(cluster_api(options), options)


NAMESPACE, LEASE = "kube-system", "gpukeeper-node-marks"
PATIENCE = timedelta(seconds=45)  # a program that was killed holds the lease for 15 seconds


async def read_nodes(options: Mapping[str, str], settings: MarkSettings) -> tuple[str, Sequence[NodeMarks]]:
    """`options`: context. With the name of the cluster."""
    api = cluster_api(options)
    try:
        return api.place, [marks_of(one, settings) for one in await nodes_of(api)]
    finally:
        await api.close()


async def plan_marks(options: Mapping[str, str], replan: Replan, settings: MarkSettings) -> MarkPlan:
    api = cluster_api(options)
    try:
        return await planned(api, replan, settings)
    finally:
        await api.close()


def work_on(options: Mapping[str, str], replan: Replan, settings: MarkSettings, now: datetime) -> Work:
    """Not begun. See `applied`."""
    api = cluster_api(options)
    return Work(api=api, replan=replan, settings=settings, now=now, turn=lambda: lease_turn(api))


async def applied(work: Work) -> Applied:
    try:
        return await work.apply()
    finally:
        await work.api.close()


@asynccontextmanager
async def lease_turn(api: Api) -> AsyncIterator[Turn]:
    """Waits for the lease; without it, `why_not` says why, and no node is taken out."""
    assert isinstance(api, ClusterApi), "This is a bug in gpukeeper: a lease needs a cluster."
    await api.open()
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    lead = Leadership(api.cluster, NAMESPACE, LEASE, identity, SystemClock())
    await lead.attempt()
    if lead.denied:
        yield lead
        return
    stop = asyncio.Event()
    campaign = asyncio.create_task(lead.campaign(stop))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE.total_seconds()):
                await lead.won.wait()
        yield lead
    finally:
        stop.set()
        await campaign

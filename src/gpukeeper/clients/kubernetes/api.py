"""Which kinds a cluster serves, each as a Resource; and its objects, by kind and name, as the types that a caller
names. What is written is plain data.

That a kind is not installed must be proven, not guessed: a 404 alone may be a proxy's, so the list of all groups
has to lack it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import CONFLICT, NOT_FOUND, ApiError
from gpukeeper.clients.kubernetes.wire import Wire
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown


class Resource(msgspec.Struct, frozen=True):
    """A kind, and where it is served."""

    group: str  # "" is the core group
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def words(self) -> str:
        """As kubectl and roles name it: jobs.batch."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Without a namespace: of all of them."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return root + where + "".join(f"/{part}" for part in (self.plural, name, subresource) if part)


NODES = Resource("", "v1", "Node", "nodes", False)
NAMESPACES = Resource("", "v1", "Namespace", "namespaces", False)
PODS = Resource("", "v1", "Pod", "pods")
SERVICES = Resource("", "v1", "Service", "services")
EVENTS = Resource("", "v1", "Event", "events")
QUOTAS = Resource("", "v1", "ResourceQuota", "resourcequotas")
JOBS = Resource("batch", "v1", "Job", "jobs")
DAEMON_SETS = Resource("apps", "v1", "DaemonSet", "daemonsets")
STATEFUL_SETS = Resource("apps", "v1", "StatefulSet", "statefulsets")
PYTORCH_JOBS = Resource("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs")
TRAIN_JOBS = Resource("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs")
TRAINING_RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "TrainingRuntime", "trainingruntimes")
JOB_SETS = Resource("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets")
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False)


CACHE_TIME = timedelta(minutes=10)


class _Version(Wire, frozen=True):
    version: str


class _Group(Wire, frozen=True, gc=True):
    kind: str = ""
    name: str = ""
    versions: tuple[_Version, ...] = ()


class _Groups(Wire, frozen=True, gc=True):
    kind: str
    groups: tuple[_Group, ...]


class _Listed(Wire, frozen=True):
    name: str
    kind: str = ""
    namespaced: bool = True


class _Resources(Wire, frozen=True, gc=True):
    kind: str
    group_version: str
    resources: tuple[_Listed, ...] | None


class ServedKinds:
    """Responses are cached; errors are not."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        self._known: dict[str, tuple[float, object]] = {}

    async def serves(self, resource: Resource) -> bool:
        """Whether a kind is installed in this version. PlatformError: it could not be read."""
        group, version = resource.group, resource.version
        versions = await self.versions(group)
        return (
            versions is not None
            and version in versions
            and await self.lists(group, version, resource.plural, resource.kind)
        )

    async def resource(self, api_version: str, kind: str) -> Resource | Unknown:
        """Of any kind, as an object names it. A version that is not served proves nothing about the object."""
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            page = await self._read(root, _Resources)
        except PlatformError as error:
            return Unknown(f"whether the cluster has {kind} ({api_version}) is unknown: {error}")
        found = next((one for one in page.resources or () if one.kind == kind and "/" not in one.name), None)
        if page.kind != "APIResourceList" or page.group_version != api_version or found is None:
            return Unknown(f"the cluster does not serve {kind} ({api_version})")
        group, _, version = api_version.rpartition("/")
        return Resource(group, version, kind, found.name, found.namespaced)

    async def versions(self, group: str) -> tuple[str, ...] | None:
        """None: there is no such group."""
        if not group:
            return ("v1",)
        try:
            page = await self._read(f"/apis/{group}", _Group)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            everything = await self._read("/apis", _Groups)
            names = {one.name for one in everything.groups}
            if everything.kind != "APIGroupList" or "apps" not in names or group in names:
                raise
            page = _Group(kind="absent", name=group)
            self._known[f"/apis/{group}"] = (self._clock(), page)
        if page.kind == "absent":
            return None
        if page.kind != "APIGroup" or page.name != group or not page.versions:
            raise PlatformError(f"the cluster's response to /apis/{group} does not describe that group")
        return tuple(one.version for one in page.versions)

    async def lists(self, group: str, version: str, plural: str, kind: str) -> bool:
        place = f"{group}/{version}" if group else version
        path = f"/apis/{place}" if group else f"/api/{version}"
        page = await self._read(path, _Resources)
        if page.kind != "APIResourceList" or page.group_version != place:
            raise PlatformError(f"the cluster's response to {path} does not list what is served there")
        return any(one.name == plural and one.kind == kind for one in page.resources or ())

    async def _read(self, path: str, type_: type[T]) -> T:
        known = self._known.get(path)
        if known is None or self._clock() - known[0] >= CACHE_TIME.total_seconds():
            known = self._known[path] = (self._clock(), await self._cluster.get(path, type_))
        return cast(T, known[1])


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

"""What a cluster serves: kinds, each as a Resource, and whether it is installed.

That a kind is not installed must be proven, not guessed: a 404 alone may be a proxy's, so the list of all groups
has to lack it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import NOT_FOUND, ApiError
from gpukeeper.clients.kubernetes.wire import Wire
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


T = TypeVar("T")
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

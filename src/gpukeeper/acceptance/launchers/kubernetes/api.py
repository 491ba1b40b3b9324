"""What acceptance needs of a cluster, as a Protocol.

The adapter is wiring/kubernetes.py; tests have one in memory. Objects are read as the types that a caller names. What
is written is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
Manifest: TypeAlias = Mapping[str, Any]
PatchType: TypeAlias = Literal["merge", "json", "strategic"]
ALREADY_EXISTS, CONFLICT = "AlreadyExists", "Conflict"


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


class Refused(PlatformError):
    """The API server answered with an error. `reason` is the one of its Status: AlreadyExists, Forbidden, Invalid."""

    def __init__(self, words: str, status: int, reason: str = "") -> None:
        super().__init__(words)
        self.status, self.reason = status, reason


class Listing(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A list that was read to its end. `complete` False: an object can be missing, although it exists."""

    items: Sequence[T]
    complete: bool = True
    problems: tuple[str, ...] = ()  # objects that exist and cannot be read


class Api(Protocol):
    """One cluster. Every request has a timeout. No answer is a PlatformError, an error as the answer is Refused."""

    place: str  # the name of the cluster, for people
    namespace: str  # the one of the login

    @property
    def requests(self) -> int:
        """Sent so far."""
        ...

    async def get(self, resource: Resource, name: str, type_: type[T], *, namespace: str = "") -> T | None:
        """None: it does not exist. A kind that is not installed is Refused."""
        ...

    async def list(
        self, resource: Resource, type_: type[T], *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> Listing[T]:
        """Page by page. Without a namespace: of all of them."""
        ...

    async def create(
        self, resource: Resource, manifest: Manifest, type_: type[T], *, namespace: str = "", dry_run: bool = False
    ) -> T:
        """The object as the server stored it. One of that name exists: Refused with AlreadyExists."""
        ...

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
        """With `metadata.uid` and `metadata.resourceVersion` in a merge patch the server refuses if it has changed."""
        ...

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
        ...

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
        ...

    async def version(self) -> str:
        """Of the server."""
        ...

    async def serves(self, resource: Resource) -> bool | Unknown:
        """Whether this kind is installed in this version."""
        ...

    async def open(self) -> None:
        """Again is allowed."""
        ...

    async def close(self) -> None: ...

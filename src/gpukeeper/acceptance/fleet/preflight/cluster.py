"""What was read of a cluster, as plain values, and what the run will ask of it. What could not be read is Unknown."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpukeeper.acceptance.fleet.preflight.quantity import whole
from gpukeeper.model.unknown import Unknown

GPU = "nvidia.com/gpu"
PRODUCT, COUNT, PRESENT = "nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.present"
PCI = "feature.node.kubernetes.io/pci-10de.present"  # NVIDIA's vendor number
DRIVER = "nvidia.com/cuda.driver-version.full"
DRIVER_PARTS = tuple(f"nvidia.com/cuda.driver.{part}" for part in ("major", "minor", "rev"))
NO_EXECUTE = ("NoSchedule", "NoExecute")  # the effects that keep work away


class Taint(msgspec.Struct, frozen=True):
    key: str
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class Toleration(msgspec.Struct, frozen=True, kw_only=True):
    """Empty: tolerates everything."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.key
        return self.key == taint.key and self.value == taint.value


EVERYTHING = (Toleration(operator="Exists"),)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ready: bool = True
    cordoned: bool = False
    labels: Mapping[str, str] = {}
    capacity: Mapping[str, str] = {}
    allocatable: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    images: tuple[str, ...] = ()  # that it reports; a kubelet reports 50 at most

    @property
    def gpus(self) -> int:
        return whole(self.capacity.get(GPU))

    @property
    def usable(self) -> int:
        return whole(self.allocatable.get(GPU))

    @property
    def slices(self) -> tuple[str, ...]:
        """Resources that are parts of a GPU."""
        return tuple(name for name, count in self.capacity.items() if _is_slice(name) and whole(count))

    @property
    def product(self) -> str:
        return self.labels.get(PRODUCT, "")

    @property
    def driver(self) -> str:
        """By the labels of gpu-feature-discovery, new or old."""
        parts = [self.labels.get(name, "") for name in DRIVER_PARTS]
        return self.labels.get(DRIVER, "") or ".".join(part for part in parts if part)


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One pod that requests GPUs and has not ended. `root`: what made it, as kubectl names it."""

    namespace: str
    name: str
    node: str = ""
    root: str = ""
    gpus: int = 0
    variables: Mapping[str, str | None] = {}  # NCCL_*; None: set from elsewhere, not read
    sources: tuple[str, ...] = ()  # ConfigMaps and Secrets that set any number of variables; not read
    tolerations: tuple[Toleration, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.name}"


class PluginFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A device plugin: a DaemonSet, or a pod that none manages."""

    kind: str
    namespace: str
    name: str
    wanted: int
    ready: int
    tolerations: tuple[Toleration, ...] = ()


class NamespaceFacts(msgspec.Struct, frozen=True, kw_only=True):
    exists: bool
    ending: bool = False
    labels: Mapping[str, str] = {}


class QuotaFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hard: Mapping[str, str] = {}
    used: Mapping[str, str] = {}


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a LimitRange."""

    name: str
    kind: str  # Container, Pod
    most: Mapping[str, str] = {}
    default: Mapping[str, str] = {}


class SecretFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is its type; None: there is no such Secret."""

    name: str
    kind: str | Unknown | None


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """`namespace` empty: of the cluster."""

    verb: str
    resource: str  # jobs.batch, pods/log
    why: str
    namespace: str = ""


class RightFacts(msgspec.Struct, frozen=True, kw_only=True):
    right: Right
    allowed: bool | Unknown


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeFacts, ...] | Unknown
    workloads: tuple[WorkloadFacts, ...] | Unknown
    plugins: tuple[PluginFacts, ...] | Unknown
    namespace: NamespaceFacts | Unknown
    quotas: tuple[QuotaFacts, ...] | Unknown
    limits: tuple[LimitFacts, ...] | Unknown
    secrets: tuple[SecretFacts, ...] = ()
    rights: tuple[RightFacts, ...] = ()
    selected: frozenset[str] | None = None  # nodes that the selector selects; None: no selector


class ClusterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the run will ask of the cluster."""

    namespace: str
    image: str = ""
    pull_secrets: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    selector: str = ""
    gpus_per_node: int | None = None  # None: all
    shm: str = "16Gi"
    rdma: str = ""  # the resource, with or without =N
    form: str = "job"
    together: bool = False  # one run over all nodes; some forms are that in any case
    tolerations: tuple[Toleration, ...] = EVERYTHING
    lock_memory: bool = True  # IPC_LOCK


def targets(facts: ClusterFacts, request: ClusterRequest) -> list[NodeFacts]:
    """The nodes with GPUs that the run would use. `facts.nodes` must be known."""
    assert not isinstance(facts.nodes, Unknown), "This is a bug in gpukeeper: a rule that needs nodes does not say so."
    return [node for node in facts.nodes if node.gpus and _is_selected(node, facts, request)]


def _is_selected(node: NodeFacts, facts: ClusterFacts, request: ClusterRequest) -> bool:
    if request.nodes and node.name not in request.nodes:
        return False
    return facts.selected is None or node.name in facts.selected


def _is_slice(resource: str) -> bool:
    return resource.startswith("nvidia.com/mig-") or resource == "nvidia.com/gpu.shared"


def shows_a_gpu(node: NodeFacts) -> bool:
    """By its labels, whatever it announces."""
    return node.labels.get(PRESENT) == "true" or node.labels.get(PCI) == "true" or whole(node.labels.get(COUNT)) > 0

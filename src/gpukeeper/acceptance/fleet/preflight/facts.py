"""What was read before a run, as plain values (unread is Unknown), and what a check makes of it: a finding.

Quantities of Kubernetes (8, 500m, 16Gi, 1k) are compared as numbers, never as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

import msgspec

from gpukeeper.clients.kubernetes.wire import Taint, Toleration
from gpukeeper.model.gpu import Grade, worst
from gpukeeper.model.unknown import Unknown

_FORM = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def quantity(text: str | None) -> Decimal | None:
    """None: there is none, or it cannot be read."""
    found = _FORM.fullmatch(text or "")
    if found is None:
        return None
    unit = found[2] or ""
    scale = Decimal(1024) ** _BINARY[unit] if unit in _BINARY else Decimal(10) ** _DECIMAL.get(unit, 0)
    return Decimal(found[1]) * scale


def whole(text: str | None) -> int:
    """Of devices: what is not announced is zero."""
    return int(quantity(text) or 0)


def gibibytes(amount: Decimal) -> str:
    return f"{float(amount) / 1024**3:.4g} GiB"


NAMES_MAX = 5  # in a sentence; all of them are in `about`
EXIT = {Grade.PASS: 0, Grade.WARN: 0, Grade.FAIL: 4, Grade.INCONCLUSIVE: 5}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is stable; docs/reference/preflight.md has every one. INCONCLUSIVE: could not be checked."""

    code: str
    group: str
    verdict: Grade
    message: str
    about: tuple[str, ...] = ()  # nodes, workloads, …
    fix: tuple[str, ...] = ()  # commands, or lines to add; what to run first comes first


def passed(code: str, message: str, about: Iterable[str] = ()) -> Finding:
    return _finding(code, Grade.PASS, message, about, ())


def warning(code: str, message: str, about: Iterable[str] = (), fix: Sequence[str] = ()) -> Finding:
    return _finding(code, Grade.WARN, message, about, fix)


def failed(code: str, message: str, about: Iterable[str] = (), fix: Sequence[str] = ()) -> Finding:
    return _finding(code, Grade.FAIL, message, about, fix)


def unchecked(code: str, why: Unknown | str, about: Iterable[str] = (), fix: Sequence[str] = ()) -> Finding:
    words = why.why if isinstance(why, Unknown) else why
    return _finding(code, Grade.INCONCLUSIVE, f"could not check: {words}", about, fix)


def _finding(code: str, verdict: Grade, message: str, about: Iterable[str], fix: Sequence[str]) -> Finding:
    return Finding(code=code, group=CODES[code], verdict=verdict, message=message, about=tuple(about), fix=tuple(fix))


def verdict_of(findings: Iterable[Finding]) -> Grade:
    return worst(one.verdict for one in findings)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By group, else as they came."""
    groups = list(dict.fromkeys(CODES.values()))
    return tuple(sorted(findings, key=lambda one: groups.index(one.group)))


def named(names: Iterable[str], most: int = NAMES_MAX) -> str:
    """The first few, and how many more."""
    every = list(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# Every code and its group, in the order of the output.
CODES: dict[str, str] = {
    # Kubernetes
    "cluster": "cluster",
    "client": "cluster",
    "gpu-nodes": "nodes",
    "gpus-announced": "nodes",
    "mixed-cluster": "nodes",
    "node-missing": "nodes",
    "node-not-ready": "nodes",
    "node-cordoned": "nodes",
    "taints": "nodes",
    "gpus-unhealthy": "gpus",
    "gpus-missing": "gpus",
    "gpus-in-use": "gpus",
    "gpus-differ": "gpus",
    "gpus-shared": "gpus",
    "gpu-labels": "gpus",
    "gpu-selector": "gpus",
    "device-plugin": "software",
    "drivers": "software",
    "rdma": "network",
    "nccl": "network",
    "nccl-advice": "network",
    "image": "image",
    "pull-secret": "image",
    "shm": "memory",
    "namespace": "namespace",
    "admission": "namespace",
    "quota": "namespace",
    "limit-range": "namespace",
    "rights": "rights",
    "trial": "trial",
    "trial-gpu": "trial",
    "trial-node": "trial",
    "trial-network": "trial",
    "trial-left": "trial",
    # Docker
    "engine": "engine",
    "engine-gpus": "engine",
    "engine-runtime": "engine",
    "engine-image": "engine",
    "engine-shm": "engine",
    "engine-memlock": "engine",
    # ssh
    "host-login": "hosts",
    "host-python": "hosts",
    "host-program": "hosts",
    "host-folder": "hosts",
    "host-gpus": "gpus",
    "host-drivers": "software",
    "host-shm": "memory",
    "host-clock": "clocks",
    "host-master": "network",
    # Ray
    "ray-cluster": "cluster",
    "ray-version": "cluster",
    "ray-jobs": "cluster",
    "ray-dead": "nodes",
    "ray-nodes": "nodes",
    "ray-gpus": "gpus",
    "ray-free": "gpus",
}


GPU = "nvidia.com/gpu"
PRODUCT, COUNT, PRESENT = "nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.present"
PCI = "feature.node.kubernetes.io/pci-10de.present"  # NVIDIA's vendor number
DRIVER = "nvidia.com/cuda.driver-version.full"
DRIVER_PARTS = tuple(f"nvidia.com/cuda.driver.{part}" for part in ("major", "minor", "rev"))


EVERYTHING = (Toleration(operator="Exists"),)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ready: bool = True
    cordoned: bool = False
    labels: Mapping[str, str] = {}
    capacity: Mapping[str, str] = {}
    allocatable: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()  # without the time, which differs from node to node
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

"""Objects of a cluster, as far as checks before a run read them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpukeeper.acceptance.fleet.preflight.cluster import (
    GPU,
    LimitFacts,
    NodeFacts,
    PluginFacts,
    QuotaFacts,
    Taint,
    Toleration,
    WorkloadFacts,
)
from gpukeeper.acceptance.fleet.preflight.quantity import whole

PLUGIN_WORDS = ("nvidia-device-plugin", "nvidia-gpu-device-plugin", "k8s-device-plugin", "nvidia-dra-driver")
ENDED = ("Succeeded", "Failed")
VARIABLES = ("NCCL_", "FI_", "UCX_")


class Owner(msgspec.Struct, rename="camel"):
    kind: str = ""
    name: str = ""
    controller: bool = False


class Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None
    owner_references: tuple[Owner, ...] = ()


class _NodeSpec(msgspec.Struct):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _Image(msgspec.Struct):
    names: tuple[str, ...] = ()


class _NodeStatus(msgspec.Struct):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()
    images: tuple[_Image, ...] = ()


class Node(msgspec.Struct):
    metadata: Meta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)

    @property
    def facts(self) -> NodeFacts:
        return NodeFacts(
            name=self.metadata.name,
            ready=any(one.type == "Ready" and one.status == "True" for one in self.status.conditions),
            cordoned=self.spec.unschedulable,
            labels=self.metadata.labels,
            capacity=self.status.capacity,
            allocatable=self.status.allocatable,
            taints=self.spec.taints,
            images=tuple(name for image in self.status.images for name in image.names),
        )


class _Named(msgspec.Struct):
    name: str = ""


class _Source(msgspec.Struct, rename="camel"):
    config_map_ref: _Named | None = None
    secret_ref: _Named | None = None

    def __str__(self) -> str:
        if self.config_map_ref is not None:
            return f"ConfigMap {self.config_map_ref.name}"
        return f"Secret {self.secret_ref.name if self.secret_ref else ''}"


class _Variable(msgspec.Struct, rename="camel"):
    name: str
    value: str = ""
    value_from: object = None


class _Resources(msgspec.Struct):
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}


class Container(msgspec.Struct, rename="camel"):
    name: str = ""
    image: str = ""
    env: tuple[_Variable, ...] = ()
    env_from: tuple[_Source, ...] = ()
    resources: _Resources = msgspec.field(default_factory=_Resources)

    @property
    def gpus(self) -> int:
        return whole(self.resources.limits.get(GPU) or self.resources.requests.get(GPU))


class PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    @property
    def gpus(self) -> int:
        """Init containers run one after another, before the others."""
        started = max((one.gpus for one in self.init_containers), default=0)
        return max(sum(one.gpus for one in self.containers), started)


class Terminated(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class Waiting(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    ready: bool = False
    state: _State = msgspec.field(default_factory=_State)


class PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[_ContainerStatus, ...] = ()


class Pod(msgspec.Struct):
    metadata: Meta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def facts(self) -> WorkloadFacts | None:
        """None: it has ended, or requests no GPU."""
        gpus = self.spec.gpus
        if not gpus or self.status.phase in ENDED:
            return None
        containers = self.spec.containers
        return WorkloadFacts(
            namespace=self.metadata.namespace,
            name=self.metadata.name,
            node=self.spec.node_name,
            root=_root(self.metadata.owner_references),
            gpus=gpus,
            variables={
                one.name: None if one.value_from is not None else one.value
                for container in containers
                for one in container.env
                if one.name.startswith(VARIABLES)
            },
            sources=tuple(str(one) for container in containers for one in container.env_from),
            tolerations=self.spec.tolerations,
        )

    @property
    def plugin(self) -> PluginFacts | None:
        """A device plugin that no DaemonSet manages: a static or a bare pod."""
        managed = any(one.kind != "Node" for one in self.metadata.owner_references)
        if managed or self.status.phase in ENDED or not _is_plugin(self.metadata, self.spec):
            return None
        ready = bool(self.status.container_statuses) and all(one.ready for one in self.status.container_statuses)
        return PluginFacts(
            kind="Pod",
            namespace=self.metadata.namespace,
            name=self.metadata.name,
            wanted=1,
            ready=int(ready),
            tolerations=self.spec.tolerations,
        )


class _Template(msgspec.Struct):
    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class _DaemonSetSpec(msgspec.Struct):
    template: _Template = msgspec.field(default_factory=_Template)


class _DaemonSetStatus(msgspec.Struct, rename="camel"):
    desired_number_scheduled: int = 0
    number_ready: int = 0


class DaemonSet(msgspec.Struct):
    metadata: Meta
    spec: _DaemonSetSpec = msgspec.field(default_factory=_DaemonSetSpec)
    status: _DaemonSetStatus = msgspec.field(default_factory=_DaemonSetStatus)

    @property
    def plugin(self) -> PluginFacts | None:
        if not _is_plugin(self.metadata, self.spec.template.spec):
            return None
        return PluginFacts(
            kind="DaemonSet",
            namespace=self.metadata.namespace,
            name=self.metadata.name,
            wanted=self.status.desired_number_scheduled,
            ready=self.status.number_ready,
            # Added to every pod of a DaemonSet by its controller.
            tolerations=(*self.spec.template.spec.tolerations, *_ALWAYS),
        )


_ALWAYS = tuple(
    Toleration(key=f"node.kubernetes.io/{name}", operator="Exists")
    for name in ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
)


class Namespace(msgspec.Struct):
    metadata: Meta


class _QuotaStatus(msgspec.Struct):
    hard: dict[str, str] = {}
    used: dict[str, str] = {}


class Quota(msgspec.Struct):
    metadata: Meta
    spec: _QuotaStatus = msgspec.field(default_factory=_QuotaStatus)
    status: _QuotaStatus = msgspec.field(default_factory=_QuotaStatus)

    @property
    def facts(self) -> QuotaFacts:
        """Its status may lag behind the spec."""
        return QuotaFacts(name=self.metadata.name, hard=self.spec.hard or self.status.hard, used=self.status.used)


class _Limit(msgspec.Struct):
    type: str = ""
    max: dict[str, str] = {}
    default: dict[str, str] = {}


class _LimitSpec(msgspec.Struct):
    limits: tuple[_Limit, ...] = ()


class LimitRange(msgspec.Struct):
    metadata: Meta
    spec: _LimitSpec = msgspec.field(default_factory=_LimitSpec)

    @property
    def facts(self) -> tuple[LimitFacts, ...]:
        return tuple(
            LimitFacts(name=self.metadata.name, kind=one.type, most=one.max, default=one.default)
            for one in self.spec.limits
        )


class Secret(msgspec.Struct):
    """Without its data, which is not kept."""

    type: str = ""


class _ReviewStatus(msgspec.Struct):
    allowed: bool = False


class AccessReview(msgspec.Struct):
    status: _ReviewStatus = msgspec.field(default_factory=_ReviewStatus)


class Event(msgspec.Struct):
    reason: str = ""
    message: str = ""
    type: str = ""


def _root(owners: tuple[Owner, ...]) -> str:
    owner = next((one for one in owners if one.controller), None)
    if owner is None:
        return ""
    # kubectl set env changes the template of what makes the pods; a ReplicaSet is named after its Deployment.
    if owner.kind == "ReplicaSet":
        return f"deployment/{owner.name.rpartition('-')[0]}"
    return f"{owner.kind.lower()}/{owner.name}"


def _is_plugin(metadata: Meta, spec: PodSpec) -> bool:
    texts = [metadata.name, *_values(metadata.labels), *(one.image for one in spec.containers)]
    return any(word in text for text in texts for word in PLUGIN_WORDS)


def _values(labels: Mapping[str, str]) -> list[str]:
    return [value for key, value in labels.items() if key in ("app", "name", "k8s-app", "app.kubernetes.io/name")]

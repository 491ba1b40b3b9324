"""Reads what the rules of fleet/preflight need to know of a cluster: its objects, as far as they are read. Read-only.

What the login may not read is Unknown; the rest is still read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from gpukeeper.acceptance.fleet.preflight.facts import (
    GPU,
    ClusterFacts,
    ClusterRequest,
    LimitFacts,
    NamespaceFacts,
    NodeFacts,
    PluginFacts,
    QuotaFacts,
    Right,
    RightFacts,
    SecretFacts,
    Taint,
    Toleration,
    WorkloadFacts,
    whole,
)
from gpukeeper.acceptance.fleet.preflight.kubernetes import needed
from gpukeeper.acceptance.launchers.kubernetes.api import (
    ACCESS_REVIEWS,
    DAEMON_SETS,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    Api,
    Refused,
    Resource,
)
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown

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


T = TypeVar("T")
S = TypeVar("S")
LIMIT_RANGES = Resource("", "v1", "LimitRange", "limitranges")
BAD_REQUEST = 400
SECRETS = Resource("", "v1", "Secret", "secrets")


async def gather_facts(api: Api, request: ClusterRequest) -> ClusterFacts:
    nodes, pods, daemons, namespace, quotas, limits = await asyncio.gather(
        _listed(api, NODES, Node),
        _listed(api, PODS, Pod),
        _listed(api, DAEMON_SETS, DaemonSet),
        _tried(lambda: _namespace(api, request.namespace), "the namespace"),
        _listed(api, QUOTAS, Quota, request.namespace),
        _listed(api, LIMIT_RANGES, LimitRange, request.namespace),
    )
    return ClusterFacts(
        nodes=_each(nodes, lambda one: [one.facts]),
        workloads=_each(pods, lambda one: [] if one.facts is None else [one.facts]),
        plugins=_plugins(daemons, pods),
        namespace=namespace,
        quotas=_each(quotas, lambda one: [one.facts]),
        limits=_each(limits, lambda one: one.facts),
        secrets=tuple([await _secret(api, name, request.namespace) for name in request.pull_secrets]),
        rights=tuple(await asyncio.gather(*(_right(api, one) for one in needed(request)))),
        selected=await _selected(api, request.selector),
    )


async def _listed(api: Api, resource: Resource, type_: type[T], namespace: str = "") -> tuple[T, ...] | Unknown:
    """What is listed only in part is not known."""

    async def whole_list() -> tuple[T, ...] | Unknown:
        found = await api.list(resource, type_, namespace=namespace)
        if found.problems or not found.complete:
            why = found.problems[0] if found.problems else "the list changed while it was read"
            return Unknown(f"{resource.words} could not be listed to the end: {why}")
        return tuple(found.items)

    return await _tried(whole_list, resource.words)


async def _tried(read: Callable[[], Awaitable[T | Unknown]], what: str) -> T | Unknown:
    try:
        return await read()
    except PlatformError as error:
        return Unknown(f"{what}: {error}")


def _each(found: tuple[T, ...] | Unknown, facts: Callable[[T], Iterable[S]]) -> tuple[S, ...] | Unknown:
    return found if isinstance(found, Unknown) else tuple(fact for one in found for fact in facts(one))


def _plugins(
    daemons: tuple[DaemonSet, ...] | Unknown, pods: tuple[Pod, ...] | Unknown
) -> tuple[PluginFacts, ...] | Unknown:
    """Where only one of both lists could be read, a plugin that was found counts, and absence is not proven."""
    lists = [found for found in (daemons, pods) if not isinstance(found, Unknown)]
    plugins = tuple(one.plugin for found in lists for one in found if one.plugin is not None)
    silent = next((found for found in (daemons, pods) if isinstance(found, Unknown)), None)
    return plugins if plugins or silent is None else silent


async def _namespace(api: Api, name: str) -> NamespaceFacts:
    found = await api.get(NAMESPACES, name, Namespace)
    if found is None:
        return NamespaceFacts(exists=False)
    ending = found.metadata.deletion_timestamp is not None
    return NamespaceFacts(exists=True, ending=ending, labels=found.metadata.labels)


async def _secret(api: Api, name: str, namespace: str) -> SecretFacts:
    try:
        found = await api.get(SECRETS, name, Secret, namespace=namespace)
    except PlatformError as error:
        return SecretFacts(name=name, kind=Unknown(f"the Secret: {error}"))
    return SecretFacts(name=name, kind=None if found is None else found.type)


async def _right(api: Api, right: Right) -> RightFacts:
    """Any login may ask what it may do itself, by default. Nothing is stored."""
    resource, _, group = right.resource.partition(".")
    resource, _, subresource = resource.partition("/")
    wanted = {"verb": right.verb, "resource": resource, "group": group, "subresource": subresource}
    asked = {"namespace": right.namespace, **wanted}
    manifest = {
        "apiVersion": ACCESS_REVIEWS.api_version,
        "kind": ACCESS_REVIEWS.kind,
        "spec": {"resourceAttributes": {name: value for name, value in asked.items() if value}},
    }

    async def allowed() -> bool:
        return (await api.create(ACCESS_REVIEWS, manifest, AccessReview)).status.allowed

    return RightFacts(right=right, allowed=await _tried(allowed, "what the login may do"))


async def _selected(api: Api, selector: str) -> frozenset[str] | None:
    if not selector:
        return None
    try:
        found = await api.list(NODES, Node, labels=selector)
    except Refused as error:
        if error.status == BAD_REQUEST:
            raise UsageError(f"--nodes {selector}: not names of nodes and not a label selector: {error}") from error
        return frozenset()
    except PlatformError:
        return frozenset()  # then the nodes are not known either
    return frozenset(one.metadata.name for one in found.items)

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
    WorkloadFacts,
    whole,
)
from gpukeeper.acceptance.fleet.preflight.kubernetes import needed
from gpukeeper.clients.kubernetes.api import (
    ACCESS_REVIEWS,
    DAEMON_SETS,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    Api,
    Resource,
)
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import (
    AccessReview,
    Container,
    DaemonSet,
    DetailedPod,
    DetailedPodSpec,
    LimitRange,
    Meta,
    Node,
    Owner,
    PartialMetadata,
    PodSpec,
    Quota,
    Resources,
    Secret,
    Toleration,
    VariableSource,
    condition,
)
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown

PLUGIN_WORDS = ("nvidia-device-plugin", "nvidia-gpu-device-plugin", "k8s-device-plugin", "nvidia-dra-driver")
ENDED = ("Succeeded", "Failed")
VARIABLES = ("NCCL_", "FI_", "UCX_")


def node_facts(node: Node) -> NodeFacts:
    ready = condition(node.status.conditions, "Ready")
    return NodeFacts(
        name=node.metadata.name,
        ready=ready is not None and ready.status == "True",
        cordoned=node.spec.unschedulable,
        labels=node.metadata.labels or {},
        capacity=node.status.capacity or {},
        allocatable=node.status.allocatable or {},
        taints=tuple(msgspec.structs.replace(one, time_added="") for one in node.spec.taints or ()),
        images=tuple(name for image in node.status.images or () for name in image.names or ()),
    )


def workload_facts(pod: DetailedPod) -> WorkloadFacts | None:
    """None: it has ended, or requests no GPU."""
    gpus = _gpus_of(pod.spec)
    if not gpus or pod.status.phase in ENDED:
        return None
    containers = pod.spec.containers
    return WorkloadFacts(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        node=pod.spec.node_name,
        root=_root(pod.metadata.owner),
        gpus=gpus,
        variables={
            one.name: None if one.value_from is not None else one.value
            for container in containers
            for one in container.env or ()
            if one.name.startswith(VARIABLES)
        },
        sources=tuple(_source(one) for container in containers for one in container.env_from or ()),
        tolerations=pod.spec.tolerations or (),
    )


def _gpus_of(spec: PodSpec) -> int:
    """Init containers run one after another, before the others."""
    started = max((_gpus(one) for one in spec.init_containers or ()), default=0)
    return max(sum(_gpus(one) for one in spec.containers), started)


def _gpus(container: Container) -> int:
    resources = container.resources or Resources()
    found = (resources.limits or {}).get(GPU) or (resources.requests or {}).get(GPU)
    return whole(None if found is None else str(found))


def _source(one: VariableSource) -> str:
    if one.config_map_ref is not None:
        return f"ConfigMap {one.config_map_ref.name}"
    return f"Secret {one.secret_ref.name if one.secret_ref else ''}"


def _pod_plugin(pod: DetailedPod) -> PluginFacts | None:
    """A device plugin that no DaemonSet manages: a static or a bare pod."""
    managed = any(one.kind != "Node" for one in pod.metadata.owner_references or ())
    if managed or pod.status.phase in ENDED or not _is_plugin(pod.metadata, pod.spec):
        return None
    statuses = pod.status.container_statuses or ()
    return PluginFacts(
        kind="Pod",
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        wanted=1,
        ready=int(bool(statuses) and all(one.ready for one in statuses)),
        tolerations=pod.spec.tolerations or (),
    )


_ALWAYS = tuple(
    Toleration(key=f"node.kubernetes.io/{name}", operator="Exists")
    for name in ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
)


def _daemon_plugin(daemon: DaemonSet) -> PluginFacts | None:
    spec = daemon.spec.template.spec or DetailedPodSpec()
    if not _is_plugin(daemon.metadata, spec):
        return None
    return PluginFacts(
        kind="DaemonSet",
        namespace=daemon.metadata.namespace,
        name=daemon.metadata.name,
        wanted=daemon.status.desired_number_scheduled,
        ready=daemon.status.number_ready,
        # Added to every pod of a DaemonSet by its controller.
        tolerations=(*(spec.tolerations or ()), *_ALWAYS),
    )


def _quota_facts(quota: Quota) -> QuotaFacts:
    hard = quota.spec.hard or quota.status.hard or {}
    return QuotaFacts(name=quota.metadata.name, hard=hard, used=quota.status.used or {})


def _limit_facts(limits: LimitRange) -> tuple[LimitFacts, ...]:
    return tuple(
        LimitFacts(name=limits.metadata.name, kind=one.type, most=one.max or {}, default=one.default or {})
        for one in limits.spec.limits or ()
    )


def _root(owner: Owner | None) -> str:
    if owner is None:
        return ""
    # kubectl set env changes the template of what makes the pods; a ReplicaSet is named after its Deployment.
    if owner.kind == "ReplicaSet":
        return f"deployment/{owner.name.rpartition('-')[0]}"
    return f"{owner.kind.lower()}/{owner.name}"


def _is_plugin(metadata: Meta, spec: PodSpec) -> bool:
    texts = [metadata.name, *_values(metadata.labels or {}), *(one.image for one in spec.containers)]
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
        _listed(api, PODS, DetailedPod),
        _listed(api, DAEMON_SETS, DaemonSet),
        _tried(lambda: _namespace(api, request.namespace), "the namespace"),
        _listed(api, QUOTAS, Quota, request.namespace),
        _listed(api, LIMIT_RANGES, LimitRange, request.namespace),
    )
    return ClusterFacts(
        nodes=_each(nodes, lambda one: [node_facts(one)]),
        workloads=_each(pods, lambda one: filter(None, [workload_facts(one)])),
        plugins=_plugins(daemons, pods),
        namespace=namespace,
        quotas=_each(quotas, lambda one: [_quota_facts(one)]),
        limits=_each(limits, _limit_facts),
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
    daemons: tuple[DaemonSet, ...] | Unknown, pods: tuple[DetailedPod, ...] | Unknown
) -> tuple[PluginFacts, ...] | Unknown:
    """Where only one of both lists could be read, a plugin that was found counts, and absence is not proven."""
    known = (
        _each(daemons, lambda one: filter(None, [_daemon_plugin(one)])),
        _each(pods, lambda one: filter(None, [_pod_plugin(one)])),
    )
    plugins = tuple(one for found in known if not isinstance(found, Unknown) for one in found)
    silent = next((found for found in known if isinstance(found, Unknown)), None)
    return plugins if plugins or silent is None else silent


async def _namespace(api: Api, name: str) -> NamespaceFacts:
    found = await api.get(NAMESPACES, name, PartialMetadata)
    if found is None:
        return NamespaceFacts(exists=False)
    ending = found.metadata.deletion_timestamp is not None
    return NamespaceFacts(exists=True, ending=ending, labels=found.metadata.labels or {})


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
    except ApiError as error:
        if error.status == BAD_REQUEST:
            raise UsageError(f"--nodes {selector}: not names of nodes and not a label selector: {error}") from error
        return frozenset()
    except PlatformError:
        return frozenset()  # then the nodes are not known either
    return frozenset(one.metadata.name for one in found.items)

"""Reads what the rules need to know of a cluster. What the login may not read is Unknown; the rest is still read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from gpukeeper.acceptance.fleet.preflight.cluster import (
    ClusterFacts,
    ClusterRequest,
    NamespaceFacts,
    PluginFacts,
    Right,
    RightFacts,
    SecretFacts,
)
from gpukeeper.acceptance.fleet.preflight.namespace import needed
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
from gpukeeper.acceptance.launchers.preflight.cluster_objects import (
    AccessReview,
    DaemonSet,
    LimitRange,
    Namespace,
    Node,
    Pod,
    Quota,
    Secret,
)
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
S = TypeVar("S")
LIMIT_RANGES = Resource("", "v1", "LimitRange", "limitranges")
BAD_REQUEST = 400
SECRETS = Resource("", "v1", "Secret", "secrets")


async def gather(api: Api, request: ClusterRequest) -> ClusterFacts:
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

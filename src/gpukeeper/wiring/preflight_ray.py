"""Checks before an acceptance run on a Ray cluster. Read-only: no job is submitted."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from gpukeeper.acceptance.fleet.preflight.finding import Finding, unchecked
from gpukeeper.acceptance.fleet.preflight.ray import RayFacts, RayNodeFacts, judge_ray
from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.rayjobs.api import RayNode, named_nodes
from gpukeeper.wiring.clock import SystemClock
from gpukeeper.wiring.launch_ray import jobs_api, launcher

T = TypeVar("T")


async def ray(
    names: tuple[str, ...],
    selector: str,
    options: Mapping[str, str],
    gpus_per_node: int | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Finding, ...]:
    engine, api = launcher(options, environ), jobs_api(options, environ)
    cluster = await _known(api.version())
    if isinstance(cluster, Unknown):
        fix = [f"curl -sS {api.address}/api/version", "ray start --head --dashboard-host=ADDRESS"]
        return (unchecked("ray-cluster", cluster, (), fix),)
    # Of a description only what selects nodes counts: nothing is started.
    spec = RunSpec(
        run="preflight",
        owner="",
        created=SystemClock().now(),
        engine="ray",
        nodes=names,
        selector=selector,
        gpus_per_node=gpus_per_node,
    )
    nodes, held = await _known(api.nodes()), await _known(api.held())
    targets = nodes if isinstance(nodes, Unknown) else await _known(engine.targets(spec))
    jobs = await _known(api.jobs())
    facts = RayFacts(
        address=api.address,
        version=cluster,
        own=_own(),
        dead=nodes if isinstance(nodes, Unknown) else _dead(nodes, targets),
        chosen=_chosen(nodes, targets, {} if isinstance(held, Unknown) else held),
        held=held if isinstance(held, Unknown) else None,
        jobs=jobs if isinstance(jobs, Unknown) else len(jobs),
    )
    await api.close()
    return judge_ray(facts, gpus_per_node)


def _chosen(
    nodes: tuple[RayNode, ...] | Unknown, targets: tuple[Target, ...] | Unknown, held: Mapping[str, float]
) -> tuple[RayNodeFacts, ...] | Unknown:
    if isinstance(nodes, Unknown):
        return nodes
    if isinstance(targets, Unknown):
        return targets
    known = named_nodes(nodes)
    return tuple(_facts(one.node, known[one.node], held, one.excluded) for one in targets)


def _dead(nodes: tuple[RayNode, ...], targets: tuple[Target, ...] | Unknown) -> tuple[RayNodeFacts, ...]:
    """Those that nobody named: named ones are reported as left out."""
    chosen = set() if isinstance(targets, Unknown) else {one.node for one in targets}
    return tuple(
        _facts(name, node, {}, "") for name, node in named_nodes(nodes).items() if not node.alive and name not in chosen
    )


def _facts(name: str, node: RayNode, held: Mapping[str, float], excluded: str) -> RayNodeFacts:
    return RayNodeFacts(
        node=name,
        node_id=node.node_id,
        alive=node.alive,
        message=node.message,
        gpus=node.gpus,
        held=held.get(node.node_id, 0.0),
        excluded=excluded,
    )


async def _known(asked: Awaitable[T]) -> T | Unknown:
    try:
        return await asked
    except PlatformError as problem:
        return Unknown(str(problem))


def _own() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return ""

"""Taints of GPU nodes that the run, the device plugin or the workloads do not tolerate, with the exact toleration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpukeeper.acceptance.fleet.preflight.cluster import (
    NO_EXECUTE,
    ClusterFacts,
    ClusterRequest,
    Taint,
    Toleration,
    targets,
)
from gpukeeper.acceptance.fleet.preflight.finding import Finding, failed, named, passed, warning
from gpukeeper.model.unknown import Unknown

# Set and removed by the node controller; readiness and cordoning are reported by rules of their own.
OWN = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")


def toleration(taint: Taint) -> str:
    """In one line of YAML, as it is written below `tolerations:`."""
    if taint.value:
        return f'- {{key: {taint.key}, operator: Equal, value: "{taint.value}", effect: {taint.effect}}}'
    return f"- {{key: {taint.key}, operator: Exists, effect: {taint.effect}}}"


def taints(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    where: dict[Taint, list[str]] = defaultdict(list)
    for node in targets(facts, request):
        for taint in node.taints:
            if taint.effect in NO_EXECUTE and not taint.key.startswith(OWN):
                where[taint].append(node.name)
    if not where:
        yield passed("taints", "no taint keeps work away from the GPU nodes")
    for taint, nodes in where.items():
        yield _judged(taint, nodes, facts, request)


def _judged(taint: Taint, nodes: list[str], facts: ClusterFacts, request: ClusterRequest) -> Finding:
    at, line = f"{named(nodes)}: taint {taint}", toleration(taint)
    remove = f"kubectl taint nodes {' '.join(nodes)} {taint.key}:{taint.effect}-"
    if not _tolerated(taint, request.tolerations):
        words = f"{at} is not tolerated by the run. Add under tolerations: {line}"
        return failed("taints", words, nodes, [remove])
    plugins = () if isinstance(facts.plugins, Unknown) else facts.plugins
    if plugins and not any(_tolerated(taint, one.tolerations) for one in plugins):
        plugin = plugins[0]
        edit = f"kubectl -n {plugin.namespace} edit {plugin.kind.lower()} {plugin.name}"
        words = f"{at} is not tolerated by the device plugin {plugin.name}: once it restarts, no GPU is announced"
        return failed("taints", f"{words}. Add under tolerations: {line}", nodes, [edit, remove])
    if isinstance(facts.workloads, Unknown):
        return warning(
            "taints", f"{at}: the run tolerates it. Workloads need under tolerations: {line}", nodes, [remove]
        )
    users = [one for one in facts.workloads if _tolerated(taint, one.tolerations)]
    if users:
        return passed("taints", f"{at} is tolerated by the run and by {named(one.path for one in users)}", nodes)
    words = f"{at} is tolerated by the run and by no GPU workload. Workloads need under tolerations: {line}"
    return warning("taints", words, nodes, [remove])


def _tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    return any(one.covers(taint) for one in tolerations)

"""Which nodes a run can test, and why another one cannot. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes import marks
from gpukeeper.acceptance.launchers.kubernetes.options import GPU_RESOURCES, KubernetesOptions
from gpukeeper.acceptance.launchers.kubernetes.wire import Node, Pod, condition, count
from gpukeeper.model.errors import UsageError

ENDED = {"Succeeded", "Failed"}
_SHOWN = 3


def choose(
    spec: RunSpec, options: KubernetesOptions, nodes: Sequence[Node], pods: Iterable[Pod] | None
) -> tuple[Target, ...]:
    """`options`: with the namespace of the run. `nodes`: those that the selector selects. `pods`: None if they may not
    be listed; then no node counts as busy."""
    named = frozenset(spec.nodes)
    missing = sorted(named - {one.metadata.name for one in nodes})
    if missing:
        raise UsageError(
            f"The cluster has no node {', '.join(missing)}. Nothing was created. `kubectl get nodes` lists the names."
        )
    own = (options.namespace, spec.run)  # a run that is started again does not make its own nodes busy
    used = _used(one for one in pods or () if (one.metadata.namespace, marks.run_of(one.metadata.labels)) != own)
    found = []
    for node in sorted(nodes, key=lambda one: one.metadata.name):
        name = node.metadata.name
        if named and name not in named:
            continue
        resource, gpus = gpus_of(node, options.gpu)
        if gpus is None and not named and spec.gpus_per_node != 0:
            continue  # a node without GPUs is not meant by "all"
        why = _obstacle(spec, options, node, resource, gpus, used.get(name, {}))
        found.append(Target(node=name, gpus=gpus, resource=resource, excluded=why))
    return tuple(found)


def gpus_of(node: Node, resource: str = "") -> tuple[str, int | None]:
    """The resource that the node announces, and how many of it pods can get. None: it announces none."""
    for name in (resource,) if resource else GPU_RESOURCES:
        free, whole = count(node.status.allocatable, name), count(node.status.capacity, name)
        if free or whole:
            return name, free or 0
    return resource, None


def _obstacle(
    spec: RunSpec,
    options: KubernetesOptions,
    node: Node,
    resource: str,
    gpus: int | None,
    used: Mapping[str, Mapping[str, int]],
) -> str:
    """A sentence, or nothing."""
    name = node.metadata.name
    ready = condition(node.status.conditions, "Ready")
    if ready is None or ready.status != "True":
        why = f" ({ready.message or ready.reason})" if ready and (ready.message or ready.reason) else ""
        return f"the node is not ready{why}; `kubectl describe node {name}` has the reason"
    if node.spec.unschedulable and name not in spec.nodes:
        return f"the node is cordoned; name it with --nodes to test it, or run `kubectl uncordon {name}`"
    taints = [one for one in node.spec.taints or () if one.blocks]
    taints = [one for one in taints if one.key != "node.kubernetes.io/unschedulable"]
    if taints and not options.tolerate:
        words = ", ".join(one.words for one in taints)
        return f"the node has a taint that the run does not tolerate ({words}); use the option tolerate=yes"
    wanted = spec.gpus_per_node
    if wanted == 0:
        return ""
    if gpus is None:
        return f"the node announces no GPU ({' or '.join(GPU_RESOURCES)}); check its device plugin"
    if gpus == 0:
        return f"none of its GPUs can be allocated ({resource}: 0); check its device plugin"
    if wanted is not None and wanted > gpus:
        return f"{wanted} GPUs are wanted and the node has {gpus} ({resource})"
    taken = used.get(resource, {})
    free = gpus - sum(taken.values())
    if options.busy == "exclude" and free < (wanted or gpus):
        holders = [f"{pod} ({number})" for pod, number in sorted(taken.items())]
        more = f" and {len(holders) - _SHOWN} more" if len(holders) > _SHOWN else ""
        return (
            f"{sum(taken.values())} of its {gpus} GPUs are in use by {', '.join(holders[:_SHOWN])}{more}; "
            "wait, or use the option busy=wait"
        )
    return ""


def _used(pods: Iterable[Pod]) -> dict[str, dict[str, dict[str, int]]]:
    """GPUs by node, resource and pod. A pod that is being removed has them until it is gone."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for pod in pods:
        if not pod.spec.node_name or pod.status.phase in ENDED:
            continue
        for one in pod.spec.containers:
            limits = one.resources.limits if one.resources else None
            for resource in limits or {}:
                number = count(limits, resource) if "/" in resource else None
                if number:
                    taken = found[pod.spec.node_name][resource]
                    label = f"{pod.metadata.namespace}/{pod.metadata.name}"
                    taken[label] = taken.get(label, 0) + number
    return found

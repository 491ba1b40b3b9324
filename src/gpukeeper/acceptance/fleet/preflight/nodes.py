"""Nodes of a cluster and the GPUs that they announce: capacity, allocatable, in use and by which workloads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpukeeper.acceptance.fleet.preflight.cluster import (
    COUNT,
    GPU,
    PRESENT,
    ClusterFacts,
    ClusterRequest,
    NodeFacts,
    WorkloadFacts,
    shows_a_gpu,
    targets,
)
from gpukeeper.acceptance.fleet.preflight.finding import Finding, counted, failed, named, passed, warning
from gpukeeper.acceptance.fleet.preflight.quantity import whole
from gpukeeper.model.unknown import Unknown

INSTALL = (
    "helm upgrade --install gpu-operator gpu-operator --repo https://helm.ngc.nvidia.com/nvidia "
    "--namespace gpu-operator --create-namespace --wait"
)
ANNOUNCED = r"kubectl get nodes -o custom-columns='NODE:.metadata.name,GPUS:.status.allocatable.nvidia\.com/gpu'"


def announced(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """No node with a GPU is a FAIL, and never "found"."""
    nodes = _nodes(facts)
    found = targets(facts, request)
    if not found:
        yield _none_found(nodes, request)
        return
    used = _used(facts)
    yield _to_test(found, len(nodes), used or {}, request)
    for (product, gpus, usable, busy), group in _alike(found, used).items():
        free = "not known, workloads could not be listed" if busy is None else str(usable - busy)
        words = f"{named(node.name for node in group)}: {gpus} × {product or 'a model that no label names'} each"
        yield passed(
            "gpus-announced",
            f"{words}; capacity {gpus}, allocatable {usable}, free {free}",
            [node.name for node in group],
        )
    without = [node for node in nodes if not node.gpus and not node.slices]
    if without:
        words = f"mixed cluster: {counted(len(without), 'node')} without GPUs ({named(node.name for node in without)})"
        yield passed("mixed-cluster", f"{words}; the run leaves them alone", [node.name for node in without])


def _to_test(found: list[NodeFacts], of: int, used: dict[str, int], request: ClusterRequest) -> Finding:
    """What `accept` would test, and why it leaves the rest out."""
    out: dict[str, list[str]] = defaultdict(list)
    tested: list[NodeFacts] = []
    for node in found:
        why = _left_out(node, used.get(node.name, 0), request)
        if why:
            out[why].append(node.name)
        else:
            tested.append(node)
    total = sum(node.usable if request.gpus_per_node is None else request.gpus_per_node for node in tested)
    words = f"{counted(len(tested), 'node')} of {of} with {counted(total, 'GPU')} to test"
    if out:
        words += f"; left out: {'; '.join(f'{named(names)} ({why})' for why, names in out.items())}"
    if not tested:
        return failed("gpu-nodes", words, [node.name for node in found], [ANNOUNCED])
    return passed("gpu-nodes", words, [node.name for node in tested])


def _left_out(node: NodeFacts, busy: int, request: ClusterRequest) -> str:
    """As `accept` chooses its targets. Empty: it is tested."""
    wanted = request.gpus_per_node
    if not node.ready:
        return "not Ready"
    if node.cordoned and node.name not in request.nodes:
        return "cordoned"
    if wanted == 0:
        return ""
    if not node.usable:
        return "none of its GPUs can be allocated"
    if wanted is not None and wanted > node.usable:
        return f"{wanted} GPUs are wanted, {node.usable} can be allocated"
    return "in use" if node.usable - busy < (wanted or node.usable) else ""


def _none_found(nodes: tuple[NodeFacts, ...], request: ClusterRequest) -> Finding:
    if any(node.gpus for node in nodes):
        every = [node.name for node in nodes if node.gpus]
        which = f"selector {request.selector}" if request.selector else f"nodes {named(request.nodes)}"
        words = f"{which}: none of them announces {GPU}. Nodes that do: {named(every)}"
        return failed("gpu-nodes", words, every, ["kubectl get nodes --show-labels", ANNOUNCED])
    shown = [node.name for node in nodes if shows_a_gpu(node)]
    words = f"no node announces {GPU}: 0 of {counted(len(nodes), 'node')}. There is nothing to test"
    if shown:
        words += f". By their labels {named(shown)} have GPUs, so the device plugin does not work there"
    return failed("gpu-nodes", words, shown, [ANNOUNCED, INSTALL])


def _alike(
    nodes: list[NodeFacts], used: dict[str, int] | None
) -> dict[tuple[str, int, int, int | None], list[NodeFacts]]:
    groups: dict[tuple[str, int, int, int | None], list[NodeFacts]] = defaultdict(list)
    for node in nodes:
        busy = None if used is None else used.get(node.name, 0)
        groups[node.product, node.gpus, node.usable, busy].append(node)
    return groups


def present(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """Nodes that do not exist, are not ready, or take no new work."""
    nodes = {node.name: node for node in _nodes(facts)}
    missing = [name for name in request.nodes if name not in nodes]
    if missing:
        yield failed("node-missing", f"{named(missing)}: no such node", missing, ["kubectl get nodes"])
    chosen = targets(facts, request)
    silent = [node.name for node in chosen if not node.ready]
    if silent:
        yield failed(
            "node-not-ready",
            f"{named(silent)}: not Ready; work is not started there",
            silent,
            [f"kubectl describe node {silent[0]}"],
        )
    cordoned = [node.name for node in chosen if node.cordoned]
    if cordoned:
        words = (
            f"{named(cordoned)}: cordoned. Other work is not started there; a run tests only those named with --nodes"
        )
        yield warning("node-cordoned", words, cordoned, [f"kubectl uncordon {' '.join(cordoned)}"])


def health(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """GPUs that a node has and does not offer."""
    for node in targets(facts, request):
        if node.usable < node.gpus:
            lost = node.gpus - node.usable
            words = f"{node.name}: {node.usable} of {counted(node.gpus, 'GPU')} allocatable; the device plugin reports"
            yield failed(
                "gpus-unhealthy",
                f"{words} {lost} as unhealthy",
                [node.name],
                [f"kubectl describe node {node.name}", f"kubectl get events -A --field-selector source={node.name}"],
            )
        physical = whole(node.labels.get(COUNT))
        if physical > node.gpus and not node.slices:
            words = f"{node.name}: {counted(node.gpus, 'GPU')} announced, {physical} by its label {COUNT}"
            yield failed("gpus-missing", words, [node.name], [f"kubectl describe node {node.name}"])
    silent = [node.name for node in _nodes(facts) if shows_a_gpu(node) and not node.gpus and not node.slices]
    if silent and any(node.gpus for node in _nodes(facts)):
        words = f"{named(silent)}: a GPU by its labels, none announced; the device plugin does not run there"
        yield failed("gpus-missing", words, silent, [f"kubectl describe node {silent[0]}", ANNOUNCED])


def sameness(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """Peers are compared with each other: models and counts that differ weaken the comparison."""
    chosen = targets(facts, request)
    models = {node.product for node in chosen if node.product}
    counts = {node.gpus for node in chosen}
    if len(models) > 1:
        words = f"GPU models differ: {named(sorted(models))}. Each model is compared with its own peers only"
        yield warning(
            "gpus-differ", words, [node.name for node in chosen], ["kubectl get nodes -L nvidia.com/gpu.product"]
        )
    elif len(counts) > 1:
        words = f"nodes have different numbers of GPUs: {named(map(str, sorted(counts)))}"
        yield warning(
            "gpus-differ", f"{words}. Set --expect for each group", [node.name for node in chosen], [ANNOUNCED]
        )
    sliced = [node.name for node in _nodes(facts) if node.slices]
    if sliced:
        words = f"{named(sliced)}: GPUs are split (MIG). The run tests whole GPUs only"
        off = [f"kubectl label node {' '.join(sliced)} nvidia.com/mig.config=all-disabled --overwrite"]
        yield warning("gpus-shared", words, sliced, off)
    shared = [node.name for node in chosen if whole(node.labels.get("nvidia.com/gpu.replicas")) > 1]
    if shared:
        words = (
            f"{named(shared)}: time slicing announces each GPU more than once; one GPU would be tested several times"
        )
        show = "kubectl get configmaps -A -l app.kubernetes.io/name=nvidia-device-plugin"
        yield failed("gpus-shared", f"{words}. Remove sharing.timeSlicing from its configuration", shared, [show])


def labelled(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """nvidia.com/gpu is a resource. As a label or in a selector it selects nothing."""
    keys = {part.strip().partition("=")[0].rstrip("!") for part in request.selector.split(",")}
    if GPU in keys:
        words = f"the selector uses {GPU}, which is a resource and no label; select by {PRESENT}=true"
        yield failed("gpu-selector", words, (), [f"gpukeeper accept preflight --on kubernetes --nodes {PRESENT}=true"])
    chosen = targets(facts, request)
    wrong = [node.name for node in chosen if GPU in node.labels]
    if wrong:
        words = f"{named(wrong)}: {GPU} is set as a label. It is a resource; the label does not announce a GPU"
        yield warning("gpu-labels", words, wrong, [f"kubectl label node {' '.join(wrong)} {GPU}-"])
    bare = [node.name for node in chosen if not node.product]
    if bare:
        words = f"{named(bare)}: no label nvidia.com/gpu.product; gpu-feature-discovery does not run there"
        yield warning("gpu-labels", words, bare, [INSTALL])
    elif chosen:
        yield passed("gpu-labels", "every GPU node is labelled with its model (nvidia.com/gpu.product)")


def occupied(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """The run needs GPUs that other work has."""
    assert not isinstance(facts.workloads, Unknown)
    used = _used(facts) or {}
    for node in targets(facts, request):
        wanted = node.usable if request.gpus_per_node is None else request.gpus_per_node
        busy = used.get(node.name, 0)
        if wanted > node.gpus:
            words = f"{node.name}: {counted(wanted, 'GPU')} requested with --gpus-per-node, {node.gpus} announced"
            yield failed("gpus-in-use", words, [node.name], ["repeat with a smaller --gpus-per-node, or with --nodes"])
        elif busy and wanted > node.usable - busy:
            users = [one for one in facts.workloads if one.node == node.name]
            yield _waits(node, wanted, busy, users)


def _waits(node: NodeFacts, wanted: int, busy: int, users: list[WorkloadFacts]) -> Finding:
    by = named(f"{one.path} ({one.gpus})" for one in users)
    words = (
        f"{node.name}: {busy} of {counted(node.usable, 'GPU')} in use by {by}; the run needs {wanted}, "
        "so it leaves the node out, or waits with --option busy=wait"
    )
    options = [f"kubectl -n {one.namespace} get pod {one.name} -o wide" for one in users[:3]]
    free = node.usable - busy
    more = [f"gpukeeper accept --on kubernetes --nodes {node.name} --gpus-per-node {free}"] if free > 0 else []
    return warning("gpus-in-use", words, [one.path for one in users], [*options, *more])


def _nodes(facts: ClusterFacts) -> tuple[NodeFacts, ...]:
    assert not isinstance(facts.nodes, Unknown), "This is a bug in gpukeeper: a rule that needs nodes does not say so."
    return facts.nodes


def _used(facts: ClusterFacts) -> dict[str, int] | None:
    if isinstance(facts.workloads, Unknown):
        return None
    used: dict[str, int] = defaultdict(int)
    for one in facts.workloads:
        used[one.node] += one.gpus
    return used

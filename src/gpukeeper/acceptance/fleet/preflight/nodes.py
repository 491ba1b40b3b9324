"""The GPU nodes of a cluster: capacity, allocatable and use, taints, device plugin, drivers, networks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from gpukeeper.acceptance.fleet.preflight.facts import (
    COUNT,
    DRIVER,
    GPU,
    PRESENT,
    ClusterFacts,
    ClusterRequest,
    Finding,
    NodeFacts,
    PluginFacts,
    WorkloadFacts,
    counted,
    failed,
    named,
    passed,
    shows_a_gpu,
    targets,
    unchecked,
    warning,
    whole,
)
from gpukeeper.clients.kubernetes.wire import Taint, Toleration
from gpukeeper.model.unknown import Unknown, direct

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


# Set and removed by the node controller; readiness and cordoning are reported by rules of their own.
OWN_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")


def toleration(taint: Taint) -> str:
    """In one line of YAML, as it is written below `tolerations:`."""
    if taint.value:
        return f'- {{key: {taint.key}, operator: Equal, value: "{taint.value}", effect: {taint.effect}}}'
    return f"- {{key: {taint.key}, operator: Exists, effect: {taint.effect}}}"


def taints(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    where: dict[Taint, list[str]] = defaultdict(list)
    for node in targets(facts, request):
        for taint in node.taints:
            if taint.blocks and not taint.key.startswith(OWN_TAINTS):
                where[taint].append(node.name)
    if not where:
        yield passed("taints", "no taint keeps work away from the GPU nodes")
    for taint, nodes in where.items():
        yield _judged_taint(taint, nodes, facts, request)


def _judged_taint(taint: Taint, nodes: list[str], facts: ClusterFacts, request: ClusterRequest) -> Finding:
    at, line = f"{named(nodes)}: taint {taint.words}", toleration(taint)
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


SEARCH_PLUGIN = "kubectl get daemonsets,pods -A | grep -i device-plugin"


def device_plugin(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.plugins, Unknown)
    if not facts.plugins:
        if targets(facts, request):
            words = (
                "GPUs are announced, but no NVIDIA device plugin was found in any namespace; another program does it"
            )
            yield warning("device-plugin", words, (), [SEARCH_PLUGIN])
        else:
            yield failed("device-plugin", "no NVIDIA device plugin in any namespace", (), [SEARCH_PLUGIN, INSTALL])
        return
    for plugin in facts.plugins:
        yield _plugin_state(plugin)


def _plugin_state(plugin: PluginFacts) -> Finding:
    where = f"{plugin.kind} {plugin.namespace}/{plugin.name}"
    show = f"kubectl -n {plugin.namespace} describe {plugin.kind.lower()} {plugin.name}"
    if plugin.wanted == 0:
        words = f"{where} runs on no node: its nodeSelector or affinity matches none"
        return failed("device-plugin", words, [where], [show])
    if plugin.ready < plugin.wanted:
        words = f"{where} is ready on {plugin.ready} of {counted(plugin.wanted, 'node')}"
        log = f"kubectl -n {plugin.namespace} logs {plugin.kind.lower()}/{plugin.name} --tail=50"
        return failed("device-plugin", words, [where], [show, log])
    return passed("device-plugin", f"{where} is ready on {counted(plugin.wanted, 'node')}", [where])


def drivers(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    chosen = targets(facts, request)
    by_version: dict[str, list[str]] = defaultdict(list)
    for node in chosen:
        by_version[node.driver].append(node.name)
    unlabelled = by_version.pop("", [])
    if len(by_version) > 1:
        words = "; ".join(f"{version} on {named(nodes)}" for version, nodes in sorted(by_version.items()))
        show = [
            f"kubectl get nodes -L {DRIVER}",
            "kubectl get clusterpolicies.nvidia.com -o jsonpath='{.items[*].spec.driver.version}'",
        ]
        yield warning("drivers", f"driver versions differ: {words}", [node.name for node in chosen], show)
    if unlabelled:
        words = f"{named(unlabelled)}: no label has the driver version; gpu-feature-discovery does not run there"
        trial = "gpukeeper accept preflight --on kubernetes --trial-on all --image IMAGE"
        yield unchecked("drivers", words, unlabelled, [INSTALL, trial])
    elif len(by_version) == 1:
        version = next(iter(by_version))
        yield passed("drivers", f"driver {version} on {counted(len(chosen), 'node')}")


WORKLOADS_MAX = 5  # whose variables are shown
EFA = "vpc.amazonaws.com/efa"
RDMA_PREFIXES = ("rdma/", "nvidia.com/hostdev", "nvidia.com/mlnxnics", "nvidia.com/rdma", "mellanox.com/")
# Labels of node-feature-discovery and of the network operator. 15b3 is the vendor number of Mellanox.
IB_LABELS = (
    "feature.node.kubernetes.io/rdma.capable",
    "feature.node.kubernetes.io/rdma.available",
    "feature.node.kubernetes.io/pci-15b3.present",
    "feature.node.kubernetes.io/custom-rdma.capable",
    "feature.node.kubernetes.io/custom-rdma.available",
    "network.nvidia.com/operator.mofed.wait",
)
SWITCHED_ON = frozenset({"1", "true", "yes", "on"})


@direct
class Network(StrEnum):
    """What NCCL has to use between nodes."""

    NVLINK = "NVLink only"  # one node: nothing leaves it
    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    EFA = "EFA"
    ETHERNET = "Ethernet"
    RDMA = "InfiniBand or RoCE"  # announced; only a trial shows the link layer


NCCL_ADVICE = {
    Network.NVLINK: "one node: NCCL uses NVLink or PCIe. NCCL_IB_DISABLE=1 avoids a search for adapters",
    Network.INFINIBAND: (
        "InfiniBand: NCCL_IB_DISABLE=0, NCCL_NET_GDR_LEVEL=5 (GPUDirect RDMA), NCCL_IB_HCA=mlx5; "
        "request the RDMA resource and IPC_LOCK in every pod"
    ),
    Network.ROCE: (
        "RoCE: NCCL_IB_DISABLE=0, NCCL_NET_GDR_LEVEL=5, NCCL_IB_GID_INDEX=3 (the RoCE v2 address; check with "
        "show_gids), NCCL_IB_TC as configured in the switches"
    ),
    Network.EFA: (
        "EFA: FI_PROVIDER=efa with the aws-ofi-nccl plugin in the image, NCCL_NET_GDR_LEVEL=5 on nodes with GPUDirect; "
        "request vpc.amazonaws.com/efa. NCCL_IB_DISABLE has no effect on EFA"
    ),
    Network.ETHERNET: "Ethernet: NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME=INTERFACE (the one between the nodes)",
}


def rdma_resources(node: NodeFacts) -> dict[str, int]:
    """RDMA devices that a node announces."""
    found = {name: whole(count) for name, count in node.allocatable.items() if _is_rdma(name)}
    return {name: count for name, count in found.items() if count}


def _is_rdma(resource: str) -> bool:
    return resource == EFA or resource.startswith(RDMA_PREFIXES)


def has_rdma_labels(node: NodeFacts) -> bool:
    return any(node.labels.get(name) in ("true", "false") for name in IB_LABELS[-1:]) or any(
        node.labels.get(name) == "true" for name in IB_LABELS[:-1]
    )


def network_of(nodes: Sequence[NodeFacts], layers: frozenset[str] = frozenset()) -> Network:
    """`layers`: link layers of the ports, where a trial read them."""
    if len(nodes) < 2:
        return Network.NVLINK
    if any(EFA in rdma_resources(node) for node in nodes):
        return Network.EFA
    if not any(rdma_resources(node) or has_rdma_labels(node) for node in nodes) and not layers:
        return Network.ETHERNET
    if "InfiniBand" in layers:
        return Network.INFINIBAND
    return Network.ROCE if layers else Network.RDMA


def rdma(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    chosen = targets(facts, request)
    groups: dict[tuple[tuple[str, int], ...], list[NodeFacts]] = defaultdict(list)
    for node in chosen:
        groups[tuple(sorted(rdma_resources(node).items()))].append(node)
    wanted = request.rdma.partition("=")[0]
    lacking = [node.name for node in chosen if wanted and wanted not in rdma_resources(node)]
    if lacking:
        words = f"{named(lacking)}: the RDMA resource {wanted} that the run requests is not announced"
        yield failed("rdma", words, lacking, [f"kubectl describe node {lacking[0]}"])
    if len(groups) > 1 and not lacking:
        words = "; ".join(
            f"{named(one.name for one in nodes)}: {_listed_resources(key)}" for key, nodes in groups.items()
        )
        yield warning(
            "rdma", f"RDMA resources differ: {words}", [one.name for one in chosen], ["kubectl describe nodes"]
        )
    elif groups and not lacking:
        yield from _same_rdma(next(iter(groups)), chosen)


def _same_rdma(key: tuple[tuple[str, int], ...], chosen: list[NodeFacts]) -> Iterator[Finding]:
    if key:
        yield passed("rdma", f"every GPU node announces {_listed_resources(key)}", [node.name for node in chosen])
        return
    marked = [node.name for node in chosen if has_rdma_labels(node)]
    if marked:
        words = f"{named(marked)}: an RDMA adapter by its labels, but no RDMA resource is announced; pods cannot use it"
        plugin = (
            "helm upgrade --install network-operator network-operator --repo https://helm.ngc.nvidia.com/nvidia "
            "--namespace nvidia-network-operator --create-namespace --wait"
        )
        yield warning("rdma", words, marked, [plugin])
    else:
        yield passed("rdma", "no RDMA resource is announced; runs over several nodes use TCP")


def _listed_resources(key: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in key) or "none"


def nccl(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.workloads, Unknown)
    chosen = targets(facts, request)
    network = network_of(chosen)
    for one in facts.workloads[:WORKLOADS_MAX]:
        yield from _nccl_variables(one, network)
    yield nccl_advice(network)


def nccl_advice(network: Network) -> Finding:
    if network is Network.RDMA:
        words = f"{NCCL_ADVICE[Network.INFINIBAND]}. {NCCL_ADVICE[Network.ROCE]}. --trial shows which of both"
        return passed("nccl-advice", words)
    return passed("nccl-advice", NCCL_ADVICE[network])


def _nccl_variables(one: WorkloadFacts, network: Network) -> Iterator[Finding]:
    known = ", ".join(
        f"{name}={'(set from elsewhere)' if value is None else value}" for name, value in one.variables.items()
    )
    more = f"; also variables from {named(one.sources)}, not read" if one.sources else ""
    problems = [*_nccl_problems(one.variables, network)]
    target = one.root or f"pod/{one.name}"
    for name, words in problems:
        fix = f"kubectl -n {one.namespace} set env {target} {name}-"
        yield warning("nccl", f"{one.path}: {name}={one.variables[name]} {words}", [one.path], [fix])
    if not problems:
        yield passed("nccl", f"{one.path}: {known or 'sets no NCCL variable'}{more}", [one.path])


def _nccl_problems(variables: Mapping[str, str | None], network: Network) -> Iterator[tuple[str, str]]:
    values = {name: value for name, value in variables.items() if value is not None}
    if values.get("NCCL_IB_DISABLE", "").lower() in SWITCHED_ON and network in (
        Network.INFINIBAND,
        Network.ROCE,
        Network.RDMA,
    ):
        yield "NCCL_IB_DISABLE", f"turns {network} off: NCCL falls back to TCP"
    if values.get("NCCL_NET_GDR_LEVEL", "").upper() in ("0", "LOC") and network not in (
        Network.NVLINK,
        Network.ETHERNET,
    ):
        yield "NCCL_NET_GDR_LEVEL", "turns GPUDirect RDMA off; use 5"
    if values.get("NCCL_P2P_DISABLE", "").lower() in SWITCHED_ON:
        yield "NCCL_P2P_DISABLE", "turns NVLink and PCIe peer-to-peer off"
    if values.get("NCCL_SHM_DISABLE", "").lower() in SWITCHED_ON:
        yield "NCCL_SHM_DISABLE", "turns shared memory between processes off"
    if values.get("NCCL_SOCKET_IFNAME", "") in ("lo", "docker0"):
        yield "NCCL_SOCKET_IFNAME", "is an interface that reaches no other node"

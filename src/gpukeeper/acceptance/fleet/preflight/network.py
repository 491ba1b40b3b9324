"""RDMA and InfiniBand of the nodes, and NCCL variables of workloads, with advice for each kind of network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from gpukeeper.acceptance.fleet.preflight.cluster import ClusterFacts, ClusterRequest, NodeFacts, WorkloadFacts, targets
from gpukeeper.acceptance.fleet.preflight.finding import Finding, failed, named, passed, warning
from gpukeeper.acceptance.fleet.preflight.quantity import whole
from gpukeeper.model.direct import direct
from gpukeeper.model.unknown import Unknown

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
ON = frozenset({"1", "true", "yes", "on"})


@direct
class Network(StrEnum):
    """What NCCL has to use between nodes."""

    NVLINK = "NVLink only"  # one node: nothing leaves it
    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    EFA = "EFA"
    ETHERNET = "Ethernet"
    RDMA = "InfiniBand or RoCE"  # announced; only a trial shows the link layer


ADVICE = {
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


def resources(node: NodeFacts) -> dict[str, int]:
    """RDMA devices that a node announces."""
    found = {name: whole(count) for name, count in node.allocatable.items() if _is_rdma(name)}
    return {name: count for name, count in found.items() if count}


def _is_rdma(resource: str) -> bool:
    return resource == EFA or resource.startswith(RDMA_PREFIXES)


def has_labels(node: NodeFacts) -> bool:
    return any(node.labels.get(name) in ("true", "false") for name in IB_LABELS[-1:]) or any(
        node.labels.get(name) == "true" for name in IB_LABELS[:-1]
    )


def network_of(nodes: Sequence[NodeFacts], layers: frozenset[str] = frozenset()) -> Network:
    """`layers`: link layers of the ports, where a trial read them."""
    if len(nodes) < 2:
        return Network.NVLINK
    if any(EFA in resources(node) for node in nodes):
        return Network.EFA
    if not any(resources(node) or has_labels(node) for node in nodes) and not layers:
        return Network.ETHERNET
    if "InfiniBand" in layers:
        return Network.INFINIBAND
    return Network.ROCE if layers else Network.RDMA


def rdma(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    chosen = targets(facts, request)
    groups: dict[tuple[tuple[str, int], ...], list[NodeFacts]] = defaultdict(list)
    for node in chosen:
        groups[tuple(sorted(resources(node).items()))].append(node)
    wanted = request.rdma.partition("=")[0]
    lacking = [node.name for node in chosen if wanted and wanted not in resources(node)]
    if lacking:
        words = f"{named(lacking)}: the RDMA resource {wanted} that the run requests is not announced"
        yield failed("rdma", words, lacking, [f"kubectl describe node {lacking[0]}"])
    if len(groups) > 1 and not lacking:
        words = "; ".join(f"{named(one.name for one in nodes)}: {_listed(key)}" for key, nodes in groups.items())
        yield warning(
            "rdma", f"RDMA resources differ: {words}", [one.name for one in chosen], ["kubectl describe nodes"]
        )
    elif groups and not lacking:
        yield from _same(next(iter(groups)), chosen)


def _same(key: tuple[tuple[str, int], ...], chosen: list[NodeFacts]) -> Iterator[Finding]:
    if key:
        yield passed("rdma", f"every GPU node announces {_listed(key)}", [node.name for node in chosen])
        return
    marked = [node.name for node in chosen if has_labels(node)]
    if marked:
        words = f"{named(marked)}: an RDMA adapter by its labels, but no RDMA resource is announced; pods cannot use it"
        plugin = (
            "helm upgrade --install network-operator network-operator --repo https://helm.ngc.nvidia.com/nvidia "
            "--namespace nvidia-network-operator --create-namespace --wait"
        )
        yield warning("rdma", words, marked, [plugin])
    else:
        yield passed("rdma", "no RDMA resource is announced; runs over several nodes use TCP")


def _listed(key: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in key) or "none"


def nccl(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.workloads, Unknown)
    chosen = targets(facts, request)
    network = network_of(chosen)
    for one in facts.workloads[:WORKLOADS_MAX]:
        yield from _variables(one, network)
    yield advice(network)


def advice(network: Network) -> Finding:
    if network is Network.RDMA:
        words = f"{ADVICE[Network.INFINIBAND]}. {ADVICE[Network.ROCE]}. --trial shows which of both"
        return passed("nccl-advice", words)
    return passed("nccl-advice", ADVICE[network])


def _variables(one: WorkloadFacts, network: Network) -> Iterator[Finding]:
    known = ", ".join(
        f"{name}={'(set from elsewhere)' if value is None else value}" for name, value in one.variables.items()
    )
    more = f"; also variables from {named(one.sources)}, not read" if one.sources else ""
    problems = [*_problems(one.variables, network)]
    target = one.root or f"pod/{one.name}"
    for name, words in problems:
        fix = f"kubectl -n {one.namespace} set env {target} {name}-"
        yield warning("nccl", f"{one.path}: {name}={one.variables[name]} {words}", [one.path], [fix])
    if not problems:
        yield passed("nccl", f"{one.path}: {known or 'sets no NCCL variable'}{more}", [one.path])


def _problems(variables: Mapping[str, str | None], network: Network) -> Iterator[tuple[str, str]]:
    values = {name: value for name, value in variables.items() if value is not None}
    if values.get("NCCL_IB_DISABLE", "").lower() in ON and network in (Network.INFINIBAND, Network.ROCE, Network.RDMA):
        yield "NCCL_IB_DISABLE", f"turns {network} off: NCCL falls back to TCP"
    if values.get("NCCL_NET_GDR_LEVEL", "").upper() in ("0", "LOC") and network not in (
        Network.NVLINK,
        Network.ETHERNET,
    ):
        yield "NCCL_NET_GDR_LEVEL", "turns GPUDirect RDMA off; use 5"
    if values.get("NCCL_P2P_DISABLE", "").lower() in ON:
        yield "NCCL_P2P_DISABLE", "turns NVLink and PCIe peer-to-peer off"
    if values.get("NCCL_SHM_DISABLE", "").lower() in ON:
        yield "NCCL_SHM_DISABLE", "turns shared memory between processes off"
    if values.get("NCCL_SOCKET_IFNAME", "") in ("lo", "docker0"):
        yield "NCCL_SOCKET_IFNAME", "is an interface that reaches no other node"

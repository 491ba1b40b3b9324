"""Device plugin, drivers, RDMA and NCCL variables."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import PRODUCT
from gpukeeper.acceptance.fleet.preflight.nodes import NCCL_ADVICE, Network, network_of
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.preflight.clusters import DRIVER, asking, judged, node, plugin, the, workload

IB = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8", "rdma/hca_shared": "4"}
MARKED = {PRODUCT: "A", "feature.node.kubernetes.io/rdma.available": "true", **DRIVER}


def test_the_device_plugin_is_named_with_its_namespace() -> None:
    one = the("device-plugin", judged())
    assert one.message == "DaemonSet gpu-operator/nvidia-device-plugin is ready on 2 nodes"


def test_a_device_plugin_that_is_not_ready_or_selects_no_node() -> None:
    one = the("device-plugin", judged(plugins=(plugin(ready=1),)))
    assert one.verdict is Grade.FAIL
    assert one.fix[0] == "kubectl -n gpu-operator describe daemonset nvidia-device-plugin"
    assert "runs on no node" in the("device-plugin", judged(plugins=(plugin(wanted=0, ready=0),))).message


def test_without_a_plugin_gpus_must_come_from_elsewhere() -> None:
    assert the("device-plugin", judged(plugins=())).verdict is Grade.WARN
    none = judged(plugins=(), nodes=(node("cpu-1", gpus=0),))
    assert the("device-plugin", none).verdict is Grade.FAIL


def test_a_plugin_list_that_could_not_be_read_is_never_fine() -> None:
    one = the("device-plugin", judged(plugins=Unknown("daemonsets.apps is forbidden")))
    assert one.verdict is Grade.INCONCLUSIVE
    assert one.fix[0] == "kubectl auth can-i list daemonsets.apps --all-namespaces"


def test_drivers_that_differ_are_named_with_their_nodes() -> None:
    new = node("gpu-2", labels={PRODUCT: "A", "nvidia.com/cuda.driver-version.full": "580.20.00"})
    one = the("drivers", judged(nodes=(node("gpu-1"), new)))
    assert one.verdict is Grade.WARN
    assert one.message == "driver versions differ: 570.86.15 on gpu-1; 580.20.00 on gpu-2"


def test_a_driver_that_no_label_shows_could_not_be_checked() -> None:
    one = the("drivers", judged(nodes=(node("gpu-1"), node("gpu-2", labels={PRODUCT: "A"}))))
    assert one.verdict is Grade.INCONCLUSIVE
    assert "gpu-2" in one.message


def test_rdma_resources_of_all_nodes() -> None:
    same = judged(nodes=(node("gpu-1", allocatable=IB), node("gpu-2", allocatable=IB)))
    assert the("rdma", same).message == "every GPU node announces rdma/hca_shared (4)"
    differ = judged(nodes=(node("gpu-1", allocatable=IB), node("gpu-2")))
    assert the("rdma", differ).verdict is Grade.WARN
    assert "gpu-2: none" in the("rdma", differ).message
    assert "use TCP" in the("rdma", judged()).message


def test_an_adapter_without_a_resource_cannot_be_used() -> None:
    one = the("rdma", judged(nodes=(node("gpu-1", labels=MARKED),)))
    assert one.verdict is Grade.WARN
    assert one.fix[0].startswith("helm upgrade --install network-operator")


def test_an_rdma_resource_that_the_run_requests_and_no_node_has() -> None:
    one = the("rdma", judged(asking(rdma="rdma/ib=1")))
    assert one.verdict is Grade.FAIL
    assert one.about == ("gpu-1", "gpu-2")


@pytest.mark.parametrize(
    ("nodes", "layers", "network"),
    [
        ((node("a"),), (), Network.NVLINK),
        ((node("a"), node("b")), (), Network.ETHERNET),
        ((node("a", allocatable=IB), node("b", allocatable=IB)), (), Network.RDMA),
        ((node("a", labels=MARKED), node("b")), (), Network.RDMA),
        ((node("a", allocatable=IB), node("b", allocatable=IB)), ("InfiniBand",), Network.INFINIBAND),
        ((node("a", allocatable=IB), node("b", allocatable=IB)), ("Ethernet",), Network.ROCE),
        ((node("a", allocatable={"vpc.amazonaws.com/efa": "4"}), node("b")), (), Network.EFA),
    ],
)
def test_which_network_nccl_has_to_use(nodes: tuple, layers: tuple, network: Network) -> None:
    assert network_of(nodes, frozenset(layers)) is network


def test_the_advice_for_each_network() -> None:
    assert "NCCL_IB_DISABLE=1" in NCCL_ADVICE[Network.NVLINK]
    assert "NCCL_IB_DISABLE=0, NCCL_NET_GDR_LEVEL=5" in NCCL_ADVICE[Network.INFINIBAND]
    assert "NCCL_NET_GDR_LEVEL=5, NCCL_IB_GID_INDEX=3" in NCCL_ADVICE[Network.ROCE]
    assert "FI_PROVIDER=efa" in NCCL_ADVICE[Network.EFA]
    assert "NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME" in NCCL_ADVICE[Network.ETHERNET]
    assert the("nccl-advice", judged()).message == NCCL_ADVICE[Network.ETHERNET]
    both = the("nccl-advice", judged(nodes=(node("a", allocatable=IB), node("b", allocatable=IB)))).message
    assert NCCL_ADVICE[Network.INFINIBAND] in both
    assert NCCL_ADVICE[Network.ROCE] in both


def test_variables_that_turn_the_network_off() -> None:
    nodes = (node("gpu-1", allocatable=IB), node("gpu-2", allocatable=IB))
    wrong = {"NCCL_IB_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_P2P_DISABLE": "1"}
    users = (workload("train", gpus=0, root="deployment/train", variables=wrong),)
    found = [one for one in judged(nodes=nodes, workloads=users) if one.code == "nccl"]
    assert [one.verdict for one in found] == [Grade.WARN] * 3
    assert found[0].message.startswith("team/train: NCCL_IB_DISABLE=1 turns InfiniBand or RoCE off")
    assert found[0].fix == ("kubectl -n team set env deployment/train NCCL_IB_DISABLE-",)


def test_the_same_variable_is_right_on_ethernet() -> None:
    users = (workload("train", gpus=0, variables={"NCCL_IB_DISABLE": "1"}),)
    assert the("nccl", judged(workloads=users)).verdict is Grade.PASS


def test_at_most_five_workloads_are_shown() -> None:
    users = tuple(workload(f"w{n}", gpus=0) for n in range(9))
    assert len([one for one in judged(workloads=users) if one.code == "nccl"]) == 5


def test_variables_that_come_from_elsewhere_are_named_and_not_judged() -> None:
    users = (workload("train", gpus=0, variables={"NCCL_IB_HCA": None}, sources=("ConfigMap nccl",)),)
    words = the("nccl", judged(workloads=users)).message
    assert "NCCL_IB_HCA=(set from elsewhere)" in words
    assert "ConfigMap nccl, not read" in words

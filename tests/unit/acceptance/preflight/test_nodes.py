"""Nodes, their GPUs, labels and taints: each planted problem is found, with its verdict and the command to fix it."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import GPU, PRODUCT, verdict_of
from gpukeeper.acceptance.fleet.preflight.nodes import toleration
from gpukeeper.clients.kubernetes.wire import Taint, Toleration
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.kubernetes.clusters import add_node, cluster, launcher, run, spec
from tests.unit.acceptance.preflight.clusters import DRIVER, asking, judged, node, plugin, the, workload

TAINT = Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")


def test_a_healthy_cluster_passes() -> None:
    found = judged()
    assert {one.verdict for one in found} == {Grade.PASS}
    assert the("gpu-nodes", found).message == "2 nodes of 3 with 16 GPUs to test"
    assert the("gpus-announced", found).message == (
        "gpu-1, gpu-2: 8 × NVIDIA-H100-80GB-HBM3 each; capacity 8, allocatable 8, free 8"
    )


def test_no_gpu_node_is_a_fail_and_not_found() -> None:
    one = the("gpu-nodes", judged(nodes=(node("cpu-1", gpus=0),)))
    assert one.verdict is Grade.FAIL
    assert "0 of 1 node" in one.message
    assert one.fix[-1].startswith("helm upgrade --install gpu-operator")


def test_nodes_that_should_have_gpus_are_named_when_none_announces_any() -> None:
    silent = node("gpu-1", gpus=0, labels={"feature.node.kubernetes.io/pci-10de.present": "true"})
    one = the("gpu-nodes", judged(nodes=(silent,)))
    assert "gpu-1 have GPUs, so the device plugin does not work there" in one.message


def test_a_mixed_cluster_is_noticed() -> None:
    assert "1 node without GPUs (cpu-1)" in the("mixed-cluster", judged()).message


def test_names_that_do_not_exist_and_names_without_gpus() -> None:
    found = judged(asking(nodes=("gpu-1", "gpu-9")))
    assert the("node-missing", found).verdict is Grade.FAIL
    none = the("gpu-nodes", judged(asking(nodes=("cpu-1",))))
    assert none.verdict is Grade.FAIL
    assert "gpu-1, gpu-2" in none.message


def test_only_selected_nodes_are_judged() -> None:
    nodes = (node("gpu-1"), node("gpu-2", ready=False))
    found = judged(asking(selector="pool=a"), nodes=nodes, selected=frozenset({"gpu-1"}))
    assert the("gpu-nodes", found).about == ("gpu-1",)
    assert verdict_of(found) is Grade.PASS


def test_a_node_that_is_not_ready_or_cordoned() -> None:
    found = judged(nodes=(node("gpu-1", ready=False), node("gpu-2", cordoned=True)))
    assert the("node-not-ready", found).verdict is Grade.FAIL
    assert the("node-cordoned", found).fix == ("kubectl uncordon gpu-2",)


def test_only_what_a_run_would_test_is_counted() -> None:
    """It counted 32 GPUs "to test" on nodes that `accept` then left out."""
    nodes = (
        node("gpu-1"),
        node("gpu-2", ready=False),
        node("gpu-3", cordoned=True),
        node("gpu-4", allocatable={GPU: "0"}),
        node("gpu-5"),
        node("gpu-6", cordoned=True),
    )
    held = (workload("train", on="gpu-5", gpus=6),)
    found = the("gpu-nodes", judged(nodes=nodes, workloads=held))
    assert (found.verdict, found.about) == (Grade.PASS, ("gpu-1",))
    assert found.message == (
        "1 node of 6 with 8 GPUs to test; left out: gpu-2 (not Ready); gpu-3, gpu-6 (cordoned); "
        "gpu-4 (none of its GPUs can be allocated); gpu-5 (in use)"
    )
    few = the("gpu-nodes", judged(asking(gpus_per_node=2, nodes=("gpu-3", "gpu-5")), nodes=nodes, workloads=held))
    assert few.message == "2 nodes of 6 with 4 GPUs to test", "a cordoned node that is named is tested"
    none = the("gpu-nodes", judged(asking(gpus_per_node=9), nodes=nodes[:1]))
    assert (none.verdict, none.message) == (
        Grade.FAIL,
        "0 nodes of 1 with 0 GPUs to test; left out: gpu-1 (9 GPUs are wanted, 8 can be allocated)",
    )


def test_what_is_counted_is_what_a_run_chooses() -> None:
    """The same nodes, through the code that chooses the targets."""
    api = cluster("gpu-1")
    add_node(api, "gpu-2", conditions=[{"type": "Ready", "status": "Unknown"}])
    add_node(api, "gpu-3", spec={"unschedulable": True})
    add_node(api, "gpu-4", allocatable={GPU: "0"})
    chosen = [one.node for one in run(launcher(api).targets(spec())) if not one.excluded]
    empty = node("gpu-4", allocatable={GPU: "0"})
    facts = (node("gpu-1"), node("gpu-2", ready=False), node("gpu-3", cordoned=True), empty)
    assert the("gpu-nodes", judged(nodes=facts)).about == tuple(chosen)


def test_an_unhealthy_gpu_is_a_fail() -> None:
    room = {GPU: "7", "memory": "512Gi"}
    one = the("gpus-unhealthy", judged(nodes=(node("gpu-1", allocatable=room),)))
    assert one.verdict is Grade.FAIL
    assert one.message == "gpu-1: 7 of 8 GPUs allocatable; the device plugin reports 1 as unhealthy"


def test_a_gpu_that_the_label_counts_and_the_plugin_does_not() -> None:
    labels = {PRODUCT: "A", "nvidia.com/gpu.count": "8", **DRIVER}
    one = the("gpus-missing", judged(nodes=(node("gpu-1", gpus=7, labels=labels),)))
    assert one.message == "gpu-1: 7 GPUs announced, 8 by its label nvidia.com/gpu.count"
    silent = node("gpu-2", gpus=0, labels={"nvidia.com/gpu.present": "true"})
    assert the("gpus-missing", judged(nodes=(node("gpu-1"), silent))).about == ("gpu-2",)


def test_gpus_in_use_name_the_workloads_and_what_is_free() -> None:
    one = the("gpus-in-use", judged(workloads=(workload("train", gpus=6),)))
    assert one.verdict is Grade.WARN
    assert one.message == (
        "gpu-1: 6 of 8 GPUs in use by team/train (6); the run needs 8, "
        "so it leaves the node out, or waits with --option busy=wait"
    )
    assert one.fix[-1] == "gpukeeper accept --on kubernetes --nodes gpu-1 --gpus-per-node 2"
    assert not [
        x for x in judged(asking(gpus_per_node=2), workloads=(workload("a", gpus=6),)) if x.code == "gpus-in-use"
    ]
    more = judged(asking(gpus_per_node=9), nodes=(node("gpu-1"),))
    assert the("gpus-in-use", more).verdict is Grade.FAIL


def test_models_and_counts_that_differ() -> None:
    other = node("gpu-2", labels={PRODUCT: "NVIDIA-A100-SXM4-80GB", **DRIVER})
    assert "GPU models differ" in the("gpus-differ", judged(nodes=(node("gpu-1"), other))).message
    assert "4, 8" in the("gpus-differ", judged(nodes=(node("gpu-1"), node("gpu-2", gpus=4)))).message


def test_parts_of_gpus() -> None:
    sliced = node("gpu-2", gpus=0, capacity={"nvidia.com/mig-1g.10gb": "7"})
    assert the("gpus-shared", judged(nodes=(node("gpu-1"), sliced))).verdict is Grade.WARN
    labels = {PRODUCT: "A", "nvidia.com/gpu.replicas": "4", **DRIVER}
    assert the("gpus-shared", judged(nodes=(node("gpu-1", gpus=32, labels=labels),))).verdict is Grade.FAIL


def test_the_resource_is_no_label() -> None:
    found = judged(asking(selector="nvidia.com/gpu=true"), selected=frozenset())
    assert "is a resource and no label" in the("gpu-selector", found).message
    labelled = node("gpu-1", labels={GPU: "true", PRODUCT: "A", **DRIVER})
    assert the("gpu-labels", judged(nodes=(labelled,)), Grade.WARN).fix == ("kubectl label node gpu-1 nvidia.com/gpu-",)


def test_a_node_without_its_model_as_a_label() -> None:
    one = the("gpu-labels", judged(nodes=(node("gpu-1", labels=DRIVER),)))
    assert one.verdict is Grade.WARN


def test_a_taint_that_no_workload_tolerates_comes_with_the_exact_toleration() -> None:
    nodes = (node("gpu-1", taints=(TAINT,)), node("gpu-2", taints=(TAINT,)))
    one = the("taints", judged(nodes=nodes))
    assert one.verdict is Grade.WARN
    assert '- {key: nvidia.com/gpu, operator: Equal, value: "present", effect: NoSchedule}' in one.message
    assert one.fix == ("kubectl taint nodes gpu-1 gpu-2 nvidia.com/gpu:NoSchedule-",)


def test_a_taint_that_a_workload_tolerates_passes() -> None:
    users = (workload("train", gpus=0, tolerations=(Toleration(key=TAINT.key, value="present"),)),)
    assert the("taints", judged(nodes=(node("gpu-1", taints=(TAINT,)),), workloads=users)).verdict is Grade.PASS


def test_a_taint_that_the_run_or_the_plugin_does_not_tolerate_is_a_fail() -> None:
    nodes = (node("gpu-1", taints=(TAINT,)),)
    assert "not tolerated by the run" in the("taints", judged(asking(tolerations=()), nodes=nodes)).message
    one = the("taints", judged(nodes=nodes, plugins=(plugin(tolerations=()),)))
    assert one.verdict is Grade.FAIL
    assert one.fix[0] == "kubectl -n gpu-operator edit daemonset nvidia-device-plugin"


def test_taints_of_the_node_controller_and_soft_ones_are_no_finding() -> None:
    soft = Taint(key="pool", value="a", effect="PreferNoSchedule")
    own = Taint(key="node.kubernetes.io/unschedulable", value="", effect="NoSchedule")
    assert the("taints", judged(nodes=(node("gpu-1", taints=(soft, own)),))).verdict is Grade.PASS


@pytest.mark.parametrize(
    ("given", "covers"),
    [
        (Toleration(operator="Exists"), True),
        (Toleration(key=TAINT.key, operator="Exists"), True),
        (Toleration(key=TAINT.key, value="present"), True),
        (Toleration(key=TAINT.key, value="present", effect="NoSchedule"), True),
        (Toleration(key=TAINT.key, value="present", effect="NoExecute"), False),
        (Toleration(key=TAINT.key, value="other"), False),
        (Toleration(key="other", operator="Exists"), False),
    ],
)
def test_what_a_toleration_covers(given: Toleration, covers: bool) -> None:
    assert given.covers(TAINT) is covers


def test_a_taint_without_a_value_is_tolerated_by_its_existence() -> None:
    taint = Taint(key="gpu", effect="NoExecute")
    assert toleration(taint) == "- {key: gpu, operator: Exists, effect: NoExecute}"


def test_nodes_that_could_not_be_read_are_never_fine() -> None:
    found = judged(nodes=Unknown("nodes is forbidden"))
    verdicts = {one.code: one.verdict for one in found}
    assert verdicts["gpu-nodes"] is Grade.INCONCLUSIVE
    assert verdict_of(found) is Grade.INCONCLUSIVE
    dependent = {"taints", "drivers", "rdma", "nccl", "image", "shm", "quota", "device-plugin", "gpus-in-use"}
    assert {verdicts[code] for code in dependent} == {Grade.INCONCLUSIVE}
    assert "could not check: nodes is forbidden" in the("gpu-nodes", found).message
    assert the("gpu-nodes", found).fix[0] == "kubectl auth can-i list nodes"

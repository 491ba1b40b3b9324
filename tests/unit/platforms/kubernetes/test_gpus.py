"""Every way a pod asks for a GPU, and how the scheduler counts it."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.platforms.kubernetes.gpus import PodGpuRequest, any_requested, image_of, requested
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from tests.unit.platforms.kubernetes.examples import ago, gpu_container, pod, root, totals

CPU = {"name": "log", "image": "registry.example/log:1", "resources": {"requests": {"cpu": "1"}}}
SIDECAR = {"restartPolicy": "Always", "name": "side"}


@pytest.mark.parametrize(
    ("containers", "whole", "slices"),
    [
        ([gpu_container(1)], 1, 0),
        ([gpu_container(8), CPU], 8, 0),
        ([gpu_container(2), gpu_container(3, name="second")], 5, 0),
        ([gpu_container(1, "nvidia.com/gpu.shared")], 0, 1),
        ([gpu_container(2, "nvidia.com/mig-1g.10gb")], 0, 2),
        ([gpu_container(1, "nvidia.com/mig-3g.20gb.shared")], 0, 1),
        ([gpu_container(4, "amd.com/gpu")], 4, 0),
        ([gpu_container(1, "nvidia.com/hostdev")], 0, 0),  # a network device
        ([gpu_container(0)], 0, 0),
        ([CPU], 0, 0),
        ([{"name": "bare", "image": "x"}], 0, 0),
        ([{"name": "only-limits", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 2}}}], 2, 0),
    ],
)
def test_requests(containers: list[dict[str, Any]], whole: int, slices: int) -> None:
    assert requested(pod(containers=containers).spec) == PodGpuRequest(whole, slices)


@pytest.mark.parametrize(
    ("init", "whole"),
    [
        ([gpu_container(1)], 4),  # over before the others start
        ([gpu_container(6)], 6),  # the start needs more than the run
        ([gpu_container(2, **SIDECAR)], 6),  # stays beside the others
        ([gpu_container(2, **SIDECAR), gpu_container(3)], 6),
        ([gpu_container(2, **SIDECAR), gpu_container(5)], 7),  # both at once during the start
        ([gpu_container(5), gpu_container(2, **SIDECAR)], 6),
    ],
)
def test_containers_of_the_start(init: list[dict[str, Any]], whole: int) -> None:
    assert requested(pod(containers=[gpu_container(4)], spec={"initContainers": init}).spec).whole == whole


@pytest.mark.parametrize("quantity", ["-1", "0.5", "500m", "many", "1Ki", "", "9" * 40])
def test_a_quantity_that_is_no_number_of_gpus_is_unclear(quantity: str) -> None:
    found = requested(pod(containers=[gpu_container(quantity)]).spec)
    assert found.unclear is not None
    assert "nvidia.com/gpu" in found.unclear
    assert found  # it may hold one


@pytest.mark.parametrize("quantity", ["1k", "257", "5M"])
def test_more_than_any_node_has_is_unclear_and_makes_no_long_list(quantity: str) -> None:
    found = requested(pod(containers=[gpu_container(quantity)]).spec)
    assert found.unclear is not None
    assert found.whole <= 256


def test_a_resource_claim_is_unclear() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-h200"}]
    found = requested(pod(containers=[CPU], spec={"resourceClaims": claims}).spec)
    assert found == PodGpuRequest(unclear="it has a resource claim (gpu), which may be a GPU")
    assert found


TEMPLATE = {"spec": {"containers": [CPU, gpu_container(1)]}}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("job", {"template": TEMPLATE}),
        ("deployment", {"template": TEMPLATE}),
        ("statefulset", {"template": TEMPLATE}),
        ("daemonset", {"template": TEMPLATE}),
        ("pytorchjob", {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": TEMPLATE}}}),
        ("tfjob", {"tfReplicaSpecs": {"Worker": {"template": TEMPLATE}}}),
        ("mpijob", {"mpiReplicaSpecs": {"Worker": {"template": TEMPLATE}}}),
        ("xgboostjob", {"xgbReplicaSpecs": {"Worker": {"template": TEMPLATE}}}),
        ("paddlejob", {"paddleReplicaSpecs": {"Worker": {"template": TEMPLATE}}}),
        ("jaxjob", {"jaxReplicaSpecs": {"Worker": {"template": TEMPLATE}}}),
        ("jobset", {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": TEMPLATE}}}]}),
        ("rayjob", {"rayClusterSpec": {"headGroupSpec": {"template": TEMPLATE}}}),
        ("raycluster", {"headGroupSpec": {"template": {"spec": {}}}, "workerGroupSpecs": [{"template": TEMPLATE}]}),
    ],
)
def test_the_templates_of_every_kind_are_found(kind: str, spec: dict[str, Any]) -> None:
    found = list(BY_NAME[kind].templates(root(spec=spec).spec))
    assert any_requested(found)
    assert image_of(found) == "registry.example/train:1"  # of the container with the GPU, not the first


def test_without_a_gpu_the_first_image_counts_and_without_a_template_none() -> None:
    assert image_of((pod(containers=[CPU]).spec,)) == "registry.example/log:1"
    assert (
        image_of(BY_NAME["trainjob"].templates(root(spec={"runtimeRef": {"name": "torch-distributed"}}).spec)) is None
    )
    assert not any_requested(BY_NAME["job"].templates(root(spec={"template": {"spec": {"containers": [CPU]}}}).spec))


# Added up over the pods of a root


def test_a_tally_counts_what_is_held_now() -> None:
    added = totals(
        pod("Running", name="w-0", containers=[gpu_container(2)], status={"startTime": ago(hours=2)}),
        pod("Pending", name="w-1", status={"startTime": ago(hours=3)}),  # has a node: its GPUs are taken
        pod("Pending", name="w-2", node=""),
        pod("Running", name="launcher", containers=[CPU], spec={"terminationGracePeriodSeconds": 300}),
        pod("Succeeded", name="w-3"),
        pod("Failed", name="w-4"),
        pod("Running", name="w-5", deletionTimestamp=ago(minutes=1)),  # being ended, and not yet
    )
    assert (added.living, added.holding, added.pending, added.dead) == (5, 3, 1, 2)
    assert added.devices == ["w-0/0", "w-0/1", "w-1/0", "w-5/0"]
    assert added.slices == []
    assert added.started == ago(hours=3)
    assert added.grace == 300
    assert (added.unclear, added.lost, added.holds) == (None, None, None)


def test_slices_are_named_after_whole_gpus() -> None:
    both = [gpu_container(1), gpu_container(2, "nvidia.com/mig-1g.10gb", name="small")]
    added = totals(pod(name="w", containers=both))
    assert (added.devices, added.slices) == (["w/0", "w/1", "w/2"], ["w/1", "w/2"])


def test_a_pod_on_a_silent_node_is_living_and_named() -> None:
    added = totals(pod("Unknown", name="w-0"))
    assert (added.living, added.holding, added.lost) == (1, 1, "w-0")


def test_a_claim_is_unclear_only_once_it_was_granted() -> None:
    claims = {"resourceClaims": [{"name": "gpu"}]}
    assert totals(pod("Pending", node="", spec=claims)).unclear is None
    placed = totals(pod(name="w", containers=[CPU], spec=claims))
    assert placed.holding == 1
    assert placed.unclear == "pod w: it has a resource claim (gpu), which may be a GPU"


@pytest.mark.parametrize("start", [None, "", "0001-01-01T00:00:00Z", "soon"])
def test_a_start_that_cannot_be_read_is_left_out(start: str | None) -> None:
    odd, good = (pod(name=f"w-{i}", status={"startTime": at}) for i, at in enumerate((start, ago(hours=1))))
    assert totals(odd, good).started == totals(good, odd).started == ago(hours=1)


def test_a_pod_that_runs_is_not_waiting_for_a_node_whatever_its_spec_says() -> None:
    running = totals(pod("Running", name="a", node=""))
    assert (running.pending, running.waiting, running.holding, running.devices) == (0, 0, 1, ["a/0"])


def test_tallies_add_up() -> None:
    first = totals(
        pod(name="a", status={"startTime": ago(hours=1)}),
        pod("Succeeded", name="b"),
        pod("Unknown", name="c", annotations={"karpenter.sh/do-not-disrupt": "true"}),
    )
    second = totals(
        pod(name="d", containers=[gpu_container(1, "nvidia.com/gpu.shared")], status={"startTime": ago(hours=2)}),
        pod("Pending", name="e", node="", spec={"terminationGracePeriodSeconds": 90}),
    )
    together = totals()
    together.add(first)
    together.add(second)
    assert (together.living, together.holding, together.pending, together.dead) == (4, 3, 1, 1)
    assert (together.devices, together.slices) == (["a/0", "c/0", "d/0"], ["d/0"])
    assert (together.started, together.grace, together.lost) == (ago(hours=2), 90, "c")
    assert together.holds == "pod c has karpenter.sh/do-not-disrupt=true"
    assert first.devices == ["a/0", "c/0"]  # what was added is left as it was

"""examples/acceptance-on-kubernetes is what the launcher creates."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.docs.acceptance_manifests import FOLDER, RUNS, rendered
from tests.unit.acceptance.kubernetes.test_forms import templates, variables


def test_the_example_is_what_the_launcher_creates() -> None:
    old = [name for name in RUNS if (FOLDER / f"{name}.yaml").read_text() != rendered(name)]
    assert not old, f"run python -m tests.docs.acceptance_manifests: {old} differ"


def test_every_file_is_made_by_the_code_and_described() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(RUNS)
    words = (FOLDER / "README.md").read_text()
    assert not [name for name in RUNS if f"`{name}.yaml`" not in words]


@pytest.mark.parametrize("name", RUNS)
def test_every_node_is_told_whether_it_is_tested_alone_or_as_one_of_several(name: str) -> None:
    """Without --together each of them would be tested alone, and pass."""
    together = RUNS[name][4].get("together", False)
    nodes = RUNS[name][1]
    found = [pod for one in YAML(typ="safe").load_all(FOLDER / f"{name}.yaml") for pod in templates(one)]
    assert found
    for pod in found:
        assert ("--together" in pod["spec"]["containers"][0]["command"]) is together
        assert variables(pod)["GPUKEEPER_GROUP_SIZE"] == (str(nodes) if together else "1")


def documents(name: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(FOLDER / f"{name}.yaml"))


def limits(template: dict[str, Any]) -> dict[str, Any]:
    return dict(template["spec"]["containers"][0]["resources"]["limits"])


def shared_memory(template: dict[str, Any]) -> str:
    return str(next(one["emptyDir"]["sizeLimit"] for one in template["spec"]["volumes"] if one["name"] == "shm"))


def test_pytorch_jobs_have_the_sizes_of_older_kits() -> None:
    """C3.5: 1 and 3 pods with 8 GPUs and 32 GiB of shared memory; 14 CPUs and 150 GiB for one GPU, without a token."""
    (large,) = documents("pytorchjob")
    replicas = large["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 3}
    for one in replicas.values():
        assert limits(one["template"]) == {"nvidia.com/gpu": 8}
        assert shared_memory(one["template"]) == "32Gi"
    (flexible,) = documents("pytorchjob-flexible")
    assert flexible["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 24 * 3600
    for one in flexible["spec"]["pytorchReplicaSpecs"].values():
        assert limits(one["template"]) == {"nvidia.com/gpu": 1, "cpu": "14", "memory": "150Gi"}
        assert one["template"]["spec"]["automountServiceAccountToken"] is False


def test_every_node_of_a_mixed_cluster_gets_the_gpus_that_it_announces() -> None:
    """C3.5"""
    found = [limits(one["spec"]["template"]) for one in documents("mixed-cluster")]
    assert found == [{"nvidia.com/gpu": 8}, {"nvidia.com/gpu": 4}, {"amd.com/gpu": 8}]


def test_train_jobs_have_a_runtime_of_their_own() -> None:
    """C3.6: success policy All, one node; for TensorFlow port 2222 and no variables of the Trainer."""
    runtime, job = documents("trainjob")
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["trainer"] == {"numNodes": 1}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
    jobs = runtime["spec"]["template"]["spec"]
    assert jobs["successPolicy"] == {"operator": "All"}
    ancestor = jobs["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert ancestor["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    tensorflow, _ = documents("trainjob-tensorflow")
    assert tensorflow["spec"]["mlPolicy"] == {"numNodes": 2}
    (pod,) = templates(tensorflow)
    assert variables(pod)["MASTER_PORT"] == "2222"


def test_an_indexed_job_is_removed_after_an_hour_and_its_nodes_have_an_index() -> None:
    """C3.6"""
    service, job = documents("indexed-job")
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert job["spec"]["ttlSecondsAfterFinished"] == 3600
    (pod,) = templates(job)
    assert "job-completion-index" in variables(pod)["GPUKEEPER_GROUP_INDEX"]["fieldRef"]["fieldPath"]

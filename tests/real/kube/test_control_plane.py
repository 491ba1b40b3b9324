"""The control plane itself: each controller does what the tests on it rely on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.docker import kernel
from tests.real.kube import objects
from tests.real.kube.api import Api, Refused, condition
from tests.real.kube.control_plane import Cluster, ControlPlane, control_plane, given_cluster
from tests.real.kube.nodes import DEFAULT_LOG
from tests.real.kube.real_node import RealNode

ROOT = Path(__file__).parents[3]


def finish_all(plane: ControlPlane, namespace: str, count: int, exit_code: int = 0) -> list[str]:
    names = [pod["metadata"]["name"] for pod in plane.api.wait_pods(namespace, count)]
    for name in names:
        plane.finish_pod(namespace, name, exit_code)
    return names


# The plane.


def test_users_have_the_rights_they_were_given_and_no_others(plane: ControlPlane, namespace: str) -> None:
    rules = [{"resources": ["pods"], "verbs": ["list"]}]
    user = plane.new_user(rules, namespace=namespace)
    assert plane.api_as(user).list("pods", namespace) == []
    with pytest.raises(Refused, match="403"):
        plane.api_as(user).list("pods")
    with pytest.raises(Refused, match="403"):
        plane.api_as("nobody").list("pods", namespace)
    token = plane.service_account(namespace, "keeper")
    plane.grant(f"system:serviceaccount:{namespace}:keeper", rules)
    assert plane.until(lambda: plane.api_with(token).call("GET", "/api/v1/pods").ok)
    assert plane.api_with("token-of-a-stranger").call("GET", "/api/v1/pods").status == 401


def test_the_api_server_goes_and_comes_back_with_its_objects(plane: ControlPlane, namespace: str) -> None:
    plane.api.create({"kind": "ConfigMap", "metadata": {"name": "kept"}}, namespace)
    plane.stop_apiserver()
    with pytest.raises(ConnectionRefusedError):
        plane.api.get("configmaps", namespace, "kept")
    plane.start_apiserver()
    assert plane.api.get("configmaps", namespace, "kept") is not None


def test_the_administrator_sees_the_cluster(cluster: Cluster, api: Api, namespace: str) -> None:
    assert namespace in api.names("namespaces")
    assert cluster.kubeconfig().exists()


def test_a_cluster_can_be_given_by_its_kubeconfig(plane: ControlPlane, namespace: str) -> None:
    """As GPUKEEPER_TEST_KUBECONFIG does, by a token and by a certificate."""
    user = plane.new_user([{"resources": ["namespaces"], "verbs": ["list"]}])
    for kubeconfig in (plane.kubeconfig(user), plane.kubeconfig_with_certificate(user)):
        with given_cluster(str(kubeconfig)) as given:
            assert namespace in given.api.names("namespaces")
            with pytest.raises(Refused, match="403"):
                given.api.list("pods")


@pytest.mark.usefixtures("the_plane")
def test_a_killed_run_takes_its_plane_with_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", _PLANE], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    assert len(pids) == 4
    child.kill()
    child.wait()
    child.stdout.close()
    Cluster.until(lambda: all(kernel.state(pid) in ("", "Z") for pid in pids), "its programs ended")
    with control_plane() as another:  # takes away the folder of the other
        assert another.api.ready()


_PLANE = """
import sys, time
from tests.real.kube.control_plane import control_plane
with control_plane() as plane:
    print(*(program.pid for program in plane.programs.values()), flush=True)
    time.sleep(600)
"""


# Nodes of KWOK.


def test_a_job_runs_until_its_pod_is_finished(plane: ControlPlane, api: Api, namespace: str, kwok_node: str) -> None:
    api.create(objects.job("train", gpus=8), namespace)
    (pod,) = api.wait_pods(namespace, 1)
    assert pod["spec"]["nodeName"] == kwok_node
    assert condition(api.get("jobs", namespace, "train"), "Complete") is None
    finish_all(plane, namespace, 1)
    api.wait_condition("jobs", namespace, "train", "Complete")


def test_a_ninth_gpu_waits(api: Api, namespace: str, kwok_node: str) -> None:
    api.create(objects.pod("all", gpus=8), namespace)
    api.wait_pods(namespace, 1)
    api.create(objects.pod("one-more", gpus=1), namespace)
    api.wait_condition("pods", namespace, "one-more", "PodScheduled", "False")
    api.delete("pods", namespace, "all")
    api.wait_gone("pods", namespace, "all")
    waiting = api.wait_for("pods", namespace, "one-more", lambda pod: pod and pod["status"]["phase"] == "Running")
    assert waiting["spec"]["nodeName"] == kwok_node


@pytest.mark.usefixtures("kwok_node")
def test_annotations_say_how_and_when_pods_end(api: Api, namespace: str) -> None:
    api.create(objects.job("fails", annotations={"test/exit-code": "3", "test/finish-after": "1s"}), namespace)
    api.wait_condition("jobs", namespace, "fails", "Failed")
    (pod,) = api.list("pods", namespace)
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    api.create(objects.pod("stuck", annotations={"test/starts": "never"}), namespace)
    api.wait_condition("pods", namespace, "stuck", "PodScheduled")
    assert (api.get("pods", namespace, "stuck") or {})["status"]["phase"] == "Pending"


@pytest.mark.usefixtures("kwok_node")
def test_a_pod_may_stay_in_deletion(plane: ControlPlane, api: Api, namespace: str) -> None:
    for name, said in (("goes", {}), ("stays", {"test/ends": "never"})):
        api.create(objects.pod(name, annotations=said), namespace)
    api.wait_pods(namespace, 2)
    for name in ("stays", "goes"):
        api.delete("pods", namespace, name)
    api.wait_gone("pods", namespace, "goes")
    stays = api.get("pods", namespace, "stays")
    assert stays is not None
    assert stays["metadata"]["deletionTimestamp"]
    api.delete("pods", namespace, "stays", grace=0)
    api.wait_gone("pods", namespace, "stays")


@pytest.mark.usefixtures("kwok_node")
def test_a_pod_may_need_time_to_end(api: Api, namespace: str) -> None:
    api.create(objects.pod("slow", annotations={"test/end-after": "1s"}), namespace)
    api.wait_pods(namespace, 1)
    began = time.monotonic()
    api.delete("pods", namespace, "slow")
    api.wait_gone("pods", namespace, "slow")
    assert time.monotonic() - began >= 1


@pytest.mark.usefixtures("kwok_node")
def test_pods_have_logs(plane: ControlPlane, api: Api, namespace: str) -> None:
    api.create(objects.pod("talks"), namespace)
    api.wait_pods(namespace, 1)
    assert api.log(namespace, "talks") == DEFAULT_LOG
    plane.set_log(namespace, "talks", "CUDA out of memory\nexiting\n")
    assert api.log(namespace, "talks", tailLines=1) == "exiting\n"


# JobSet.


@pytest.mark.usefixtures("kwok_node")
def test_a_jobset_completes_and_its_time_to_live_removes_it(jobset: ControlPlane, namespace: str) -> None:
    jobset.api.create(objects.jobset("set", replicas=2, ttl=1), namespace)
    finish_all(jobset, namespace, 2)
    jobset.api.wait_condition("jobsets", namespace, "set", "Completed")
    jobset.api.wait_gone("jobsets", namespace, "set")
    jobset.api.wait_pods(namespace, 0)


@pytest.mark.usefixtures("kwok_node")
def test_a_jobset_fails(jobset: ControlPlane, namespace: str) -> None:
    jobset.api.create(objects.jobset("set", annotations={"test/exit-code": "1"}), namespace)
    jobset.api.wait_condition("jobsets", namespace, "set", "Failed")


# Kubeflow Trainer, both releases.


@pytest.fixture(scope="module", params=["trainer-v2.1.0", "trainer-v2.3.0"])
def trainer(request: pytest.FixtureRequest, the_plane: ControlPlane) -> ControlPlane:
    """Of the module: changing releases takes seconds."""
    the_plane.need(request.param)
    return the_plane


@pytest.mark.usefixtures("kwok_node")
def test_a_train_job_completes(trainer: ControlPlane, namespace: str) -> None:
    trainer.api.create(objects.training_runtime("torch"), namespace)
    trainer.api.create(objects.train_job("train", "torch"), namespace)
    finish_all(trainer, namespace, 1)
    trainer.api.wait_condition("trainjobs", namespace, "train", "Complete")


@pytest.mark.usefixtures("kwok_node")
def test_a_train_job_fails(trainer: ControlPlane, namespace: str) -> None:
    trainer.api.create(objects.training_runtime("torch"), namespace)
    trainer.api.create(objects.train_job("train", "torch"), namespace)
    finish_all(trainer, namespace, 1, exit_code=1)
    trainer.api.wait_condition("trainjobs", namespace, "train", "Failed")


# The training operator, KubeRay.


@pytest.mark.usefixtures("kwok_node")
def test_workers_outlive_their_pytorch_job_until_the_configured_time(
    training_operator: ControlPlane, namespace: str
) -> None:
    api = training_operator.api
    api.create(objects.pytorch_job("train", workers=2), namespace)
    api.wait_pods(namespace, 3)
    training_operator.finish_pod(namespace, "train-master-0")
    api.wait_condition("pytorchjobs", namespace, "train", "Succeeded")
    api.wait_pods(namespace, 2)
    api.patch("pytorchjobs", namespace, "train", {"spec": {"runPolicy": {"cleanPodPolicy": "Running"}}})
    api.wait_gone("pods", namespace, "train-worker-0")
    api.wait_gone("pods", namespace, "train-worker-1")
    assert api.names("pods", namespace) == {"train-master-0"}


@pytest.mark.usefixtures("kwok_node")
def test_a_suspended_ray_cluster_gives_its_pods_back(kuberay: ControlPlane, namespace: str) -> None:
    api = kuberay.api
    api.create(objects.ray_cluster("ray", workers=2), namespace)
    api.wait_pods(namespace, 3)
    api.patch("rayclusters", namespace, "ray", {"spec": {"suspend": True}})
    api.wait_for("rayclusters", namespace, "ray", lambda seen: seen and seen["status"].get("state") == "suspended")
    assert api.list("pods", namespace) == []
    api.patch("rayclusters", namespace, "ray", {"spec": {"suspend": False}})
    api.wait_pods(namespace, 3)


# A real node.


@pytest.mark.smoke
def test_a_pod_of_the_real_node_is_a_process(real_node: RealNode, api: Api, namespace: str) -> None:
    command = ["sh", "-c", "echo hi; trap 'echo bye; exit 0' TERM; while :; do sleep 0.1; done"]
    api.create(objects.pod("talks", command=command, **real_node.placement), namespace)
    (pod,) = api.wait_pods(namespace, 1)
    assert pod["spec"]["nodeName"] == real_node.name
    real_node.plane.until(lambda: api.log(namespace, "talks") == "hi\n", "it said hi")
    pids = real_node.pids(pod["metadata"]["uid"])
    assert pids
    api.delete("pods", namespace, "talks")
    api.wait_gone("pods", namespace, "talks")
    assert not [pid for pid in pids if kernel.state(pid) not in ("", "Z")]


def test_a_job_of_the_real_node_completes_with_its_log(real_node: RealNode, api: Api, namespace: str) -> None:
    api.create(objects.job("says", command=["sh", "-c", "echo hi"], **real_node.placement), namespace)
    api.wait_condition("jobs", namespace, "says", "Complete")
    (pod,) = api.list("pods", namespace)
    assert api.log(namespace, pod["metadata"]["name"]) == "hi\n"
    api.create(objects.job("fails", command=["sh", "-c", "echo no; exit 7"], **real_node.placement), namespace)
    api.wait_condition("jobs", namespace, "fails", "Failed")
    (pod,) = api.list("pods", namespace, labels="job-name=fails")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7

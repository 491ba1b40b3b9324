"""Why is it still there, asked of real controllers: finalizers whose controller is off, the endless Foreground loop of
Trainer v2.3.0, the JobSet that v2.1.0 makes anew.

The controllers run as programs beside the control plane, so a Deployment made by hand stands for theirs: it carries the
image and its pods are KWOK's. Time that would have to pass is told to `diagnose` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.model.subject import Cause, Diagnosis, Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import finalizers
from gpukeeper.platforms.kubernetes.diagnose import Controllers, diagnose
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.finalizers import FOREGROUND, Alive, Down
from gpukeeper.platforms.kubernetes.kinds.ray import CONTROLLER as KUBERAY
from tests.real.kube import objects
from tests.real.kube.api import Api, Object, Refused
from tests.real.kube.control_plane import ControlPlane

TRAINER = "kubeflow-trainer-controller-manager"
TRAINER_IMAGE = "ghcr.io/kubeflow/trainer/trainer-controller-manager:{}"
RAY_FINALIZER = "ray.io/rayjob-finalizer"
PAST = timedelta(seconds=61)  # just past what a removal is given


class Asked:
    """As one user. `passed`: what the clock between two looks says."""

    def __init__(self, plane: ControlPlane, user: str = "admin") -> None:
        self.passed = 0.0
        self.cluster = Cluster.from_environment({"KUBECONFIG": str(plane.kubeconfig(user))}, None, 200, 200)
        self.controllers = Controllers(self.cluster, lambda: self.passed)

    def about(self, one: Object, now: datetime) -> Diagnosis:
        said = one["metadata"]
        kind = one.get("kind", "Pod").lower()  # pods come from a list, whose items have none
        ref = Ref("kubernetes", "test", kind, said["name"], said["uid"], said["namespace"])

        async def ask() -> Diagnosis | Unknown:
            async with self.cluster.opened():
                return await diagnose(self.cluster, ApiDiscovery(self.cluster).served, ref, now, self.controllers)

        found = asyncio.run(ask())
        assert isinstance(found, Diagnosis), found
        return found

    def kuberay(self, now: datetime) -> Any:
        async def ask() -> Any:
            async with self.cluster.opened():
                return await self.controllers.state(KUBERAY, now)

        return asyncio.run(ask())


@pytest.fixture
def stand_in(api: Api, namespace: str) -> Iterator[Any]:
    """A Deployment of a controller's name with its image; it goes first, the next test would see it."""
    made: list[str] = []

    def make(name: str, image: str, replicas: int = 0) -> Object:
        one = objects.deployment(name, replicas=replicas, gpus=0)
        one["spec"]["template"]["spec"]["containers"][0]["image"] = image
        made.append(name)
        return api.create(one, namespace)

    yield make
    for name in made:
        api.delete("deployments", namespace, name, propagation="Background")
        api.wait_gone("deployments", namespace, name)


def one_of(found: Diagnosis, words: str) -> Cause:
    hits = [cause for cause in found.causes if words in cause.words]
    assert len(hits) == 1, f"{words!r} is in {len(hits)} of {[cause.words for cause in found.causes]}"
    return hits[0]


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text)


def text_of(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.mark.usefixtures("kwok_node")
def test_a_finalizer_whose_controller_is_switched_off(
    plane: ControlPlane, api: Api, namespace: str, stand_in: Any
) -> None:
    """C7.1"""
    plane.install_crds("kuberay")
    plane.stop("kuberay")
    cluster_spec = objects.ray_cluster("unused")["spec"]
    spec = {"entrypoint": "python -c 1", "rayClusterSpec": cluster_spec}
    one = {"kind": "RayJob", "metadata": {"name": "tune", "finalizers": [RAY_FINALIZER]}, "spec": spec}
    api.create(one, namespace)
    api.delete("rayjobs", namespace, "tune", propagation="Background")
    stuck = api.get("rayjobs", namespace, "tune")
    assert stuck is not None
    asked_for = time_of(stuck["metadata"]["deletionTimestamp"])
    now = asked_for + PAST
    asked = Asked(plane)
    stand_in("kuberay-operator", "quay.io/kuberay/operator:v1.4.2", replicas=1)
    held = {"holderIdentity": "kuberay-operator-1", "leaseDurationSeconds": 15, "renewTime": text_of(now)}
    api.create({"kind": "Lease", "metadata": {"name": "ray-operator-leader"}, "spec": held}, namespace)
    try:
        ready = lambda seen: seen and seen["status"].get("readyReplicas") == 1  # noqa: E731
        api.wait_for("deployments", namespace, "kuberay-operator", ready)
        cause = one_of(asked.about(stuck, now), f"the finalizer {RAY_FINALIZER} blocks it")
        assert "KubeRay runs" in cause.words
        assert "1 of 1 ready" in cause.words

        api.patch("deployments", namespace, "kuberay-operator", {"spec": {"replicas": 0}}, subresource="scale")
        api.wait_for(
            "deployments", namespace, "kuberay-operator", lambda seen: seen and not seen["status"].get("replicas")
        )
        api.patch(
            "leases", namespace, "ray-operator-leader", {"spec": {"renewTime": text_of(now - timedelta(hours=1))}}
        )
        asked = Asked(plane)  # one that has not seen the Lease change
        first = one_of(asked.about(stuck, now), f"the finalizer {RAY_FINALIZER} blocks it")
        assert "Whether it will ever complete is unknown" in first.words
        asked.passed = 20
        found = asked.about(stuck, now)
        assert isinstance(asked.kuberay(now), Down)
        cause = one_of(found, f"the finalizer {RAY_FINALIZER} blocks it")
        assert "requested 1m1s ago" in cause.words
        assert "is scaled to 0" in cause.words
        assert "Waiting does not help" in cause.words
        assert f"kubernetes.release: [{RAY_FINALIZER}]" in cause.remedy
        assert any(line.startswith("controller KubeRay v1.4.2: not running: ") for line in found.tree)

        # Who may not look at Deployments learns nothing, so nothing is proven.
        user = plane.new_user(
            [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get"]}], namespace=namespace
        )
        blind = Asked(plane, user)
        blind.about(stuck, now)
        blind.passed = 3600
        cause = one_of(blind.about(stuck, now), f"the finalizer {RAY_FINALIZER} blocks it")
        assert "whether KubeRay runs is unknown" in cause.words
        one_of(blind.about(stuck, now), "its Events could not be read")

        # A renewed Lease alone brings it back to life.
        api.patch("leases", namespace, "ray-operator-leader", {"spec": {"renewTime": text_of(now)}})
        asked.passed = 40
        assert isinstance(asked.kuberay(now), Alive)
    finally:
        api.delete("leases", namespace, "ray-operator-leader")
        api.patch("rayjobs", namespace, "tune", {"metadata": {"finalizers": None}})
    api.wait_gone("rayjobs", namespace, "tune")


def failing(api: Api, namespace: str) -> Object:
    """A TrainJob that has failed; nothing removes its JobSet."""
    ends = {"test/exit-code": "1", "test/finish-after": "1s"}
    api.create(objects.training_runtime("torch", annotations=ends), namespace)
    api.create(objects.train_job("run-7", "torch"), namespace)
    failed: Object = api.wait_condition("trainjobs", namespace, "run-7", "Failed")
    return failed


def caught_in_the_loop(plane: ControlPlane, namespace: str) -> Object | None:
    """A TrainJob whose JobSet was made anew after its Foreground removal was asked for.

    Each turn is a race that the collector may win. So it is stopped before the first turn and after it.
    """
    api, collector = plane.api, plane.programs["kube-controller-manager"]
    before = api.get("jobsets", namespace, "run-7")
    assert before is not None
    collector.pause()
    api.delete("trainjobs", namespace, "run-7", propagation="Foreground")
    removed = api.get("trainjobs", namespace, "run-7")
    assert removed is not None
    asked_for = time_of(removed["metadata"]["deletionTimestamp"])
    plane.until(lambda: datetime.now(UTC) > asked_for + timedelta(seconds=1), "what is made now is made later")
    collector.resume()
    try:
        while (seen := api.get("trainjobs", namespace, "run-7")) is not None:
            again = api.get("jobsets", namespace, "run-7")
            if again is not None and again["metadata"]["uid"] != before["metadata"]["uid"]:
                collector.pause()
                return api.get("trainjobs", namespace, "run-7")
        return seen
    except BaseException:
        collector.resume()
        raise


@pytest.mark.usefixtures("kwok_node", "trainer_v23")
def test_the_foreground_loop_of_v23_is_proven_and_ends_without_its_finalizer(
    plane: ControlPlane,
    api: Api,
    namespace: str,
    new_namespace: Any,
    stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That half a minute has to lie between the two, by the server's clock, is tested in
    tests/unit/platforms/kubernetes/test_finalizers.py."""
    monkeypatch.setattr(finalizers, "CIRCLE", timedelta(0))
    stand_in(TRAINER, TRAINER_IMAGE.format("v2.3.0"))
    for place in (namespace, new_namespace(), new_namespace()):
        failing(api, place)
        removed = caught_in_the_loop(plane, place)
        if removed is not None:
            break
    assert removed is not None, "the garbage collector won the first turn three times"
    try:
        asked_for = time_of(removed["metadata"]["deletionTimestamp"])
        found = Asked(plane).about(removed, asked_for + PAST)
    finally:
        plane.programs["kube-controller-manager"].resume()
    cause = one_of(found, f"the finalizer {FOREGROUND} blocks it")
    assert "its controller recreates jobset/run-7 each time" in cause.words
    assert "Waiting does not help" in cause.words
    assert f"kubernetes.release: [{FOREGROUND}]" in cause.remedy
    assert any("v2.3.0" in line for line in found.tree)
    assert removed["metadata"]["uid"] in found.tree[0]

    # The remedy is right: without that one finalizer everything goes.
    with suppress(Refused):  # the collector may have won by now
        api.patch("trainjobs", place, "run-7", {"metadata": {"finalizers": None}})
    api.wait_gone("trainjobs", place, "run-7")
    api.wait_gone("jobsets", place, "run-7")


@pytest.mark.usefixtures("kwok_node", "trainer_v21")
def test_a_jobset_that_v21_recreated_under_a_complete_trainjob(
    plane: ControlPlane, api: Api, namespace: str, stand_in: Any
) -> None:
    """C7.1"""
    api.create(objects.training_runtime("torch", ttl=2), namespace)
    api.create(objects.train_job("run-7", "torch"), namespace)
    (pod,) = api.wait_pods(namespace, 1)
    first = api.get("jobsets", namespace, "run-7")
    assert first is not None
    plane.finish_pod(namespace, pod["metadata"]["name"])
    one = api.wait_condition("trainjobs", namespace, "run-7", "Complete")
    second = api.wait_for(
        "jobsets",
        namespace,
        "run-7",
        lambda seen: seen and seen["metadata"]["uid"] != first["metadata"]["uid"],
        timeout=60,
        words="made anew",
    )
    (worker,) = api.wait_pods(namespace, 1)
    stand_in(TRAINER, TRAINER_IMAGE.format("v2.1.0"))
    asked = Asked(plane)
    now = time_of(second["metadata"]["creationTimestamp"]) + timedelta(minutes=1)
    found = asked.about(one, now)
    assert "after the TrainJob ended: Kubeflow Trainer (v2.1.0) recreated it" in one_of(found, "was created").words
    level = one_of(found, "ttlSecondsAfterFinished: 2 is set in its runtime (TrainingRuntime torch)")
    assert "Kubeflow Trainer v2.1.0 recreates it at once" in level.words
    one_of(found, "a TrainJob has no TTL in this cluster (its CRD has no spec.ttlSecondsAfterFinished)")
    assert "1 pod below it did not end, with 1 GPU" in one_of(found, "it has finished").words
    kinds = [line.split("/")[0] for line in found.tree[:4]]
    assert kinds == ["trainjob", "  jobset", "    job", "      pod"]
    assert worker["metadata"]["name"] in found.tree[3]

    # Its parts say what they are part of.
    child = asked.about(second, now)
    assert (
        "jobset/run-7 is part of trainjob/run-7: if it is removed alone, Kubeflow Trainer v2.1.0 recreates"
        in child.causes[0].words
    )
    assert f"explain {namespace}/trainjob/run-7" in child.causes[0].remedy
    part = asked.about(worker, now)
    assert "is part of trainjob/run-7" in part.causes[0].words
    assert any("<- this one" in line and worker["metadata"]["name"] in line for line in part.tree)
    api.delete("trainjobs", namespace, "run-7", propagation="Background")
    api.wait_gone("trainjobs", namespace, "run-7")


@pytest.mark.usefixtures("kwok_node", "trainer_v23")
def test_conflicts_in_the_controllers_log_and_events_are_read(
    plane: ControlPlane, api: Api, namespace: str, stand_in: Any
) -> None:
    """C7.2"""
    one = failing(api, namespace)
    stand_in(TRAINER, TRAINER_IMAGE.format("v2.3.0"), replicas=1)
    (manager,) = api.wait_pods(namespace, 1, labels=f"app={TRAINER}")
    line = f'Operation cannot be fulfilled on trainjobs "{one["metadata"]["name"]}": the object has been modified'
    plane.set_log(namespace, manager["metadata"]["name"], f"starting\n{line}\nreconciled run-7\n")
    event = {
        "kind": "Event",
        "metadata": {"name": "run-7.1"},
        "involvedObject": {"kind": "TrainJob", "name": "run-7", "namespace": namespace, "uid": one["metadata"]["uid"]},
        "type": "Warning",
        "reason": "Testing",
        "message": "a word about it",
        "lastTimestamp": one["metadata"]["creationTimestamp"],
    }
    api.create(event, namespace)
    now = time_of(one["metadata"]["creationTimestamp"]) + timedelta(minutes=5)
    found = Asked(plane).about(one, now)
    assert line in one_of(found, "Kubeflow Trainer logs: ").words
    assert one_of(found, "Warning Testing").words == "Event, 5m ago: Warning Testing: a word about it"


def test_the_job_of_a_pod_may_not_be_read(plane: ControlPlane, api: Api, namespace: str, kwok_node: str) -> None:
    api.create(objects.job("train"), namespace)
    (pod,) = api.wait_pods(namespace, 1)
    assert pod["spec"]["nodeName"] == kwok_node
    user = plane.new_user([{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}], namespace=namespace)
    now = time_of(pod["metadata"]["creationTimestamp"]) + timedelta(minutes=1)
    found = Asked(plane, user).about(pod, now)
    assert "it belongs to Job train, which may not be read" in found.causes[0].words
    assert "gpukeeper keeps it" in found.causes[0].remedy
    part = Asked(plane).about(pod, now)
    assert "is part of job/train: if it is removed alone, its controller recreates it" in part.causes[0].words

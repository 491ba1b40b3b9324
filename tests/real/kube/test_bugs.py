"""Bugs that others had, each as a test on a real API server: what they removed wrongly, missed, or only said they did.

One test for each row of the table "Bugs as tests" of our notes on Kubernetes; its docstring begins with the row.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.loop import Watch, watch
from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.event import Closed, Complaint, Intended
from gpukeeper.model.subject import Outcome, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from tests.real.kube import objects
from tests.real.kube.api import Api, Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import ended_pod, ending, many_ended_pods, text, unplaced
from tests.real.kube.harness import Harness, minute_of, policy
from tests.real.kube.proxy import Asked, First, Late, Proxy, Say, proxy
from tests.real.kube.runs import left, passes, stays_so

AT_ONCE = {"cluster": {"grace": "0s"}}  # what was not seen to go is not waited for any longer than needed
IDLE = {"cluster": {"grace": "0s", "start_grace": "0s", "idle": "10m", "on_idle": "stop"}}
# The row says 10,001. That many take minutes to make on two cores; GPUKEEPER_TEST_MANY=10001 makes them.
MANY = int(os.environ.get("GPUKEEPER_TEST_MANY", "601"))


def results(found: Mapping[str, Any] | list[Closed]) -> list[Result]:
    return [one.result for one in found]  # type: ignore[union-attr]


def final_results(harness: Harness) -> list[Result]:
    """How passes end, the slow removals included that a later pass sees to be over."""
    return [one for one in results(passes(harness)) if one is not Result.UNKNOWN]


def owned_by(owner: Object, kind: str, group: str) -> list[Object]:
    meta = owner["metadata"]
    return [{"apiVersion": group, "kind": kind, "name": meta["name"], "uid": meta["uid"], "controller": True}]


def measured(harness: Harness, name: str, minutes: int, values: Mapping[int, float | None] | float) -> None:
    """Every minute so far: by number of the GPU its percent; None: nobody measured that one."""
    subject, now = harness.subjects()[name], harness.clock.now()
    assert isinstance(subject.devices, tuple)
    samples = []
    for number, device in enumerate(subject.devices):
        value = values if isinstance(values, float) else values.get(number, 0.0)
        if value is not None:
            at = (now - timedelta(minutes=ago) for ago in range(minutes, -1, -1))
            samples += [minute_of(subject, device, one, value) for one in at]
    harness.run(harness.signals.add(samples))


def between(plane: ControlPlane, one: Proxy) -> Path:
    return plane.kubeconfig(server=one.address)


HOOK, REFUSALS = "nobody.example.com", "apiserver_admission_webhook_rejection_count{"


@contextmanager
def unreachable_webhook(api: Api, namespace: str, group: str, plural: str) -> Iterator[None]:
    """Every DELETE of these in the namespace is answered with 500, by the API server itself."""
    hook = {
        "name": HOOK,
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": [group], "apiVersions": ["*"], "operations": ["DELETE"], "resources": [plural]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    name = f"broken-{namespace}"
    api.create({"kind": "ValidatingWebhookConfiguration", "metadata": {"name": name}, "webhooks": [hook]})
    try:
        _until_500(api, namespace, plural)
        yield
    finally:
        api.delete("validatingwebhookconfigurations", None, name)


def _refusals(api: Api) -> float:
    """How often the API server could not ask that webhook, by its own count."""
    lines = api.call("GET", "/metrics").raw.decode().splitlines()
    counts = [line for line in lines if line.startswith(REFUSALS) and HOOK in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def _until_500(api: Api, namespace: str, plural: str) -> None:
    """The server needs a moment to know of it: asked with what changes nothing."""
    from tests.real.kube.api import path_of

    ends = time.monotonic() + 120
    while True:
        names = api.names(plural, namespace)
        assert names, f"a webhook shows only where there are {plural}"
        path = path_of(plural, namespace, sorted(names)[0])
        if api.call("DELETE", path, query={"dryRun": "All"}).status == 500:
            return
        assert time.monotonic() < ends, "the webhook has no effect"
        time.sleep(0.1)


# What somebody else has by now


def test_the_same_name_recreated_between_plan_and_act(plane: ControlPlane, namespace: str) -> None:
    """Same name re-created between plan and act (most): new uid → kept."""
    ended_pod(plane.api, namespace, "run")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(minutes=61)
    step = harness.step("pod/run")
    assert step.decision.action is Action.REMOVE
    plane.api.delete("pods", namespace, "run", grace=0)
    new = ended_pod(plane.api, namespace, "run")
    assert harness.take(step).result is Result.CHANGED
    there = plane.api.get("pods", namespace, "run")
    assert there is not None
    assert there["metadata"]["uid"] == new["metadata"]["uid"]


@pytest.mark.smoke
def test_the_same_name_recreated_between_the_last_read_and_the_delete(plane: ControlPlane, namespace: str) -> None:
    """Same name re-created between plan and act (most): new uid → 409, kept."""
    ended_pod(plane.api, namespace, "run")
    made: list[Object] = []

    def anew() -> None:
        plane.api.delete("pods", namespace, "run", grace=0)
        made.append(ended_pod(plane.api, namespace, "run"))

    with proxy(plane) as one:
        harness = Harness(between(plane, one), namespace)
        harness.later(minutes=61)
        one.rule = lambda asked: First(anew) if asked.method == "DELETE" and not made else None
        assert results(harness.again().outcomes) == [Result.CHANGED]
        assert [asked.status for asked in one.asked if asked.method == "DELETE"] == [409]
    there = plane.api.get("pods", namespace, "run")
    assert there is not None
    assert there["metadata"]["uid"] == made[0]["metadata"]["uid"]


def test_two_namespaces_and_two_groups_with_one_name(plane: ControlPlane, namespace: str, new_namespace: Any) -> None:
    """Key too short (kj, c7n_kube): two namespaces, two groups, one name."""
    other = new_namespace("other")
    ended_pod(plane.api, namespace, "run")
    ended_pod(plane.api, other, "run", annotations={"gpukeeper.io/ttl": "2d"})
    queue = _another_kind_called_job(plane.api)
    foreign = plane.api.must(
        "POST",
        f"{queue}/namespaces/{namespace}/jobs",
        {"apiVersion": GROUP, "kind": "Job", "metadata": {"name": "run"}},
    )
    plane.api.create(objects.job("run", parallelism=0, gpus=0), namespace)  # of batch/v1
    plane.api.wait_condition("jobs", namespace, "run", "Complete")
    part = unplaced("part")
    part["metadata"]["ownerReferences"] = owned_by(foreign, "Job", GROUP)
    plane.api.create(part, namespace)
    harness = Harness(plane.keeper_kubeconfig(), namespace, other, classes=AT_ONCE)
    harness.later(minutes=61)
    assert final_results(harness) == [Result.RECLAIMED, Result.RECLAIMED]
    assert plane.api.get("jobs", namespace, "run") is None
    assert plane.api.names("pods", namespace) == {"part"}
    assert plane.api.names("pods", other) == {"run"}
    assert plane.api.call("GET", f"{queue}/namespaces/{namespace}/jobs/run").ok, "of another group"


GROUP = "queue.example.com/v1"


def _another_kind_called_job(api: Api) -> str:
    """Where it is served."""
    names = {"plural": "jobs", "singular": "job", "kind": "Job", "listKind": "JobList"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    spec = {
        "group": "queue.example.com",
        "scope": "Namespaced",
        "names": names,
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
    }
    name = "jobs.queue.example.com"
    api.apply({"kind": "CustomResourceDefinition", "metadata": {"name": name}, "spec": spec})
    api.wait_condition("customresourcedefinitions", None, name, "Established")
    path = "/apis/queue.example.com/v1"
    ends = time.monotonic() + 120
    while not api.call("GET", f"{path}/jobs").ok:
        assert time.monotonic() < ends, "the kind is not served"
        time.sleep(0.1)
    return path


def test_a_copy_that_another_cluster_dispatched(plane: ControlPlane, namespace: str) -> None:
    """Remote copy removed early (kq#14734): origin label → kept."""
    label = {"kueue.x-k8s.io/multikueue-origin": "manager-1"}
    ended_pod(plane.api, namespace, "copy", labels=label)
    ended_pod(plane.api, namespace, "own")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(days=300)
    assert final_results(harness) == [Result.RECLAIMED]
    assert plane.api.names("pods", namespace) == {"copy"}
    assert "MultiKueue" in harness.decisions()["pod/copy"].reason


# Roots and what they own


@pytest.mark.usefixtures("kwok_node")
def test_a_job_goes_with_its_pods_by_a_delete_that_reports_it(plane: ControlPlane, namespace: str) -> None:
    """Default propagation orphans (ttlc, kc, kco): Job delete leaves no pod."""
    plane.api.create(objects.job("train", parallelism=3, annotations={"test/exit-code": "0"}), namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")
    assert len(plane.api.list("pods", namespace)) == 3
    with proxy(plane) as one:
        harness = Harness(between(plane, one), namespace)
        harness.later(minutes=61)
        assert final_results(harness) == [Result.RECLAIMED]
        (sent,) = [json.loads(asked.body) for asked in one.asked if asked.method == "DELETE"]
    assert sent["propagationPolicy"] in {"Foreground", "Background"}
    assert sent["preconditions"].keys() == {"uid", "resourceVersion"}
    assert plane.api.list("jobs", namespace) == []
    plane.until(lambda: plane.api.list("pods", namespace) == [], "the garbage collector removed the pods")


@pytest.mark.usefixtures("kwok_node")
def test_the_jobset_of_a_trainjob(trainer_v23: ControlPlane, namespace: str) -> None:
    """Child deleted, parent re-creates (tr#2981, #3779): owned JobSet is never a target."""
    plane = trainer_v23
    plane.api.create(objects.training_runtime("torch", annotations={"test/exit-code": "1"}), namespace)
    plane.api.create(objects.train_job("run", "torch"), namespace)
    plane.api.wait_condition("trainjobs", namespace, "run", "Failed")
    child = plane.api.get("jobsets", namespace, "run")
    assert child is not None
    with proxy(plane) as one:
        harness = Harness(between(plane, one), namespace, admins=["root"])
        harness.later(minutes=121)
        assert "trainjob/run" in harness.subjects()
        assert not [name for name in harness.subjects() if name.startswith(("jobset/", "job/", "pod/"))]
        ref = Ref("kubernetes", harness.platform.place, "jobset", "run", child["metadata"]["uid"], namespace)
        looked = harness.run(harness.platform.read(ref))
        assert isinstance(looked, Subject)
        assert str(looked.root).endswith("trainjob/run")
        reply = harness.ask("root", "remove", ref.path, attended=True)
        assert not reply.done, reply.words
        assert final_results(harness) == [Result.RECLAIMED]
        assert [asked.path.split("/")[-2:] for asked in one.asked if asked.method == "DELETE"] == [["trainjobs", "run"]]
    plane.api.wait_gone("jobsets", namespace, "run")
    # Where its controller makes one anew it does so within a second; that it does not has no moment to wait for.
    stays_so(lambda: not left(plane.api, namespace, "trainjobs", "jobsets"), "it was made anew", 2)


@pytest.mark.usefixtures("kwok_node")
def test_a_child_whose_removal_failed_and_was_forgotten(trainer_v23: ControlPlane, namespace: str) -> None:
    """Swallowed error after a status change (Trainer deadline): 500 on the child's delete → zombie found next pass."""
    plane = trainer_v23
    plane.api.create(objects.training_runtime("torch"), namespace)
    plane.api.create(objects.train_job("run", "torch", activeDeadlineSeconds=15), namespace)
    plane.api.wait_pods(namespace, 1)
    with unreachable_webhook(plane.api, namespace, "jobset.x-k8s.io", "jobsets"):
        before = _refusals(plane.api)
        plane.api.wait_condition("trainjobs", namespace, "run", "Failed")
        plane.until(lambda: _refusals(plane.api) > before, "the controller tried to delete its child")
    harness = Harness(plane.keeper_kubeconfig(), namespace, at_finish="Running", classes=AT_ONCE)
    if plane.api.list("jobsets", namespace) == []:
        pytest.fail("the controller tried again: the bug is mended, and this row needs another child")
    zombie = harness.subjects()["trainjob/run"]
    assert (zombie.state, zombie.outcome, zombie.live_children) == (State.ENDED, Outcome.FAILED, 1)
    harness.later(minutes=6)
    report = harness.again()
    assert [(one.action, one.result) for one in report.outcomes] == [(Action.TRIM, Result.RECLAIMED)], report.outcomes
    assert plane.api.get("trainjobs", namespace, "run") is not None
    plane.api.wait_pods(namespace, 0)


@pytest.mark.usefixtures("kwok_node")
def test_workers_that_a_success_hides(training_operator: ControlPlane, namespace: str) -> None:
    """Success hides workers (tr#1982): Succeeded, worker Running, counters clean → zombie."""
    plane = training_operator
    plane.api.create(objects.pytorch_job("run", workers=1), namespace)
    plane.api.wait_pods(namespace, 2)
    plane.finish_pod(namespace, "run-master-0")
    seen = plane.api.wait_condition("pytorchjobs", namespace, "run", "Succeeded")
    seen = plane.api.wait_for(
        "pytorchjobs",
        namespace,
        "run",
        lambda job: job and not job["status"]["replicaStatuses"]["Worker"].get("active"),
        words="a status that hides the worker",
    )
    plane.api.wait_pods(namespace, 1)
    harness = Harness(plane.keeper_kubeconfig(), namespace, at_finish="Running", classes=AT_ONCE)
    zombie = harness.subjects()["pytorchjob/run"]
    assert (zombie.state, zombie.live_children) == (State.ENDED, 1), seen["status"]
    harness.later(minutes=6)
    assert harness.decisions()["pytorchjob/run"].rule == "live_children"
    report = harness.again()
    assert [(one.action, one.result) for one in report.outcomes] == [(Action.TRIM, Result.RECLAIMED)], report.outcomes
    assert plane.api.get("pytorchjobs", namespace, "run") is not None
    plane.api.wait_pods(namespace, 0)


def _ray_pod(plane: ControlPlane, namespace: str, cluster: Object) -> None:
    """Its worker, as KubeRay would have made it."""
    name = cluster["metadata"]["name"]
    worker = objects.pod(f"{name}-worker", labels={"ray.io/cluster": name})
    worker["metadata"]["ownerReferences"] = owned_by(cluster, "RayCluster", "ray.io/v1")
    plane.api.create(worker, namespace)
    plane.api.wait_pods(namespace, 1)


def _ray_job(plane: ControlPlane, namespace: str, status: Object, **spec: Any) -> Object:
    whole: Object = {"entrypoint": "python train.py", **spec}
    made = plane.api.create({"kind": "RayJob", "metadata": {"name": "tune"}, "spec": whole}, namespace)
    plane.api.patch("rayjobs", namespace, "tune", {"status": status}, subresource="status")
    return made


@pytest.mark.usefixtures("kwok_node")
def test_a_rayjob_past_its_deadline(plane: ControlPlane, namespace: str) -> None:
    """RayJob Failed with `jobStatus` RUNNING (kr#5184): finished; no rule → alarm."""
    plane.install_crds("kuberay")
    plane.stop("kuberay")
    now = text(datetime.now(UTC))
    status = {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": "DeadlineExceeded", "endTime": now}
    spec = objects.ray_cluster("unused")["spec"]
    job = _ray_job(plane, namespace, {**status, "rayClusterName": "tune-x"}, rayClusterSpec=spec)
    made = objects.ray_cluster("tune-x")
    made["metadata"]["ownerReferences"] = owned_by(job, "RayJob", "ray.io/v1")
    _ray_pod(plane, namespace, plane.api.create(made, namespace))
    harness = Harness(plane.keeper_kubeconfig(), namespace, retention={"failed": "manual"}, at_finish="None")
    harness.later(days=10)
    left = harness.subjects()["rayjob/tune"]
    assert (left.state, left.outcome, left.live_children) == (State.ENDED, Outcome.FAILED, 1)
    said = harness.decisions()["rayjob/tune"]
    assert (said.action, said.verdict) == (Action.KEEP, Verdict.REPORT)
    assert "1 of its children still run and hold GPUs" in said.reason


@pytest.mark.usefixtures("kwok_node")
def test_a_raycluster_that_is_only_borrowed(plane: ControlPlane, namespace: str) -> None:
    """Borrowed RayCluster: `clusterSelector` → cluster kept."""
    plane.install_crds("kuberay")
    plane.stop("kuberay")
    cluster = plane.api.create(objects.ray_cluster("shared"), namespace)
    _ray_pod(plane, namespace, cluster)
    status = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED", "endTime": text(datetime.now(UTC))}
    status["rayClusterName"] = "shared"
    _ray_job(plane, namespace, status, clusterSelector={"ray.io/cluster": "shared"})
    harness = Harness(plane.keeper_kubeconfig(), namespace, at_finish="All")
    harness.later(hours=2)
    assert final_results(harness) == [Result.RECLAIMED]
    assert plane.api.get("rayjobs", namespace, "tune") is None
    still = plane.api.get("rayclusters", namespace, "shared")
    assert still is not None
    assert not still["spec"].get("suspend")
    plane.api.wait_pods(namespace, 1)


@pytest.mark.usefixtures("kwok_node")
def test_a_mark_that_was_copied_to_a_replicaset(plane: ControlPlane, namespace: str) -> None:
    """Marker copied from Deployment to ReplicaSet (kj PR#9): the copy is no target."""
    made = objects.deployment("serve")
    made["metadata"]["annotations"] = {"janitor/ttl": "1m", "gpukeeper.io/ttl": "1m"}
    plane.api.create(made, namespace)
    plane.api.wait_pods(namespace, 1)
    (copy,) = plane.api.list("replicasets", namespace)
    assert copy["metadata"]["annotations"]["janitor/ttl"] == "1m"
    harness = Harness(plane.keeper_kubeconfig(), namespace, ttl={"foreign": ["janitor/ttl"]})
    harness.later(days=30)
    assert set(harness.subjects()) == {"deployment/serve"}
    ref = Ref(
        "kubernetes", harness.platform.place, "replicaset", copy["metadata"]["name"], copy["metadata"]["uid"], namespace
    )
    looked = harness.run(harness.platform.read(ref))
    assert isinstance(looked, Subject)
    assert str(looked.root).endswith("deployment/serve")
    assert harness.again().outcomes == []
    assert harness.cluster.asked["DELETE"] == 0
    plane.api.wait_pods(namespace, 1)


# Idle


@pytest.mark.usefixtures("kwok_node")
def test_one_gpu_of_eight_that_was_not_measured(plane: ControlPlane, namespace: str) -> None:
    """Silence as idle (notebook culler, KAI#1968): drop one GPU's series of eight → kept."""
    plane.api.create(objects.pod("train", gpus=8), namespace)
    plane.api.wait_pods(namespace, 1)
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=IDLE)
    harness.later(minutes=60)
    measured(harness, "pod/train", 50, {3: None})
    said = harness.decisions()["pod/train"]
    assert (said.action, said.verdict) == (Action.KEEP, Verdict.UNKNOWN), said.reason
    measured(harness, "pod/train", 50, 0.0)
    said = harness.decisions()["pod/train"]
    assert said.action is Action.WARN, f"all eight are known to be idle: {said.reason}"


@pytest.mark.usefixtures("kwok_node")
def test_one_idle_gpu_and_one_idle_replica(plane: ControlPlane, namespace: str) -> None:
    """Part idle (gp): 1 of 8 GPUs, 1 of 4 replicas → kept."""
    plane.api.create(objects.deployment("serve", replicas=4, gpus=2), namespace)
    plane.api.wait_pods(namespace, 4)
    busy, idle = dict.fromkeys(range(8), 80.0), dict.fromkeys(range(8), 0.0)
    found = {}
    for part in (1, 2, 7, 8):  # a GPU, a replica, all but one GPU, and everything
        harness = Harness(plane.keeper_kubeconfig(), namespace, classes=IDLE)
        harness.later(minutes=60)
        measured(harness, "deployment/serve", 50, {**idle, **{n: busy[n] for n in range(part, 8)}})
        found[part] = harness.decisions()["deployment/serve"].action
    assert found == {1: Action.KEEP, 2: Action.KEEP, 7: Action.KEEP, 8: Action.WARN}


# Times


@pytest.mark.parametrize(
    ("finished", "known"),
    [
        ("now", True),
        (None, False),
        ("0001-01-01T00:00:00Z", False),
        ("1969-12-31T23:59:59Z", False),
        ("2099-01-01T00:00:00Z", False),
    ],
    ids=["now", "nil", "year 1", "before 1970", "future"],
)
def test_odd_times(plane: ControlPlane, namespace: str, finished: str | None, known: bool) -> None:
    """Odd times (docker-gc#23, v1 nil completionTime): nil, year 1, pre-1970, future → kept, reported."""
    ended_pod(plane.api, namespace, "odd", finished=finished)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(days=9)
    if known:
        assert harness.decisions()["pod/odd"].action is Action.REMOVE
        return
    subject = harness.subjects()["pod/odd"]
    assert isinstance(subject.ended, Unknown), subject.ended
    assert any("its end time is unknown" in one for one in subject.findings), subject.findings
    assert harness.again().outcomes == []  # counted from when it was first seen ended: now
    harness.later(minutes=59)
    assert harness.again().outcomes == []
    assert plane.api.names("pods", namespace) == {"odd"}


@pytest.mark.usefixtures("kwok_node")
def test_a_pod_that_runs_and_is_not_ready(plane: ControlPlane, namespace: str) -> None:
    """Phase unchecked (kco): bare pod Running, not Ready → kept."""
    plane.api.create(objects.pod("train"), namespace)
    plane.api.wait_pods(namespace, 1)
    not_ready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    plane.api.patch(
        "pods", namespace, "train", {"status": {"conditions": [not_ready]}}, kind="strategic", subresource="status"
    )
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(days=90)
    assert harness.subjects()["pod/train"].state is State.RUNNING
    assert harness.again().outcomes == []
    plane.api.wait_pods(namespace, 1)


@pytest.mark.usefixtures("kwok_node")
def test_a_job_that_succeeded_after_failures(plane: ControlPlane, namespace: str) -> None:
    """Retry success counted as failure (kco): Complete with failed=2 → success TTL."""
    made = objects.job("train", parallelism=3, backoff=6)
    del made["spec"]["completions"]  # one that succeeds is enough
    plane.api.create(made, namespace)
    first, second, third = plane.api.wait_pods(namespace, 3)
    plane.finish_pod(namespace, third["metadata"]["name"])
    for one in (first, second):
        plane.finish_pod(namespace, one["metadata"]["name"], exit_code=1)
    done = plane.api.wait_condition("jobs", namespace, "train", "Complete")
    assert done["status"]["failed"] == 2
    harness = Harness(plane.keeper_kubeconfig(), namespace)  # succeeded 1h, failed 2h
    harness.later(minutes=61)
    assert harness.subjects()["job/train"].outcome is Outcome.SUCCEEDED
    assert final_results(harness) == [Result.RECLAIMED]


def test_due_within_one_interval_after_a_restart(plane: ControlPlane, namespace: str) -> None:
    """Unread timer (tr#1533): due within one interval after restart."""
    ended_pod(plane.api, namespace, "run")
    harness = Harness(plane.keeper_kubeconfig(), namespace, schedule={"every": "5m"})
    harness.again()
    harness.clock.ahead += timedelta(minutes=59, seconds=55)
    harness.ledger = type(harness.ledger)()  # a daemon that finds an old ledger waits for another reason
    harness.later()  # its timers are gone with the process
    _serve(harness, lambda: plane.api.get("pods", namespace, "run") is None, 200)
    assert plane.api.get("pods", namespace, "run") is None


def _serve(harness: Harness, enough: Any, seconds: float, complaints: list[str] | None = None) -> None:
    """The daemon's loop, until the cluster looks so."""

    async def story() -> None:
        stop = asyncio.Event()
        told = complaints if complaints is not None else []
        running = asyncio.create_task(
            watch(Watch(harness.keeper, lambda: harness.book, stop, on_complaint=told.append))
        )
        try:
            async with asyncio.timeout(seconds):
                while not await asyncio.to_thread(enough):
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.1)
        finally:
            stop.set()
            await running

    asyncio.run(story())


# How much


@pytest.fixture(scope="module")
def crowd(the_plane: ControlPlane) -> Iterator[str]:
    """A namespace with very many pods that ended; the first hundred of them some minutes before the others."""
    name = the_plane.new_namespace("crowd")
    early, late = timedelta(minutes=4), timedelta()
    many_ended_pods(the_plane.api, name, {f"run-{n:05}": early if n < 100 else late for n in range(MANY)})
    yield name
    the_plane.healthy()
    the_plane.api.delete("namespaces", None, name)  # its controller empties it; nobody waits


@pytest.mark.timeout(600)
def test_many_are_due_and_the_limit_is_a_hundred(plane: ControlPlane, crowd: str) -> None:
    """Cap ignored (c7n_kube, helm 256): 10,001 finished due, limit 100 → 100 oldest, the rest deferred (see MANY)."""
    harness = Harness(
        plane.kubeconfig(), crowd, budget={"per_pass": 100, "per_hour": 100000}, capture={"what": ["manifest"]}
    )
    harness.later(hours=2)
    report = harness.again()
    assert len(report.reclaimed) == 100
    assert report.deferred == MANY - 100
    left = plane.api.names("pods", crowd)
    assert left == {f"run-{n:05}" for n in range(100, MANY)}


MEMORY = """
import os, resource, sys
from pathlib import Path
from tests.real.kube.harness import Harness
harness = Harness(Path(sys.argv[1]), sys.argv[2], kubernetes={"page": 100})
seen = sum(len(harness.again().survey.decisions) for _ in range(2))
print(seen, harness.again().survey.counts.seen, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.timeout(600)
def test_memory_follows_the_page(plane: ControlPlane, crowd: str, namespace: str) -> None:
    """Memory grows (ttlc#78, babylon#3407): 100,000 finished, flat RSS. Here as many as MANY, in pages of 100."""
    many_ended_pods(plane.api, namespace, {f"run-{n}": timedelta() for n in range(100)})

    def peak(where: str) -> tuple[int, int]:
        command = [sys.executable, "-c", MEMORY, str(plane.kubeconfig()), where]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert said.returncode == 0, said.stderr
        _, seen, mib = map(int, said.stdout.split())
        return seen, mib

    few, small = peak(namespace)
    many, large = peak(crowd)
    assert (few, many >= MANY - 100) == (100, True)
    # The ledger of this harness lives in memory; its lines take about 3 KiB for each pod.
    assert large - small < 4 + 4 * many / 1024, f"{small} MiB for {few} pods, {large} MiB for {many}"


@pytest.mark.usefixtures("kwok_node")
def test_a_third_of_what_runs_is_due_at_once(plane: ControlPlane, namespace: str) -> None:
    """Cap ignored: 30 % of *running* work due at once → breaker, nothing done (exit 12 is in tests/cli)."""
    more = f"more-{namespace}"
    plane.gpu_node(more)
    try:
        for number in range(10):
            plane.api.create(objects.pod(f"run-{number}"), namespace)
        plane.api.wait_pods(namespace, 10)
        harness = Harness(plane.keeper_kubeconfig(), namespace, classes=IDLE, breaker={"running": "20%", "floor": 1})
        for minutes in (60, 10):
            harness.later(minutes=minutes)
            for number in range(10):
                measured(harness, f"pod/run-{number}", 50, 0.0 if number < 3 else 90.0)
            report = harness.again()
        assert len(harness.run(_warned(harness))) == 3
        assert report.plan.breaker is not None, [one.decision.reason for one in report.plan.steps]
        assert "3 of 10" in report.plan.breaker
        assert report.outcomes == []
        assert not [line for line in harness.ledger.lines if isinstance(line, Intended)]
        plane.api.wait_pods(namespace, 10)
    finally:
        plane.remove_node(more)


async def _warned(harness: Harness) -> set[str]:
    from gpukeeper.model.event import WarningSent

    return {line.ref.name for line in harness.ledger.lines if isinstance(line, WarningSent) and line.ref is not None}


def test_the_command_says_by_its_exit_that_some_were_deferred(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Cap ignored: … the rest deferred, exit 3."""
    for number in range(3):
        ended_pod(plane.api, namespace, f"run-{number}")
    zero = {"succeeded": "0s", "failed": "0s", "stopped": "0s"}
    rules = tmp_path / "policy.yaml"
    rules.write_text(policy([namespace], retention=zero, budget={"per_pass": 2, "per_hour": 100}))
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(plane.kubeconfig())}
    env |= {"GPUKEEPER_STATE": str(tmp_path / "state"), "GPUKEEPER_POLICY": str(rules)}

    def apply() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpukeeper", "apply", "--yes"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)

    said = apply()
    assert said.returncode == 3, said.stdout + said.stderr
    assert len(plane.api.names("pods", namespace)) == 1
    said = apply()
    assert said.returncode == 0, said.stdout + said.stderr
    assert plane.api.names("pods", namespace) == set()


# What was not done


def test_a_failure_is_no_success(plane: ControlPlane, namespace: str) -> None:
    """Failure counted as success (kj, kc): 403, 500, finalizer → not reclaimed."""
    for name in ("forbidden", "broken", "pinned"):
        ended_pod(plane.api, namespace, name)
    pin = {"metadata": {"finalizers": ["example.com/wait"]}}
    plane.api.patch("pods", namespace, "pinned", pin)

    def rule(asked: Asked) -> Say | None:
        if asked.method != "DELETE" or asked.path.endswith("/pinned"):
            return None
        return Say(403 if asked.path.endswith("/forbidden") else 500)

    try:
        with proxy(plane, rule) as one:
            harness = Harness(between(plane, one), namespace, classes=AT_ONCE)
            harness.later(minutes=61)
            report = harness.again()
        found = {line.ref.name: line.result for line in report.outcomes if line.ref is not None}
        assert found == {"forbidden": Result.REFUSED, "broken": Result.STILL_THERE, "pinned": Result.STILL_THERE}
        assert report.reclaimed == []
        assert plane.api.names("pods", namespace) == {"forbidden", "broken", "pinned"}
        (pinned,) = [line for line in report.outcomes if line.ref is not None and line.ref.name == "pinned"]
        assert "blocked by example.com/wait" in pinned.reason
    finally:
        plane.api.patch("pods", namespace, "pinned", {"metadata": {"finalizers": None}})


@pytest.mark.smoke
def test_no_second_delete(plane: ControlPlane, namespace: str) -> None:
    """Second Foreground delete (k/k#77081): `deletionTimestamp` set → no DELETE."""
    made = objects.job("train", parallelism=0, gpus=0)
    made["metadata"]["finalizers"] = ["example.com/wait"]
    plane.api.create(made, namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")
    harness = Harness(plane.keeper_kubeconfig(), namespace, admins=["root"])
    harness.later(minutes=61)
    step = harness.step("job/train")
    assert step.decision.action is Action.REMOVE
    plane.api.delete("jobs", namespace, "train", propagation="Foreground")
    try:
        assert harness.take(step).result is Result.CHANGED
        assert harness.again().outcomes == []
        harness.ask("root", "remove", step.decision.seen.ref.path, attended=True)
        assert harness.cluster.asked["DELETE"] == 0
    finally:
        plane.api.patch("jobs", namespace, "train", {"metadata": {"finalizers": None}})


def test_a_mark_that_cannot_be_read(plane: ControlPlane, namespace: str) -> None:
    """Bad marker (kyverno#8593): `10ay` → held, loud."""
    ended_pod(plane.api, namespace, "run", annotations={"gpukeeper.io/ttl": "10ay"})
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(days=29)
    assert harness.again().outcomes == []
    loud = [line.what for line in harness.ledger.lines if isinstance(line, Complaint)]
    assert any("10ay" in what for what in loud), loud
    assert plane.api.names("pods", namespace) == {"run"}


@pytest.mark.usefixtures("kwok_node")
def test_volumes_that_would_be_lost(plane: ControlPlane, namespace: str) -> None:
    """Volumes lost on scale to 0: `whenScaled: Delete` → refused."""
    made = objects.deployment("serve")
    made["kind"] = "StatefulSet"
    made["spec"] |= {"persistentVolumeClaimRetentionPolicy": {"whenScaled": "Delete"}, "serviceName": "serve"}
    plane.api.create(made, namespace)
    plane.api.wait_pods(namespace, 1)
    harness = Harness(plane.keeper_kubeconfig(), namespace, admins=["root"])
    path = harness.subjects()["statefulset/serve"].ref.path
    reply = harness.ask("root", "stop", path, attended=True)
    assert not reply.done
    assert "whenScaled is Delete" in reply.words
    still = plane.api.get("statefulsets", namespace, "serve")
    assert still is not None
    assert still["spec"]["replicas"] == 1
    assert "gpukeeper.io/stopped" not in (still["metadata"].get("annotations") or {})


def _stuck_in_the_foreground(plane: ControlPlane, namespace: str) -> None:
    """A Job whose removal waits for a collector that is not there."""
    plane.api.create(objects.job("train", parallelism=0, gpus=0), namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")
    plane.programs["kube-controller-manager"].kill()
    plane.api.delete("jobs", namespace, "train", propagation="Foreground")


@pytest.mark.parametrize("unrelated", [True, False], ids=["an unrelated change", "another wish"])
def test_a_patch_whose_test_fails(plane: ControlPlane, namespace: str, unrelated: bool) -> None:
    """Patch `test` fails: 422 → decided anew."""
    _stuck_in_the_foreground(plane, namespace)
    change: Object = {"metadata": {"annotations": {"note": "x"}}} if unrelated else {"spec": {"suspend": True}}
    done: list[Object] = []
    with proxy(plane) as one:
        harness = Harness(
            between(plane, one), namespace, kubernetes={"release": ["foregroundDeletion"]}, classes=AT_ONCE
        )
        harness.later(minutes=10)
        one.rule = lambda asked: (
            First(lambda: done.append(plane.api.patch("jobs", namespace, "train", change)))
            if asked.method == "PATCH" and not done
            else None
        )
        (closed,) = harness.again().outcomes
        told = [asked.status for asked in one.asked if asked.method == "PATCH"]
    assert closed.action is Action.RELEASE
    if unrelated:
        assert (closed.result, told) == (Result.RECLAIMED, [422, 200]), closed.reason
        assert plane.api.get("jobs", namespace, "train") is None
    else:
        assert (closed.result, told) == (Result.CHANGED, [422]), closed.reason
        still = plane.api.get("jobs", namespace, "train")
        assert still is not None
        assert still["metadata"]["finalizers"] == ["foregroundDeletion"]


# Reading


def test_one_answer_about_what_is_served_is_503(plane: ControlPlane, namespace: str) -> None:
    """Silent stop (kyverno#17178, #10418): one discovery 503 → next pass works."""
    plane.api.create(objects.job("train", parallelism=0, gpus=0), namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")
    with proxy(plane, lambda asked: Say(503) if asked.path == "/apis/batch" else None) as one:
        harness = Harness(between(plane, one), namespace)
        harness.later(minutes=61)
        report = harness.again()
        assert report.outcomes == []
        assert [unseen.what for unseen in report.survey.unseen] == ["jobs"]
        one.rule = None
        assert final_results(harness) == [Result.RECLAIMED]
    assert plane.api.list("jobs", namespace) == []


def test_a_pass_that_does_not_happen_is_reported(plane: ControlPlane, namespace: str) -> None:
    """Silent stop (hawk): missing pass alarms."""
    told: list[str] = []
    with proxy(plane, lambda asked: Late(60)) as one:
        harness = Harness(between(plane, one), namespace, schedule={"every": "1s"})
        _serve(harness, lambda: bool(told), 60, told)
    assert "no pass finished" in told[0]
    assert any(isinstance(line, Complaint) for line in harness.ledger.lines)


@pytest.mark.parametrize("goes_on", [True, False], ids=["with a token to go on", "without"])
def test_a_list_that_expires_in_the_middle(plane: ControlPlane, namespace: str, goes_on: bool) -> None:
    """Spin on 410 (ttlc): expired token → one restart, backed off. Nothing is taken for absent meanwhile."""
    for number in range(5):
        ended_pod(plane.api, namespace, f"run-{number}", annotations={"gpukeeper.io/ttl": "9d"})

    def rule(asked: Asked) -> Say | None:
        token = asked.query.get("continue", "")
        if not token or not asked.path.endswith("/pods") or b'"rv":-1' in _decoded(token):
            return None
        return Say(410, "the token is too old", token=_later(token) if goes_on else "")

    with proxy(plane) as one:
        harness = Harness(between(plane, one), namespace, kubernetes={"page": 2})
        assert harness.again().survey.counts.seen == 5
        one.forget()
        one.rule = rule
        report = harness.again()
        asked = [1 for each in one.lists() if each.path.endswith("/pods")]
        assert len(asked) <= 5, "it does not spin"
        assert [unseen.what for unseen in report.survey.unseen] == [f"pods in {namespace}"]
        assert (report.survey.missing, report.survey.counts.seen >= 2) == ([], True)
        assert len(harness.run(harness.ledger.present("kubernetes", harness.platform.place))) == 5
        one.rule = None
        assert (harness.again().survey.unseen, report.outcomes) == ([], [])


def _decoded(token: str) -> bytes:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))


def _later(token: str) -> str:
    """As the server makes one that goes on at the newest version."""
    said = json.loads(_decoded(token))
    return base64.urlsafe_b64encode(json.dumps({**said, "rv": -1}, separators=(",", ":")).encode()).decode().rstrip("=")


def test_the_ending_of_a_pod_by_hand_is_one(plane: ControlPlane, namespace: str) -> None:
    """What these tests rely on: the server takes such a status, and gpukeeper reads it as an end."""
    made = ended_pod(plane.api, namespace, "run", exit_code=3)
    seen = plane.api.get("pods", namespace, "run")
    assert seen is not None
    assert (seen["metadata"]["uid"], seen["status"]["phase"]) == (made["metadata"]["uid"], ending(3)["phase"])
    assert Harness(plane.keeper_kubeconfig(), namespace).subjects()["pod/run"].outcome is Outcome.FAILED

"""Stopping work so that it can be brought back: by the lever of its kind, on real controllers, and never against its
user. And the idle rule from the first quiet minute to the removal."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.subject import State
from gpukeeper.platforms.kubernetes.kinds.pod import GATE
from tests.real.kube import objects
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import unplaced
from tests.real.kube.harness import Harness, minute_of
from tests.real.kube.runs import HOLDERS, labelled, left, passes, ray_job, reclaimed, stays_so, uid
from tests.smoke import smoke

pytestmark = pytest.mark.usefixtures("kwok_node")
RUN = "run"
STOPPED = "gpukeeper.io/stopped"
STOPS: dict[str, Any] = {
    "cluster": {"idle": "30m", "on_idle": "stop", "after_idle": "remove", "start_grace": "0s"},
}


def stateful_set(name: str, **spec: Any) -> Object:
    made = objects.deployment(name, replicas=2)
    return {**made, "kind": "StatefulSet", "spec": {**made["spec"], "serviceName": name, **spec}}


def deployment() -> Object:
    return objects.deployment(RUN, replicas=3)


# By kind: its plural, the controller it needs, how it is made, and how many pods it has then.
LEVERS: dict[str, tuple[str, str | None, Callable[[], Object], int]] = {
    "job": ("jobs", None, lambda: objects.job(RUN, parallelism=2), 2),
    "deployment": ("deployments", None, deployment, 3),
    "statefulset": ("statefulsets", None, lambda: stateful_set(RUN), 2),
    "jobset": ("jobsets", "jobset", lambda: objects.jobset(RUN, replicas=2), 2),
    "trainjob": ("trainjobs", "trainer-v2.3.0", lambda: objects.train_job(RUN, "torch"), 1),
    "pytorchjob": ("pytorchjobs", "training-operator", lambda: objects.pytorch_job(RUN, workers=2), 3),
    "raycluster": ("rayclusters", "kuberay", lambda: objects.ray_cluster(RUN, workers=2), 3),
    "rayjob": ("rayjobs", "kuberay", lambda: ray_job(RUN, workers=2, shutdownAfterJobFinishes=True), 3),
}


def wish(seen: Object | None) -> Object:
    """Its spec; a lever that was never moved and one that was moved back are the same."""
    assert seen is not None
    spec = copy.deepcopy(seen["spec"])
    for holder in (spec, spec.get("runPolicy") or {}):
        if holder.get("suspend") is False:
            del holder["suspend"]
    return {key: value for key, value in spec.items() if value != {}}


def running(plane: ControlPlane, namespace: str, kind: str) -> str:
    """One of this kind runs; its plural."""
    plural, controller, make, pods = LEVERS[kind]
    if controller:
        plane.need(controller)
    if kind == "trainjob":
        plane.api.create(objects.training_runtime("torch"), namespace)
    plane.api.create(make(), namespace)
    wait_running(plane, namespace, kind, pods)
    return plural


def wait_running(plane: ControlPlane, namespace: str, kind: str, pods: int) -> None:
    """KubeRay adds a pod that submits the job, sooner or later."""
    plane.api.wait_pods(namespace, pods, labels="ray.io/cluster" if kind == "rayjob" else "")


# Stop and restore.


@pytest.mark.parametrize("kind", smoke(LEVERS, "job".__eq__))
def test_what_was_stopped_comes_back_as_it_was(plane: ControlPlane, namespace: str, kind: str) -> None:
    plural, api = running(plane, namespace, kind), plane.api
    before, itself = wish(api.get(plural, namespace, RUN)), uid(api, plural, namespace, RUN)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    reply = harness.ask("root", "stop", f"{kind}/{RUN}", attended=True)
    assert reply.done, reply.words
    plane.until(lambda: not api.list("pods", namespace), "its pods are gone")
    stays_so(lambda: not api.list("pods", namespace), "a pod came back", 1)
    stopped = api.get(plural, namespace, RUN)
    assert stopped is not None
    assert STOPPED in stopped["metadata"]["annotations"]
    assert harness.subjects()[f"{kind}/{RUN}"].state is State.SUSPENDED
    assert passes(harness) == [], "what a person stopped stays"

    reply = harness.ask("root", "restore", f"{kind}/{RUN}")
    assert reply.done, reply.words
    wait_running(plane, namespace, kind, LEVERS[kind][3])
    now = api.get(plural, namespace, RUN)
    assert wish(now) == before
    assert uid(api, plural, namespace, RUN) == itself
    assert STOPPED not in ((now or {})["metadata"].get("annotations") or {})
    assert harness.subjects()[f"{kind}/{RUN}"].state is State.RUNNING


def test_a_second_restore_reports_that_it_runs(plane: ControlPlane, namespace: str) -> None:
    running(plane, namespace, "job")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    assert harness.ask("root", "stop", f"job/{RUN}", attended=True).done
    assert harness.ask("root", "restore", f"job/{RUN}").done
    again = harness.ask("root", "restore", f"job/{RUN}")
    assert not again.done
    assert "it is not stopped" in again.words


def test_a_set_that_would_lose_its_volumes_is_not_scaled_down(plane: ControlPlane, namespace: str) -> None:
    deletes = {"whenScaled": "Delete", "whenDeleted": "Retain"}
    plane.api.create(stateful_set(RUN, persistentVolumeClaimRetentionPolicy=deletes), namespace)
    plane.api.wait_pods(namespace, 2)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    reply = harness.ask("root", "stop", f"statefulset/{RUN}", attended=True)
    assert not reply.done
    assert "would lose its volumes" in reply.words
    seen = plane.api.get("statefulsets", namespace, RUN)
    assert seen is not None
    assert seen["spec"]["replicas"] == 2
    assert STOPPED not in (seen["metadata"].get("annotations") or {})
    plane.api.wait_pods(namespace, 2)


def test_what_kueue_suspends_is_not_suspended_by_us(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(labelled(objects.job(RUN), {"kueue.x-k8s.io/queue-name": "gpus"}), namespace)
    plane.api.wait_pods(namespace, 1)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    reply = harness.ask("root", "stop", f"job/{RUN}", attended=True)
    assert not reply.done
    assert "Kueue manages its suspension" in reply.words
    assert not (plane.api.get("jobs", namespace, RUN) or {})["spec"].get("suspend")
    plane.api.wait_pods(namespace, 1)


def test_a_rayjob_that_kuberay_would_not_suspend_is_refused(kuberay: ControlPlane, namespace: str) -> None:
    kuberay.api.create(ray_job(RUN), namespace)
    wait_running(kuberay, namespace, "rayjob", 2)
    harness = Harness(kuberay.keeper_kubeconfig(), namespace)
    reply = harness.ask("root", "stop", f"rayjob/{RUN}", attended=True)
    assert not reply.done
    assert "shutdownAfterJobFinishes" in reply.words
    assert not (kuberay.api.get("rayjobs", namespace, RUN) or {})["spec"].get("suspend")
    wait_running(kuberay, namespace, "rayjob", 2)


# Idle.


def measure_each(harness: Harness, name: str, minutes: int, values: Sequence[float | None]) -> None:
    """As if each of its GPUs had shown its value in every minute so far; None: it was not measured."""
    subject, now = harness.subjects()[name], harness.clock.now()
    assert isinstance(subject.devices, tuple)
    assert len(subject.devices) == len(values)
    samples = [
        minute_of(subject, device, now - timedelta(minutes=ago), value)
        for device, value in zip(subject.devices, values, strict=True)
        if value is not None
        for ago in reversed(range(minutes + 1))
    ]
    harness.run(harness.signals.add(samples))


def idles(harness: Harness, name: str, minutes: int) -> None:
    """Nothing happened on its GPUs for so long."""
    harness.later(minutes=minutes)
    harness.measure(name, 0.0, minutes)


def test_idle_work_is_only_reported_by_default(plane: ControlPlane, namespace: str) -> None:
    running(plane, namespace, "job")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.again()
    idles(harness, f"job/{RUN}", 360)
    decision = harness.decisions()[f"job/{RUN}"]
    assert (decision.rule, decision.verdict, decision.action) == ("idle", Verdict.REPORT, Action.KEEP), decision.reason
    assert passes(harness) == []
    plane.api.wait_pods(namespace, 2)


@pytest.mark.parametrize("kind", ["job", "deployment", "trainjob", "pytorchjob", "raycluster"])
def test_idle_work_is_warned_suspended_and_removed_after_its_retention(
    plane: ControlPlane, namespace: str, kind: str
) -> None:
    plural, api, name = running(plane, namespace, kind), plane.api, f"{kind}/{RUN}"
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=STOPS)
    harness.again()
    idles(harness, name, 26)
    report = harness.again()
    assert [line.rule for line in report.warnings] == ["idle"]
    assert report.outcomes == []
    idles(harness, name, 10)
    (line,) = passes(harness)
    assert (line.action, line.rule, line.result) == (Action.STOP, "idle", Result.RECLAIMED), line.reason
    plane.until(lambda: not api.list("pods", namespace), "its pods are gone")
    assert isinstance(line.gpus_back, int)
    assert line.gpus_back > 0
    assert isinstance(line.gpu_hours, float)
    assert line.gpu_hours == pytest.approx(line.gpus_back * 36 / 60, abs=0.2)
    harness.later(minutes=55)
    assert passes(harness) == [], "it can still be brought back"
    assert uid(api, plural, namespace, RUN)
    harness.later(minutes=6)
    done = passes(harness)
    assert reclaimed(done) == {name: Action.REMOVE}, (done, harness.decisions()[name])
    plane.until(lambda: not left(api, namespace, plural, *HOLDERS), "nothing is left")


def test_an_idle_pod_without_a_lever_is_evicted(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.pod(RUN), namespace)
    plane.api.wait_pods(namespace, 1)
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=STOPS)
    harness.again()
    idles(harness, f"pod/{RUN}", 26)
    assert len(harness.again().warnings) == 1
    idles(harness, f"pod/{RUN}", 10)
    assert reclaimed(passes(harness)) == {f"pod/{RUN}": Action.STOP}
    assert plane.api.list("pods", namespace) == []


@pytest.mark.parametrize(
    ("made", "pods", "values"),
    [
        (objects.job(RUN, gpus=8), 1, [0.0] * 7 + [60.0]),
        (objects.job(RUN, parallelism=4), 4, [0.0, 0.0, 60.0, 0.0]),
        (objects.job(RUN, gpus=8), 1, [0.0] * 7 + [None]),
        (objects.job(RUN, parallelism=4), 4, [None, 0.0, 0.0, 0.0]),
    ],
    ids=["one of eight GPUs busy", "one of four pods busy", "one GPU not measured", "one pod not measured"],
)
def test_one_that_works_or_is_not_measured_keeps_all(
    plane: ControlPlane, namespace: str, made: Object, pods: int, values: list[float | None]
) -> None:
    plane.api.create(made, namespace)
    plane.api.wait_pods(namespace, pods)
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=STOPS)
    harness.again()
    for _ in range(2):
        harness.later(minutes=60)
        measure_each(harness, f"job/{RUN}", 60, values)
        assert passes(harness) == []
        assert harness.decisions()[f"job/{RUN}"].verdict is (Verdict.UNKNOWN if None in values else Verdict.WAIT)
    plane.api.wait_pods(namespace, pods)


def idle_and_stopped(plane: ControlPlane, namespace: str, kind: str = "job") -> Harness:
    name = f"{kind}/{RUN}"
    running(plane, namespace, kind)
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=STOPS)
    harness.again()
    idles(harness, name, 26)
    harness.again()
    idles(harness, name, 10)
    assert reclaimed(passes(harness)) == {name: Action.STOP}
    return harness


def suspend(plane: ControlPlane, namespace: str, kind: str = "job", *, yes: bool) -> None:
    """The user's own hand."""
    plural, _, _, pods = LEVERS[kind]
    spec: Object = {"replicas": 0 if yes else pods} if kind == "deployment" else {"suspend": yes}
    plane.api.patch(plural, namespace, RUN, {"spec": spec})
    if yes:
        plane.until(lambda: not plane.api.list("pods", namespace), "its pods are gone")
    else:
        wait_running(plane, namespace, kind, pods)


@pytest.mark.parametrize("kind", ["job", "deployment", "raycluster"])
@pytest.mark.parametrize("looked", [True, False], ids=["seen running", "not seen running"])
def test_a_user_who_resumes_and_suspends_is_not_fought(
    plane: ControlPlane, namespace: str, kind: str, looked: bool
) -> None:
    """It is not ours any more: neither stopped at once again, nor removed when its user suspends it."""
    harness = idle_and_stopped(plane, namespace, kind)
    suspend(plane, namespace, kind, yes=False)
    if looked:
        assert passes(harness) == []
        wait_running(plane, namespace, kind, LEVERS[kind][3])
    suspend(plane, namespace, kind, yes=True)
    harness.later(days=30)
    assert passes(harness) == []
    decision = harness.decisions()[f"{kind}/{RUN}"]
    assert decision.action is Action.KEEP, decision
    assert uid(plane.api, LEVERS[kind][0], namespace, RUN)


def test_what_its_user_resumed_may_be_idle_again(plane: ControlPlane, namespace: str) -> None:
    """With a new warning first; the old one belonged to another quiet time."""
    harness = idle_and_stopped(plane, namespace)
    second = int(time.time())
    plane.until(lambda: int(time.time()) > second, "a Job's start is known to the second")
    suspend(plane, namespace, yes=False)
    assert passes(harness) == []
    harness.later(minutes=20)
    report = harness.again()
    assert report.outcomes == []
    assert report.warnings == [], "not measured is not idle"
    plane.api.wait_pods(namespace, 2)


def test_what_its_user_suspended_is_not_removed(plane: ControlPlane, namespace: str) -> None:
    running(plane, namespace, "job")
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=STOPS, retention={"stopped": "0s"})
    harness.again()
    suspend(plane, namespace, yes=True)
    harness.later(days=100)
    assert passes(harness) == []
    assert uid(plane.api, "jobs", namespace, RUN)


def test_another_ledger_restores_by_the_note_on_the_object(plane: ControlPlane, namespace: str) -> None:
    """An admin's terminal has not the operator's ledger."""
    plane.api.create(objects.deployment(RUN, replicas=3), namespace)
    operator, terminal = (Harness(plane.keeper_kubeconfig(), namespace) for _ in range(2))
    assert operator.ask("root", "stop", f"deployment/{RUN}", attended=True).done
    reply = terminal.ask("root", "restore", f"deployment/{RUN}")
    assert "was restored and runs again" in reply.words
    found = plane.api.get("deployments", namespace, RUN)
    assert found is not None
    assert found["spec"]["replicas"] == 3
    assert STOPPED not in found["metadata"].get("annotations", {})
    plane.api.wait_pods(namespace, 3)  # so that none is made after it is scaled down
    plane.api.patch("deployments", namespace, RUN, {"spec": {"replicas": 0}}, subresource="scale")
    plane.until(lambda: not plane.api.list("pods", namespace), "its pods are gone")
    assert "it is not recorded that gpukeeper stopped it" in terminal.ask("root", "restore", f"deployment/{RUN}").words


def test_a_restored_pod_that_was_evicted_waits_and_is_not_called_running(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(unplaced(RUN), namespace)
    plane.api.patch("pods", namespace, RUN, {"status": {"phase": "Running"}}, subresource="status")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    reply = harness.ask("root", "stop", f"pod/{RUN}", attended=True)
    assert reply.done, reply.words
    plane.api.wait_gone("pods", namespace, RUN)
    words = harness.ask("root", "restore", f"pod/{RUN}").words
    assert "runs again" not in words
    assert "run `gpukeeper restore` again" in words
    found = plane.api.get("pods", namespace, RUN)
    assert found is not None
    assert found["spec"]["schedulingGates"] == [{"name": GATE}]
    assert harness.ask("root", "restore", f"pod/{RUN}").done
    assert "schedulingGates" not in (plane.api.get("pods", namespace, RUN) or {})["spec"]

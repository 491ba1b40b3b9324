"""Owners without `controller: true`, on a real API server with its garbage collector: what they own is kept while they
exist, whatever kind they are of, and goes by the policy when they are gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpukeeper.model.decision import Action, Verdict
from tests.real.kube import objects
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import ended_pod, unplaced
from tests.real.kube.harness import Harness
from tests.real.kube.test_rights import ALL

GROUP, PLURAL = "owners.example.com", "pipelines"


def tied(plane: ControlPlane, namespace: str, plural: str, name: str, *owners: Object) -> None:
    """Adds owners that do not control it. The garbage collector sees them too."""
    references = [
        {"apiVersion": one["apiVersion"], "kind": one["kind"], **{k: one["metadata"][k] for k in ("name", "uid")}}
        for one in owners
    ]
    plane.api.patch(plural, namespace, name, {"metadata": {"ownerReferences": references}})


def config(plane: ControlPlane, namespace: str, name: str = "settings") -> Object:
    made = plane.api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}, namespace)
    return {"apiVersion": "v1", "kind": "ConfigMap", **made}


def later(plane: ControlPlane, namespace: str, **how: Any) -> Harness:
    harness = Harness(plane.keeper_kubeconfig(), namespace, **how)
    harness.later(hours=3)
    return harness


@pytest.fixture
def pipelines(plane: ControlPlane) -> Iterator[None]:
    """A kind that gpukeeper does not know."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": PLURAL, "singular": "pipeline", "kind": "Pipeline", "listKind": "PipelineList"}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": spec,
    }
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    plane.api.must("POST", path, definition)
    plane.until(lambda: _established(plane, f"{path}/{PLURAL}.{GROUP}"), "the kind Pipeline is served")
    try:
        yield
    finally:
        plane.api.delete("customresourcedefinitions", None, f"{PLURAL}.{GROUP}")
        plane.api.wait_gone("customresourcedefinitions", None, f"{PLURAL}.{GROUP}")


def _established(plane: ControlPlane, path: str) -> bool:
    said = (plane.api.must("GET", path).get("status") or {}).get("conditions") or []  # null until the first is written
    return any(one["type"] == "Established" and one["status"] == "True" for one in said)


def test_a_finished_pod_is_kept_while_a_configmap_owns_it(plane: ControlPlane, namespace: str) -> None:
    owner = config(plane, namespace)
    for name in ("owned", "free"):
        ended_pod(plane.api, namespace, name)
    tied(plane, namespace, "pods", "owned", owner)
    harness = later(plane, namespace)
    kept = harness.decisions()["pod/owned"]
    assert (kept.action, kept.rule, kept.verdict) == (Action.KEEP, "target", Verdict.PROTECT)
    assert "its owner ConfigMap settings (v1) exists" in kept.reason
    harness.again()
    assert plane.api.get("pods", namespace, "owned") is not None
    assert plane.api.get("pods", namespace, "free") is None, "the same policy removes what nothing owns"


def test_a_finished_pod_is_kept_while_a_job_that_goes_on_owns_it(plane: ControlPlane, namespace: str) -> None:
    made = plane.api.create(objects.job("goes-on"), namespace)
    ended_pod(plane.api, namespace, "run")
    tied(plane, namespace, "pods", "run", {"apiVersion": "batch/v1", "kind": "Job", **made})
    harness = later(plane, namespace, classes={"cluster": {"never_started": "30d"}})
    assert "its owner Job goes-on (batch/v1) exists" in harness.decisions()["pod/run"].reason
    harness.again()
    assert plane.api.get("pods", namespace, "run") is not None


def test_a_finished_pod_is_kept_while_an_owner_of_an_unknown_kind_exists(
    plane: ControlPlane, namespace: str, pipelines: None
) -> None:
    made = {"apiVersion": f"{GROUP}/v1", "kind": "Pipeline", "metadata": {"name": "nightly"}}
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/{PLURAL}"
    owner = plane.api.must("POST", path, made)
    ended_pod(plane.api, namespace, "run")
    tied(plane, namespace, "pods", "run", owner, config(plane, namespace))
    harness = later(plane, namespace)
    assert "Pipeline nightly" in harness.decisions()["pod/run"].reason
    harness.again()
    assert plane.api.get("pods", namespace, "run") is not None


def test_an_owner_that_is_gone_does_not_keep(plane: ControlPlane, namespace: str) -> None:
    """The garbage collector would remove the pod as well, so it is paused here."""
    owner = config(plane, namespace)
    ended_pod(plane.api, namespace, "run")
    manager = plane.programs["kube-controller-manager"]
    manager.pause()
    try:
        gone = {**owner, "metadata": {**owner["metadata"], "uid": "00000000-0000-0000-0000-00000000000a"}}
        tied(plane, namespace, "pods", "run", gone)
        harness = later(plane, namespace)
        assert harness.decisions()["pod/run"].action is Action.REMOVE, "its namesake has another uid"
        assert len(harness.again().reclaimed) == 1
        assert plane.api.get("pods", namespace, "run") is None
    finally:
        manager.resume()


def test_an_owner_that_comes_between_the_plan_and_the_act_keeps(plane: ControlPlane, namespace: str) -> None:
    owner = config(plane, namespace)
    ended_pod(plane.api, namespace, "run")
    harness = later(plane, namespace)
    step = harness.step("pod/run")
    assert step.decision.action is Action.REMOVE
    tied(plane, namespace, "pods", "run", owner)
    closed = harness.take(step)
    assert "ConfigMap settings" in closed.reason
    assert plane.api.get("pods", namespace, "run") is not None


def test_an_owner_that_may_not_be_read_keeps_and_the_right_is_named(plane: ControlPlane, namespace: str) -> None:
    """With the rights that the examples give, which do not include ConfigMaps."""
    ended_pod(plane.api, namespace, "run")
    tied(plane, namespace, "pods", "run", config(plane, namespace))
    user = plane.new_user(ALL, namespace=namespace)
    harness = Harness(plane.kubeconfig(user), namespace)
    harness.later(hours=3)
    kept = harness.decisions()["pod/run"]
    assert (kept.action, kept.verdict) == (Action.KEEP, Verdict.UNKNOWN)
    assert "needs `get` on configmaps" in kept.reason
    harness.again()
    assert plane.api.get("pods", namespace, "run") is not None


def test_a_job_made_by_hand_from_a_cronjob_is_a_run(plane: ControlPlane, namespace: str) -> None:
    """`kubectl create job --from=cronjob/x` names the CronJob without `controller: true`."""
    job = objects.job("template")["spec"]
    cron = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "nightly"},
        "spec": {"schedule": "0 0 1 1 *", "suspend": True, "jobTemplate": {"spec": job}},
    }
    made = plane.api.must("POST", f"/apis/batch/v1/namespaces/{namespace}/cronjobs", cron)
    ended_pod(plane.api, namespace, "run")
    tied(plane, namespace, "pods", "run", {"apiVersion": "batch/v1", "kind": "CronJob", **made})
    harness = later(plane, namespace)
    assert len(harness.again().reclaimed) == 1
    assert plane.api.get("pods", namespace, "run") is None


def test_what_would_be_collected_with_it_while_it_lives_keeps_its_owner(plane: ControlPlane, namespace: str) -> None:
    ended = ended_pod(plane.api, namespace, "run")
    plane.api.create(unplaced("waits"), namespace)
    tied(plane, namespace, "pods", "waits", {"apiVersion": "v1", "kind": "Pod", **ended})
    harness = later(plane, namespace, classes={"cluster": {"never_started": "30d"}})
    harness.again()
    assert plane.api.get("pods", namespace, "run") is not None
    assert plane.api.get("pods", namespace, "waits") is not None

"""The admission policy on a real API server: the operator's service account has the rights of every tier, and may do
with them only what gpukeeper does. That gpukeeper can do everything it needs under it is tested by the rest of this
folder, whose keepers run as a user under the same policy (`keeper_kubeconfig`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.real.kube import admission, objects
from tests.real.kube.api import PATCHES, Api, Object, path_of
from tests.real.kube.control_plane import ControlPlane

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"
TIERS = ("observe", "reclaim", "stop", "sets", "restore", "finalizers")
NOTE = "gpukeeper.io/stopped"
QUEUE = "kueue.x-k8s.io/queue-name"
POD = "spec", "template", "spec"


@pytest.fixture
def operator(plane: ControlPlane, namespace: str) -> Iterator[Api]:
    """As the service account, with the rights of all tiers and under the policy, both as they are shipped."""
    user = f"system:serviceaccount:{namespace}:gpukeeper"
    token = plane.service_account(namespace, "gpukeeper")
    for tier in TIERS:
        role = next(iter(YAML(typ="safe").load_all(EXAMPLES / f"rbac-{tier}.yaml")))
        plane.grant(user, role["rules"])
    made = plane.api_with(token)
    admission.bind(plane.api, user, namespace)
    plane.until(lambda: admission.is_in_force(made, namespace), "the admission policy is in force")
    yield made
    admission.unbind(plane.api, namespace)


def whole(made: Object) -> Object:
    groups = {"Job": "batch/v1", "Deployment": "apps/v1", "Pod": "v1"}
    return {"apiVersion": groups[made["kind"]], **made}


def nested(path: tuple[str, ...], value: Any) -> Object:
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def container(**fields: Any) -> Object:
    return nested((*POD, "containers"), [{"name": "main", "image": objects.IMAGE, **fields}])


def refused(api: Api, what: str, namespace: str, name: str, body: object, *, kind: str = "merge") -> str:
    answer = api.call("PATCH", path_of(what, namespace, name), body, content_type=PATCHES[kind])
    assert answer.status == 403, answer.raw.decode()
    said = str(answer.json["message"])
    assert "ValidatingAdmissionPolicy" in said, said
    return said


ALLOWED = {
    "suspend a Job": ("jobs", nested(("spec", "suspend"), True)),
    "resume it": ("jobs", nested(("spec", "suspend"), False)),
    "note a stop": ("jobs", nested(("metadata", "annotations"), {NOTE: "{}"})),
    "remove the note": ("jobs", nested(("metadata", "annotations"), {NOTE: None})),
    "hold a Deployment": (
        "deployments",
        nested(("metadata", "annotations"), {"gpukeeper.io/hold-until": "2030-01-01"}),
    ),
    "announce on a pod": ("pods", nested(("metadata", "annotations"), {"gpukeeper.io/warned": "{}"})),
}


@pytest.mark.smoke
def test_it_may_do_what_gpukeeper_does(operator: Api, api: Api, namespace: str) -> None:
    for made in (objects.job("work"), objects.deployment("work"), objects.pod("work")):
        api.create(made, namespace)
    for words, (what, body) in ALLOWED.items():
        answer = operator.call("PATCH", path_of(what, namespace, "work"), body, content_type=PATCHES["merge"])
        assert answer.ok, (words, answer.raw.decode())
    operator.patch("deployments", namespace, "work", nested(("spec", "replicas"), 0), subresource="scale")
    found = api.get("deployments", namespace, "work")
    assert found is not None
    assert found["spec"]["replicas"] == 0


FORBIDDEN = {
    "another image": ("deployments", "strategic", container(image="other:1"), "no field of a spec"),
    "another command": ("deployments", "strategic", container(command=["sh"]), "no field of a spec"),
    "a variable": ("deployments", "strategic", container(env=[{"name": "A", "value": "b"}]), "no field of a spec"),
    "a service account": ("deployments", "merge", nested((*POD, "serviceAccountName"), "admin"), "no field of a spec"),
    "its host's network": ("deployments", "merge", nested((*POD, "hostNetwork"), True), "no field of a spec"),
    "replicas without scale": ("deployments", "merge", nested(("spec", "replicas"), 100), "no field of a spec"),
    "more completions": ("jobs", "merge", nested(("spec", "parallelism"), 9), "no field of a spec"),
    "a TTL": ("jobs", "merge", nested(("spec", "ttlSecondsAfterFinished"), 1), "no field of a spec"),
    "an image of a pod": ("pods", "strategic", container(image="other:1")["spec"]["template"], "no field of a spec"),
    "a label": ("jobs", "merge", nested(("metadata", "labels"), {"team": "b"}), "labels"),
    "a label of a pod": ("pods", "merge", nested(("metadata", "labels"), {"app": None}), "labels"),
    "a queue nobody noted": ("jobs", "merge", nested(("metadata", "labels"), {QUEUE: "fast"}), "labels"),
    "an annotation": ("jobs", "merge", nested(("metadata", "annotations"), {"team": "b"}), "its own annotations"),
    "the owner": ("jobs", "merge", nested(("metadata", "annotations"), {"gpukeeper.io/owner": "eve"}), "annotations"),
    "no annotation": ("pods", "merge", nested(("metadata", "annotations"), {"note": None}), "its own annotations"),
    "a finalizer": ("jobs", "merge", nested(("metadata", "finalizers"), ["test.io/keep"]), "only remove finalizers"),
    "no finalizer": ("pods", "merge", nested(("metadata", "finalizers"), None), "being deleted"),
    "an owner": (
        "jobs",
        "merge",
        nested(("metadata", "ownerReferences"), [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b"}]),
        "owner references",
    ),
}


@pytest.mark.smoke
def test_it_may_change_nothing_else(operator: Api, api: Api, namespace: str) -> None:
    """Each of them is accepted from an administrator, so that the policy alone refuses it."""
    pod = objects.pod("work", labels={"app": "a"}, annotations={"note": "mine"})
    pod["metadata"]["finalizers"] = ["test.io/keep"]
    for made in (objects.job("work"), objects.deployment("work"), pod):
        api.create(made, namespace)
    for words, (what, kind, body, why) in FORBIDDEN.items():
        assert why in refused(operator, what, namespace, "work", body, kind=kind), words
        trial = api.call(
            "PATCH", path_of(what, namespace, "work"), body, query={"dryRun": "All"}, content_type=PATCHES[kind]
        )
        assert trial.ok, (words, trial.raw.decode())
    api.patch("pods", namespace, "work", nested(("metadata", "finalizers"), None))


def test_it_may_remove_a_finalizer_from_a_deletion(operator: Api, api: Api, namespace: str) -> None:
    pod = objects.pod("work")
    pod["metadata"]["finalizers"] = ["test.io/a", "test.io/b"]
    api.create(pod, namespace)
    api.delete("pods", namespace, "work", grace=0)
    operator.patch("pods", namespace, "work", nested(("metadata", "finalizers"), ["test.io/b"]))
    refused(operator, "pods", namespace, "work", nested(("metadata", "annotations"), {"team": "b"}))
    operator.patch("pods", namespace, "work", nested(("metadata", "finalizers"), None))
    api.wait_gone("pods", namespace, "work")


def test_it_may_create_only_what_does_not_start(operator: Api, namespace: str) -> None:
    from_ = {"gpukeeper.io/restored-from": "a-uid"}
    gate = [{"name": "gpukeeper.io/restored"}]
    suspended, scaled = objects.job("job"), objects.deployment("set", replicas=0)
    suspended["spec"]["suspend"] = True
    gated = objects.pod("pod", schedulingGates=gate)
    for made in (suspended, scaled, gated):
        plural = made["kind"].lower() + "s"
        answer = operator.call("POST", path_of(plural, namespace), whole(made))
        assert (answer.status, "only what it restores" in answer.raw.decode()) == (403, True)
        made["metadata"]["annotations"] = from_
        running = json.loads(json.dumps(made))
        running["spec"] |= (
            {"suspend": False} if plural == "jobs" else {"replicas": 1} if plural == "deployments" else {}
        )
        running["spec"].pop("schedulingGates", None)
        answer = operator.call("POST", path_of(plural, namespace), whole(running))
        assert (answer.status, "only what it restores" in answer.raw.decode()) == (403, True), plural
        assert operator.call("POST", path_of(plural, namespace), whole(made)).ok, plural
    operator.patch("pods", namespace, "pod", [{"op": "remove", "path": "/spec/schedulingGates/0"}], kind="json")


def test_it_may_remove_only_its_own_gate(operator: Api, api: Api, namespace: str) -> None:
    gates = [{"name": "other.io/gate"}, {"name": "gpukeeper.io/restored"}]
    api.create(objects.pod("work", schedulingGates=gates), namespace)
    other = [{"op": "remove", "path": "/spec/schedulingGates/0"}]
    assert "its own scheduling gate" in refused(operator, "pods", namespace, "work", other, kind="json")
    selected = nested(("spec", "nodeSelector"), {"a": "b"})  # a gated pod may get one
    assert "no field of a spec" in refused(operator, "pods", namespace, "work", selected)
    operator.patch("pods", namespace, "work", [{"op": "remove", "path": "/spec/schedulingGates/1"}], kind="json")


def test_the_queue_of_its_note_is_the_only_label_it_may_set(operator: Api, api: Api, namespace: str) -> None:
    job = objects.job("work")
    job["metadata"]["annotations"] = {NOTE: '{"queue":"slow"}'}
    api.create(job, namespace)
    assert "labels" in refused(operator, "jobs", namespace, "work", nested(("metadata", "labels"), {QUEUE: "fast"}))
    operator.patch("jobs", namespace, "work", {"metadata": {"labels": {QUEUE: "slow"}, "annotations": {NOTE: None}}})


def test_it_may_not_write_in_kube_system(operator: Api, api: Api) -> None:
    api.create(
        {**objects.job("work-of-admission"), "spec": {**objects.job("x")["spec"], "suspend": True}}, "kube-system"
    )
    body = nested(("metadata", "annotations"), {NOTE: "{}"})
    assert "kube-system" in refused(operator, "jobs", "kube-system", "work-of-admission", body)
    api.delete("jobs", "kube-system", "work-of-admission", propagation="Background")


def test_others_are_not_concerned(plane: ControlPlane, operator: Api, api: Api, namespace: str) -> None:
    api.create(objects.deployment("work"), namespace)
    api.patch("deployments", namespace, "work", container(image="other:1"), kind="strategic")
    assert plane.api_with(plane.service_account(namespace, "other")).call("GET", "/version").ok


def test_the_policy_has_no_mistake_that_the_api_server_finds(operator: Api, api: Api, namespace: str) -> None:
    """It checks the types of the expressions, and reports them in the status; the controller manager writes it."""
    found = api.wait_for(
        "validatingadmissionpolicies",
        None,
        namespace,
        lambda one: one["status"].get("observedGeneration") == one["metadata"]["generation"],
    )
    assert not found["status"].get("typeChecking", {}).get("expressionWarnings"), found["status"]

"""A real API server takes every manifest of examples/kubernetes, to the last field, and lets their pods run where the
standard is "restricted"."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.config.load import load_text
from tests.real.kube.api import GROUPS, Api, path_of
from tests.real.kube.control_plane import ControlPlane

SIDECAR = Path(__file__).resolve().parents[3] / "examples" / "ray" / "kuberay-sidecar.yaml"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"
MANIFESTS = sorted(path for path in EXAMPLES.glob("*.yaml") if path.name != "alerts.yaml")
ELSEWHERE = {
    "PrometheusRule"
}  # of the Prometheus operator, which is not here; its content is compared with alerts.yaml
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
TEMPLATES = {"Deployment", "StatefulSet", "CronJob"}


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """Those that a plain cluster knows, in the order of the file."""
    for one in YAML(typ="safe").load_all(path):
        if one["kind"] not in ELSEWHERE:
            yield one


def placed(one: dict[str, Any], namespace: str) -> tuple[str, dict[str, Any]]:
    """The object as it would be in this namespace, and where it is sent."""
    made = copy.deepcopy(one)
    plural = GROUPS[made["apiVersion"]][made["kind"]]
    if "namespace" not in made["metadata"]:
        return path_of(plural), made
    made["metadata"]["namespace"] = namespace
    return path_of(plural, namespace), made


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_api_server_takes_it_to_the_last_field(path: Path, api: Api, namespace: str) -> None:
    sent = 0
    for one in documents(path):
        where, made = placed(one, namespace)
        answer = api.call("POST", where, made, query=STRICT)
        assert answer.ok, f"{path.name}: {made['kind']}: {answer.raw.decode()}"
        sent += 1
    assert sent or path.stem == "prometheusrule"


def test_a_field_that_does_not_exist_is_refused(api: Api, namespace: str) -> None:
    """What the test above relies on."""
    (deployment,) = [one for one in documents(EXAMPLES / "operator.yaml") if one["kind"] == "Deployment"]
    where, made = placed(deployment, namespace)
    made["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    assert api.call("POST", where, made, query=STRICT).status == 400


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_its_pods_may_run_in_a_restricted_namespace(path: Path, api: Api, new_namespace: Callable[[], str]) -> None:
    templates = [one for one in documents(path) if one["kind"] in TEMPLATES]
    if not templates:
        return
    namespace = new_namespace()
    api.patch(
        "namespaces", None, namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    api.create({"kind": "ServiceAccount", "metadata": {"name": "gpukeeper"}}, namespace)
    for one in templates:
        spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(spec["template"])}
        pod["metadata"]["name"] = "tried"
        claims = [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())]
        pod["spec"]["volumes"] += [{"name": name, "emptyDir": {}} for name in claims]
        answer = api.call("POST", path_of("pods", namespace), pod, query=STRICT)
        assert answer.ok, answer.raw.decode()


@pytest.mark.usefixtures("kwok_node")
def test_kuberay_makes_workers_with_the_sidecar(kuberay: ControlPlane, namespace: str) -> None:
    api = kuberay.api
    for one in documents(SIDECAR):
        where, made = placed(one, namespace)
        answer = api.call("POST", where, made, query={"fieldValidation": "Strict"})
        assert answer.ok, f"{made['kind']}: {answer.raw.decode()}"
    api.wait_pods(namespace, 3)
    workers = [one["spec"] for one in api.list("pods", namespace) if len(one["spec"]["containers"]) > 1]
    assert [[one["name"] for one in spec["containers"]] for spec in workers] == [["ray-worker", "gpukeeper"]] * 2
    for spec in workers:
        assert spec["shareProcessNamespace"] is True
        assert "/tmp" not in {one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}  # a volume is kept
        assert spec["containers"][1]["securityContext"]["capabilities"]["add"] == [
            "SYS_PTRACE",
            "DAC_OVERRIDE",
            "FOWNER",
        ]


def test_the_policy_of_the_sidecar_is_valid_and_deletes_nothing() -> None:
    (policy,) = [one["data"]["policy.yaml"] for one in documents(SIDECAR) if one["kind"] == "ConfigMap"]
    loaded = load_text(policy, "example")
    assert (loaded.policy.mode, loaded.warnings) == ("plan", ())

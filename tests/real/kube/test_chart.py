"""The Helm chart: what it renders and refuses, and installed, upgraded, rolled back and removed with the real helm on a
real API server; its pod run by a real kubelet."""

from __future__ import annotations

import json
import os
import shutil
import socket
import socketserver
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.clients.prometheus import parse_export
from gpukeeper.config.load import load_text
from gpukeeper.platforms.kubernetes.node_use import DEFAULT_FILES
from tests.engines import has_helm, has_image, has_kubelet, require
from tests.real.docker import fake_driver
from tests.real.image import acceptance_image as image
from tests.real.kube import admission
from tests.real.kube.api import Api
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.helm import CHART, Helm, packed
from tests.real.kube.real_node import RealNode, import_image

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "kubernetes"
TIERS = ("reclaim", "stop", "sets", "restore", "finalizers")
DEVICE_PLUGINS, RECORD = os.path.split(DEFAULT_FILES.record)
IMAGE = {"image": {"repository": "registry.lab/gpukeeper"}}
OPERATOR_IMAGE = "local/gpukeeper:1"
LOCAL = {"repository": "local/gpukeeper", "tag": "1", "pullPolicy": "Never"}
TEAM_A = {"namespaces": ["team-a"], "policy": {"scope": {"kubernetes": {"namespaces": ["team-a"]}}}}
ENFORCE = {"preset": "development", "mode": "enforce", "retention": {"succeeded": "0s"}, "schedule": {"every": "10s"}}


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    require("helm", has_helm())
    return Helm(tmp_path)


@pytest.fixture
def release(plane: ControlPlane, tmp_path: Path) -> Helm:
    require("helm", has_helm())
    return Helm(tmp_path, plane.kubeconfig())


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in YAML(typ="safe").load_all(path) if one is not None]


def rights(role: dict[str, Any]) -> set[tuple[str, ...]]:
    return {
        (verb, group, plural, *rule.get("resourceNames", ()))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        for verb in rule["verbs"]
    }


def roles(objects: list[dict[str, Any]], kind: str) -> dict[str, set[tuple[str, ...]]]:
    return {one["metadata"]["name"]: rights(one) for one in objects if one["kind"] == kind}


def kinds(objects: list[dict[str, Any]]) -> set[str]:
    return {one["kind"] for one in objects if "helm.sh/hook" not in one["metadata"].get("annotations", {})}


def of_kind(objects: list[dict[str, Any]], kind: str, hook: bool = False) -> dict[str, Any]:
    (found,) = [
        one
        for one in objects
        if one["kind"] == kind and ("helm.sh/hook" in one["metadata"].get("annotations", {})) == hook
    ]
    return found


@pytest.mark.smoke
def test_lint_finds_nothing(helm: Helm) -> None:
    said = helm.must("lint", "--strict", str(CHART), values=IMAGE)
    assert "0 chart(s) failed" in said


@pytest.mark.smoke
def test_by_default_it_only_reads_and_runs_dry(helm: Helm) -> None:
    objects = helm.rendered(IMAGE)
    assert set(roles(objects, "ClusterRole")) == {"gpukeeper-observe"}
    assert {right[0] for right in roles(objects, "ClusterRole")["gpukeeper-observe"]} == {"get", "list", "watch"}
    loaded = load_text(of_kind(objects, "ConfigMap")["data"]["policy.yaml"], "chart")
    assert (loaded.policy.mode, loaded.warnings) == ("plan", ())
    assert of_kind(objects, "PersistentVolumeClaim")["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_its_rights_and_alerts_are_those_of_the_plain_manifests(helm: Helm) -> None:
    objects = helm.rendered({**IMAGE, "rights": dict.fromkeys(TIERS, True), "metrics": {"rules": {"enabled": True}}})
    found = roles(objects, "ClusterRole")
    assert found == {
        f"gpukeeper-{tier}": roles(documents(EXAMPLES / f"rbac-{tier}.yaml"), "ClusterRole")[f"gpukeeper-{tier}"]
        for tier in ("observe", *TIERS)
    }
    operator = documents(EXAMPLES / "operator.yaml")
    assert roles(objects, "Role") == roles(operator, "Role")
    assert of_kind(objects, "PrometheusRule")["spec"] == documents(EXAMPLES / "prometheusrule.yaml")[0]["spec"]
    ours = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    plain = of_kind(operator, "Deployment")["spec"]["template"]["spec"]
    for name in ("securityContext", "terminationGracePeriodSeconds"):
        assert ours[name] == plain[name]
    for name in ("securityContext", "livenessProbe", "readinessProbe", "resources", "volumeMounts", "ports"):
        assert ours["containers"][0][name] == plain["containers"][0][name]


def test_in_named_namespaces_it_has_no_rights_on_the_cluster(helm: Helm) -> None:
    scope = {"scope": {"kubernetes": {"namespaces": ["team-a", "team-b"]}}}
    values = {**IMAGE, "namespaces": ["team-a", "team-b"], "rights": {"reclaim": True, "stop": True}, "policy": scope}
    objects = helm.rendered(values, namespace="team-a")
    assert not kinds(objects) & {"ClusterRole", "ClusterRoleBinding"}
    plain = roles(documents(EXAMPLES / "namespaced.yaml"), "Role")
    for namespace in ("team-a", "team-b"):
        there = roles([one for one in objects if one["metadata"].get("namespace") == namespace], "Role")
        for tier in ("observe", "reclaim", "stop"):
            expected = {
                tuple(namespace if word == "team-a" else word for word in right) for right in plain[f"gpukeeper-{tier}"]
            }
            assert there[f"gpukeeper-{tier}"] == expected


def test_what_it_may_write_is_limited_by_the_policy_of_the_plain_manifest(helm: Helm) -> None:
    """Wherever it may write; not where it only reads, and not outside its namespaces unless it is told."""
    kind, writes = "ValidatingAdmissionPolicy", {**IMAGE, "rights": {"stop": True}}
    objects = helm.rendered(writes, namespace="team")
    plain, binding = admission.admission_policy("system:serviceaccount:team:gpukeeper", "gpukeeper-writes")
    assert of_kind(objects, kind)["spec"] == plain["spec"]
    assert of_kind(objects, f"{kind}Binding")["spec"] == binding["spec"]
    for one in (of_kind(objects, kind), of_kind(objects, f"{kind}Binding")):
        assert one["metadata"]["name"] == "gpukeeper-writes"
    for values in (IMAGE, {**writes, "admissionPolicy": "never"}, {**writes, "mode": "agent"}, {**writes, **TEAM_A}):
        assert kind not in kinds(helm.rendered(values)), values
    assert kind in kinds(helm.rendered({**writes, **TEAM_A, "admissionPolicy": "always"}))


def test_a_standby_has_its_own_ledger_and_a_cron_job_no_lease(helm: Helm) -> None:
    standby = helm.rendered({**IMAGE, "replicas": 2})
    assert {"StatefulSet", "PodDisruptionBudget", "Service"} <= kinds(standby)
    assert not kinds(standby) & {"Deployment", "PersistentVolumeClaim"}
    assert of_kind(standby, "StatefulSet")["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "ledger"
    cron = helm.rendered({**IMAGE, "mode": "cronjob", "policy": {"mode": "enforce"}})
    found = of_kind(cron, "CronJob")["spec"]
    plain = documents(EXAMPLES / "cronjob.yaml")[-1]["spec"]
    for name in ("concurrencyPolicy", "successfulJobsHistoryLimit", "failedJobsHistoryLimit", "schedule", "timeZone"):
        assert found[name] == plain[name]
    assert not kinds(cron) & {"Deployment", "StatefulSet", "Role"}


def test_the_agent_has_no_rights_and_writes_nothing_on_its_node(helm: Helm) -> None:
    monitors = {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "rules")}
    more = {"mode": "agent", "networkPolicy": {"enabled": True}, "metrics": monitors, "agent": {"hostPaths": ["/tmp"]}}
    objects = helm.rendered({**IMAGE, **more})
    assert sorted(one["kind"] for one in objects) == [
        *("ConfigMap", "DaemonSet", "NetworkPolicy", "PodMonitor", "PrometheusRule", "Service", "ServiceMonitor"),
    ]
    assert [of_kind(objects, "PrometheusRule")["spec"]] == documents(ROOT / "deploy" / "prometheus" / "agent.yaml")
    pod = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert (pod["automountServiceAccountToken"], "hostNetwork" in pod) == (False, False)
    (container,) = pod["containers"]
    guard = container["securityContext"]
    assert guard["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
    assert (guard["readOnlyRootFilesystem"], guard.get("privileged")) == (True, None)
    of_the_node = {one["name"] for one in pod["volumes"] if "hostPath" in one}
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    assert {mounts[name]["readOnly"] for name in of_the_node} == {True}
    assert {mounts[name]["mountPath"] for name in of_the_node} == {DEVICE_PLUGINS, DEFAULT_FILES.logs, "/tmp"}
    assert "egress" not in of_kind(objects, "NetworkPolicy")["spec"]
    loaded = load_text(of_kind(objects, "ConfigMap")["data"]["policy.yaml"], "chart")
    assert (loaded.policy.mode, loaded.warnings) == ("plan", ())


def test_the_plain_manifest_of_the_agent_is_that_of_the_chart(helm: Helm) -> None:
    plain = documents(EXAMPLES / "agent.yaml")
    image = of_kind(plain, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"]
    repository, _, digest = image.partition("@")
    ours = helm.rendered({"image": {"repository": repository, "digest": digest}, "mode": "agent"})
    assert of_kind(ours, "DaemonSet")["spec"] == of_kind(plain, "DaemonSet")["spec"]
    policies = [load_text(of_kind(some, "ConfigMap")["data"]["policy.yaml"], "x").policy for some in (ours, plain)]
    assert policies[0].digest == policies[1].digest


def test_there_is_no_agent_unless_it_is_wanted(helm: Helm) -> None:
    assert "DaemonSet" not in kinds(helm.rendered(IMAGE))
    assert {"DaemonSet", "Deployment"} <= kinds(helm.rendered({**IMAGE, "agent": {"enabled": True}}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "repository"),
        ({**IMAGE, "right": {"reclaim": True}}, "right"),
        ({**IMAGE, "rights": {"delete": True}}, "delete"),
        ({**IMAGE, "mode": "daemon"}, "mode"),
        ({**IMAGE, "admissionPolicy": True}, "admissionPolicy"),
        ({"image": {"repository": "r", "digest": "sha256:12"}}, "digest"),
        ({**IMAGE, "mode": "cronjob"}, "apply --yes"),
        ({**IMAGE, "mode": "cronjob", "policy": {"mode": "enforce"}, "replicas": 2}, "replicas is for mode operator"),
        ({**IMAGE, "replicas": 2, "ledger": {"existingClaim": "mine"}}, "own ledger"),
        ({**IMAGE, "agent": {"policy": {"mode": "enforce"}}}, "never acts"),
        ({**IMAGE, "agent": {"capabilities": ["SYS_MODULE"]}}, "capabilities"),
        ({**IMAGE, "namespaces": ["team-a"]}, "Name the same namespaces there: [team-a]"),
        (
            {**IMAGE, "namespaces": ["a"], "policy": {"scope": {"kubernetes": {"namespaces": ["a", "b"]}}}},
            'has "b", where gpukeeper would have no rights',
        ),
    ],
)
def test_values_that_cannot_work_are_refused_before_anything_is_sent(
    helm: Helm, values: dict[str, Any], words: str
) -> None:
    assert words in helm.refused(values)


def test_installed_upgraded_rolled_back_and_removed(
    release: Helm, api: Api, new_namespace: Any, tmp_path: Path
) -> None:
    """From the package of one version to that of the next, as `make package` packs them. No node runs its pods here, so
    its check of the policy is off."""
    namespace = new_namespace("chart")
    name = f"gpukeeper-{namespace}"
    where = ("--namespace", namespace)
    before, chart = (str(packed(version, tmp_path)) for version in ("0.9.0", "1.0.1.dev5+g0a1b2c3"))
    values = {**IMAGE, "checkPolicy": False, "networkPolicy": {"enabled": True}}

    def running() -> tuple[str, str]:
        found = api.get("deployments", namespace, name)
        assert found is not None
        image = found["spec"]["template"]["spec"]["containers"][0]["image"]
        return found["metadata"]["labels"]["app.kubernetes.io/version"], image.rpartition(":")[2]

    try:
        release.must("install", name, before, *where, values=values)
        assert running() == ("0.9.0", "0.9.0")
        assert f"{name}-observe" in api.names("clusterroles")
        assert f"{name}-reclaim" not in api.names("clusterroles")
        release.must(
            *("upgrade", name, chart, *where),
            values={**values, "rights": {"reclaim": True}, "policy": {"mode": "enforce"}},
        )
        assert running() == ("1.0.1.dev5_g0a1b2c3", "1.0.1.dev5_g0a1b2c3")  # neither may have a plus sign
        assert f"{name}-reclaim" in api.names("clusterroles")
        assert "enforce" in api.get("configmaps", namespace, f"{name}-policy")["data"]["policy.yaml"]  # type: ignore[index]
        release.must("rollback", name, "1", *where)
        assert running() == ("0.9.0", "0.9.0")
        assert f"{name}-reclaim" not in api.names("clusterroles")
        assert "mode: plan" in api.get("configmaps", namespace, f"{name}-policy")["data"]["policy.yaml"]  # type: ignore[index]
    finally:
        release.run("uninstall", name, *where, "--wait")
    assert not [one for one in api.names("clusterroles") | api.names("clusterrolebindings") if name in one]
    for kind in ("deployments", "networkpolicies", "configmaps", "roles", "rolebindings", "serviceaccounts"):
        assert not [one for one in api.names(kind, namespace) if name in one], kind
    assert api.names("persistentvolumeclaims", namespace) == {f"{name}-ledger"}  # the ledger stays, as its notes say


def token(api: Api, plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """What the admission plugin ServiceAccount adds to pods; it is off on this control plane."""
    authority = plane.certificates.authority.read_text()
    api.create({"kind": "ConfigMap", "metadata": {"name": "authority"}, "data": {"ca.crt": authority}}, namespace)
    sources = [{"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "authority"}}]
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    field = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    return {
        "volumes": [{"name": "token", "projected": {"sources": [*sources, {"downwardAPI": {"items": [field]}}]}}],
        "volumeMounts": [{"name": "token", "mountPath": where, "readOnly": True}],
    }


class Forwarder(socketserver.ThreadingTCPServer):
    """Pods of the real kubelet reach the API server through the bridge: there is no kube-proxy."""

    def __init__(self, address: str, port: int) -> None:
        self.to = ("127.0.0.1", port)
        self.open: list[socket.socket] = []
        super().__init__((address, 0), _Connection)

    def end(self) -> None:
        self.shutdown()
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Forwarder)
        with socket.create_connection(self.server.to) as there:
            self.server.open += [self.request, there]
            back = threading.Thread(target=_copy, args=(there, self.request))
            back.start()
            _copy(self.request, there)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def forwarder(plane: ControlPlane, real_node: RealNode) -> Iterator[Forwarder]:
    made = Forwarder(real_node.address, plane.port)
    threading.Thread(target=made.serve_forever).start()
    yield made
    made.end()


@pytest.fixture
def node(plane: ControlPlane, real_node: RealNode) -> RealNode:
    """With the image of the operator, made by the steps of its Containerfile."""
    require("kubelet", has_kubelet())
    require("image", has_image())
    built = image.operator_root_filesystem()
    import_image(real_node, OPERATOR_IMAGE, built, image.settings(image.OPERATOR).config)
    return real_node


def test_the_operator_of_the_chart_reclaims_a_finished_job(
    release: Helm,
    api: Api,
    plane: ControlPlane,
    new_namespace: Any,
    node: RealNode,
    forwarder: Forwarder,
    tmp_path: Path,
) -> None:
    """In a namespace that enforces the restricted Pod Security Standard, with the rights of the chart and no others."""
    namespace, team = new_namespace("chart"), new_namespace("team")
    api.patch(
        "namespaces", None, namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    name, where = f"gpukeeper-{namespace}", ("--namespace", namespace)
    disk = tmp_path / "ledger"
    disk.mkdir()
    disk.chmod(0o700)
    os.chown(disk, 65532, 65532)
    volume = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(disk)},
        "claimRef": {"namespace": namespace, "name": f"{name}-ledger"},
    }
    api.create({"kind": "PersistentVolume", "metadata": {"name": f"ledger-{namespace}"}, "spec": volume})
    job = {
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {
            "backoffLimit": 0,
            "template": {
                "spec": {
                    **node.placement,
                    "restartPolicy": "Never",
                    "containers": [
                        {"name": "main", "image": "local/busybox:1", "command": ["/bin/sh", "-c", "echo done"]}
                    ],
                }
            },
        },
    }
    values: dict[str, Any] = {
        "image": LOCAL,
        "ledger": {"size": "1Gi"},
        "env": [
            {"name": "KUBERNETES_SERVICE_HOST", "value": "kubernetes.default.svc"},
            {"name": "KUBERNETES_SERVICE_PORT", "value": str(forwarder.server_address[1])},
        ],
        **token(api, plane, namespace),
        "podSpec": {**node.placement, "hostAliases": [{"ip": node.address, "hostnames": ["kubernetes.default.svc"]}]},
        "rights": {"reclaim": True},
        "policy": {**ENFORCE, "scope": {"kubernetes": {"namespaces": [team]}}},
    }
    try:
        wrong = {**values, "policy": {**values["policy"], "retention": {"on_success": "0s"}}}
        done = release.run("install", name, str(CHART), *where, "--timeout", "120s", values=wrong)
        assert done.returncode != 0, done.stdout
        assert api.names("deployments", namespace) == set()  # its check ran first, in a pod
        said = "".join(api.log(namespace, one) for one in api.names("pods", namespace) if "check-policy" in one)
        assert "on_success" in said, [one["message"] for one in api.list("events", namespace)]
        release.run("uninstall", name, *where)

        api.create(job, team)
        api.wait_for("jobs", team, "train", lambda one: bool(one and one["status"].get("succeeded")))
        done = release.run("install", name, str(CHART), *where, "--wait", "--timeout", "120s", values=values)
        said = [api.log(namespace, one) for one in api.names("pods", namespace)]
        assert done.returncode == 0, (done.stderr, said)
        api.wait_gone("jobs", team, "train")
    finally:
        release.run("uninstall", name, *where, "--wait")
        api.delete("persistentvolumes", None, f"ledger-{namespace}")
    assert (disk / "ledger.db").exists()


# The agent, with a driver of the test

DRIVER = """
import os, sys
if "gpukeeper.devices.driver.child" in sys.orig_argv:
    import fake_driver
    os.environ["HOME"] = os.path.dirname(fake_driver.__file__)
    fake_driver.main([fake_driver.CHILD])
    raise SystemExit
"""


def gpu(number: int, busy: float, pids: list[int]) -> dict[str, Any]:
    memory = {"memory_total_mib": 81920, "memory_used_mib": 600}
    named = {"index": number, "uuid": f"GPU-{number}", "minor": number, "name": "test", "pci": f"0000:0{number}:00.0"}
    return {**named, **memory, "busy": busy, "pids": pids, "advice": "none"}


def sleeper(node: RealNode, name: str) -> dict[str, Any]:
    container = {"name": "main", "image": "local/busybox:1", "command": ["/bin/sleep", "86400"]}
    spec = {**node.placement, "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": spec}


def published(api: Api, namespace: str, agent: str) -> dict[tuple[str, str, str], float]:
    """Of pods, by name, pod and UUID; empty while the agent does not answer."""
    address = (api.get("pods", namespace, agent) or {})["status"].get("podIP", "")
    try:
        with urllib.request.urlopen(f"http://{address}:9101/metrics", timeout=5) as page:
            found = list(parse_export(page.read().decode()))
    except OSError:
        return {}
    kept = [one for one in found if one.name.startswith("DCGM")]
    return {(one.name, one.labels["pod"], one.labels["UUID"]): one.value for one in kept}


def test_the_agent_publishes_which_pod_uses_which_gpu(
    release: Helm, api: Api, plane: ControlPlane, new_namespace: Any, node: RealNode, tmp_path: Path
) -> None:
    """Root in the image, on a real kubelet: the cgroups and names of pods are real; the driver is a program, and the
    kubelet's record of devices is written here, in its form."""
    namespace = new_namespace("agent")
    name, where = f"gpukeeper-{namespace}", ("--namespace", namespace)
    uids = {}
    for pod in ("trainer", "holder"):
        api.create(sleeper(node, pod), namespace)
        made = api.wait_for("pods", namespace, pod, lambda one: bool(one and one["status"].get("phase") == "Running"))
        uids[pod] = made["metadata"]["uid"]
    fake, devices = tmp_path / "fake", tmp_path / "devices"
    fake.mkdir()
    devices.mkdir()
    shutil.copy(fake_driver.__file__, fake)
    (fake / "sitecustomize.py").write_text(DRIVER)
    gpus = [gpu(0, 90.0, [*node.pids(uids["trainer"]), 1]), gpu(1, 0.0, []), gpu(2, 50.0, [])]
    (fake / "driver.json").write_text(json.dumps({"gpus": gpus, "instead": {}}))
    entry = {"ContainerName": "main", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"-1": ["GPU-1"]}}
    record = {"Data": {"PodDeviceEntries": [{"PodUID": uids["holder"], **entry}], "RegisteredDevices": {}}}
    (devices / RECORD).write_text(json.dumps({**record, "Checksum": 1}))
    (devices / RECORD).chmod(0o600)
    agent = {
        "hostPaths": [str(fake)],
        "kubelet": {"devicePlugins": str(devices), "podLogs": f"{node.folder}/logs"},
        "env": [{"name": "PYTHONPATH", "value": str(fake)}],
        "podSpec": node.placement,
    }
    values = {"mode": "agent", "image": LOCAL, "agent": agent}
    try:
        done = release.run("install", name, str(CHART), *where, "--wait", "--timeout", "120s", values=values)
        (pod,) = api.names("pods", namespace) - set(uids)
        assert done.returncode == 0, (done.stderr, api.log(namespace, pod))
        plane.until(lambda: bool(published(api, namespace, pod)), "the agent publishes series")
        found = published(api, namespace, pod)
        assert {key[1:] for key in found} == {("trainer", "GPU-0"), ("holder", "GPU-1")}, api.log(namespace, pod)
        assert found["DCGM_FI_PROF_GR_ENGINE_ACTIVE", "trainer", "GPU-0"] == pytest.approx(0.9)
        assert found["DCGM_FI_PROF_GR_ENGINE_ACTIVE", "holder", "GPU-1"] == 0
    finally:
        release.run("uninstall", name, *where, "--wait")

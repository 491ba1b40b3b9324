"""`gpukeeper accept --on kubernetes` on real nodes: pods of the acceptance image run real probes on the CPU.

Launched and collected by the command, on the real API server; nothing is left. The files of
examples/acceptance-on-kubernetes for several nodes, applied without the launcher, are one run. C1.2, C3.1, C3.2, C3.4
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.acceptance.launchers.kubernetes import objects
from tests.engines import has_image, has_kubelet, has_ray, require
from tests.real.docker import kernel
from tests.real.image import acceptance_image as image
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.real_node import RealNode
from tests.real.kube.test_examples import placed
from tests.real.launch.beds import KINDS
from tests.real.launch.kubelets import RUNTIME, start_kubelets
from tests.real.launch.test_kubernetes_examples import FOLDER
from tests.real.ray.clusters import NEWEST, folder_of

PROGRAM = Path(sys.executable).with_name("gpukeeper")
INCONCLUSIVE = 5  # no GPU was tested
LONGEST_S = 500
FEW = ("--set", "group.growing=false", "--set", "group.search=false")


@pytest.fixture(scope="module")
def kubelets(the_plane: ControlPlane) -> list[RealNode]:
    require("kubelet", has_kubelet())
    require("image", has_image())
    return start_kubelets(the_plane, 4)


@dataclass(frozen=True)
class Shell:
    """Of a user who may do everything in the cluster."""

    plane: ControlPlane
    namespace: str
    home: Path

    def start(self, *words: str, machine: str = "laptop") -> subprocess.Popen[str]:
        """`machine`: where the command runs; each has a state of its own."""
        state = self.home / machine
        state.mkdir(mode=0o700, exist_ok=True)
        config = str(self.plane.kubeconfig(namespace=self.namespace))
        env = {"PATH": os.environ["PATH"], "HOME": str(state), "KUBECONFIG": config, "GPUKEEPER_STATE": str(state)}
        pipe = subprocess.PIPE
        return subprocess.Popen([str(PROGRAM), "accept", *words], env=env, stdout=pipe, stderr=pipe, text=True)

    def launch(self, form: str, nodes: Sequence[RealNode], *words: str) -> subprocess.Popen[str]:
        options = ("pull-policy=Never", f"runtime-class={RUNTIME}", "shm=256Mi")
        return self.start(
            *("--on", "kubernetes", "--as", form, "--nodes", ",".join(one.name for one in nodes), "--json"),
            *("--image", image.NAME, "--timeout", "8m", "--owner", "ann"),
            *(word for one in options for word in ("--option", one)),
            *("--device", "cpu", "--check", "environment,exact", *words),
        )

    def left(self) -> list[str]:
        return [f"{kind}/{name}" for kind in KINDS for name in self.plane.api.names(kind, self.namespace)]


@pytest.fixture
def shell(plane: ControlPlane, namespace: str, tmp_path: Path) -> Shell:
    return Shell(plane, namespace, tmp_path)


def document(process: subprocess.Popen[str], code: int = INCONCLUSIVE) -> dict[str, Any]:
    """Of a run that came to its end."""
    try:
        out, err = process.communicate(timeout=LONGEST_S)
    finally:
        process.kill()
    assert process.returncode == code, err + out[-4000:]
    found: dict[str, Any] = json.loads(out)
    return found


def reports(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """As the nodes sent them, by node."""
    files = Path(found["report_folder"]).glob("nodes/*/report.json")
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def passed(report: dict[str, Any]) -> set[str]:
    return {one["check"] for one in report["findings"] if one["verdict"] == "PASS"}


def is_one_run(sent: dict[str, dict[str, Any]], count: int) -> None:
    """Every node has the same report of the group, in which every rank has passed."""
    assert len(sent) == count
    group = next(iter(sent.values()))["group"]
    assert all(one["group"] == group for one in sent.values())
    assert (group["size"], group["verdict"]) == (count, "PASS"), group["reason"]
    assert [one["verdict"] for one in group["ranks"]] == ["PASS"] * count
    assert {(one["probe"], len(one["nodes"])) for one in group["jobs"]} >= {("collectives", count), ("ddp", count)}


def test_a_job_on_each_of_two_nodes_reports_to_any_machine(shell: Shell, kubelets: list[RealNode]) -> None:
    """Alone and together. The reports are in the cluster: another machine collects the same and removes the run."""
    nodes = kubelets[:2]
    first = document(shell.launch("job", nodes, "--together", "--keep-objects", *FEW))
    sent = reports(first)
    is_one_run(sent, 2)
    for node in nodes:
        report = sent[node.name]
        assert "exact" in passed(report)
        assert (report["node"], report["device"]) == (node.name, "cpu")
        assert report["machine"]["environment"]["containerized"] is True
    pods = shell.plane.api.list("pods", shell.namespace)
    ended = [one["status"]["containerStatuses"][0]["state"]["terminated"] for one in pods]
    assert [json.loads(one["message"])["verdict"] for one in ended] == ["INCONCLUSIVE"] * 2
    assert {one["exitCode"] for one in ended} == {INCONCLUSIVE}
    again = document(shell.start("remove", first["run"], "--on", "kubernetes", "--json", machine="another"))
    assert again["report_folder"] != first["report_folder"]
    assert reports(again) == sent
    assert shell.left() == []


def test_four_pods_with_an_index_are_one_run(shell: Shell, kubelets: list[RealNode]) -> None:
    """They meet by the name of the first one, which is that of a pod of a headless Service. The files of older kits
    come back: of all nodes from the one with rank 0."""
    found = document(shell.launch("indexed-job", kubelets, "--together", "--legacy", *FEW))
    is_one_run(reports(found), 4)
    nodes = Path(found["report_folder"]) / "nodes"
    assert {one.parent.name for one in nodes.glob("*/summary.json")} == {one.name for one in kubelets}
    (result,) = [json.loads(one.read_text()) for one in nodes.glob("*/ddp_tests_result.json")]
    assert (result["world"], result["ok"]) == (4, True)
    assert shell.left() == []


def apply(shell: Shell, documents: Iterable[dict[str, Any]]) -> None:
    for one in documents:
        where, made = placed(one, shell.namespace)
        answer = shell.plane.api.call("POST", where, made, query={"fieldValidation": "Strict"})
        assert answer.ok, answer.raw.decode()


def adapted(name: str, nodes: list[RealNode]) -> list[dict[str, Any]]:
    """The file, with what its README tells users to change, and less work: on the CPU."""
    text = (FOLDER / f"{name}.yaml").read_text().replace("registry.example/gpukeeper-accept:1", image.NAME)
    for number, node in enumerate(nodes, start=1):
        text = text.replace(f"gpu-{number}", node.name)
    for old, new in (
        ("nvidia.com/gpu: 8", "nvidia.com/gpu: 1"),
        ("sizeLimit: 16Gi", "sizeLimit: 256Mi"),
        ("restartPolicy: ", f"runtimeClassName: {RUNTIME}\n      restartPolicy: "),
        ("terminationMessagePath", "imagePullPolicy: Never\n          terminationMessagePath"),
    ):
        assert old in text
        text = text.replace(old, new)
    documents = list(YAML(typ="safe").load_all(text))
    for one in documents:
        if one["kind"] != "Service":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            container["command"] += ["--device", "cpu", "--check", "environment,exact"]
            container["command"] += ["--set", "group.growing=false", "--set", "group.search=false"]
    return documents


def reported(shell: Shell, run: str, count: int) -> None:
    """Every pod of the run has ended or, if its container stays to be collected, is ready."""

    def done() -> bool:
        pods = shell.plane.api.list("pods", shell.namespace, labels=f"gpukeeper.io/run={run}")
        states = [
            (pod["spec"]["restartPolicy"], one) for pod in pods for one in pod["status"].get("containerStatuses", ())
        ]
        ended = [one["ready"] if policy == "Always" else "terminated" in one["state"] for policy, one in states]
        return len(ended) == count and all(ended)

    shell.plane.until(done, f"{count} pods of {run} have reported", 300)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["two-nodes", "statefulset"])
def test_an_example_for_several_nodes_is_one_run(shell: Shell, kubelets: list[RealNode], name: str) -> None:
    """Applied by a user; `accept fetch` collects its reports, `accept remove` removes it."""
    nodes = kubelets[:2]
    apply(shell, adapted(name, nodes))
    reported(shell, name, 2)
    sent = reports(document(shell.start("fetch", name, "--on", "kubernetes", "--json")))
    assert set(sent) == {one.name for one in nodes}
    is_one_run(sent, 2)
    document(shell.start("remove", name, "--on", "kubernetes", "--json"))
    assert shell.left() == []


def test_a_container_that_was_killed_is_started_again_and_reports(shell: Shell, kubelets: list[RealNode]) -> None:
    node, api = kubelets[0], shell.plane.api
    running = shell.launch("daemonset", [node])

    def computing() -> list[int]:
        pods = api.list("pods", shell.namespace, labels=objects.OF_RUNS)
        pids = [pid for one in pods for pid in node.pids(one["metadata"]["uid"])]
        return [pid for pid in pids if "--report-to-log" in kernel.read(pid, "cmdline").split("\0")]

    def restarts() -> int:
        pods = api.list("pods", shell.namespace, labels=objects.OF_RUNS)
        return sum(status["restartCount"] for one in pods for status in one["status"].get("containerStatuses", ()))

    try:
        os.kill(shell.plane.until(computing, "its program runs")[0], signal.SIGKILL)
        shell.plane.until(restarts, "its container was started again")
    except BaseException:
        running.kill()
        raise
    found = document(running)
    assert "exact" in passed(reports(found)[node.name])
    assert shell.left() == []


def ray_group(node: str, port: int, **params: str) -> dict[str, Any]:
    """One pod with Ray on that node. `port`: what listens when it is ready. Ray itself is mounted from this machine."""
    ray = folder_of(NEWEST)
    mounted = {"ray": ray, "python": Path(sys.base_prefix)}
    container = {
        "name": "ray",
        "image": image.NAME,
        "imagePullPolicy": "Never",
        "env": [{"name": "PATH", "value": f"{ray / 'bin'}:/usr/local/bin:/usr/bin:/bin"}],
        "securityContext": {"runAsUser": 0},
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        "livenessProbe": {"tcpSocket": {"port": port}, "initialDelaySeconds": 300},
        "volumeMounts": [{"name": name, "mountPath": str(path), "readOnly": True} for name, path in mounted.items()]
        + [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes: list[Object] = [{"name": name, "hostPath": {"path": str(path)}} for name, path in mounted.items()]
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}})
    pod = {"nodeName": node, "runtimeClassName": RUNTIME, "containers": [container], "volumes": volumes}
    return {
        "rayStartParams": {"num-gpus": "2", "num-cpus": "1", "object-store-memory": "80000000", **params},
        "template": {"spec": pod},
    }


@pytest.mark.usefixtures("kuberay")
def test_the_nodes_of_a_cluster_made_by_kuberay_are_accepted(shell: Shell, kubelets: list[RealNode]) -> None:
    """`--on ray`: Ray is in pods of the acceptance image."""
    require("ray", has_ray(NEWEST))
    api, namespace = shell.plane.api, shell.namespace
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
    first, second = (node.name for node in kubelets[:2])
    worker = {"groupName": "gpus", "replicas": 1, "minReplicas": 1, "maxReplicas": 1}
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "train"},
        "spec": {
            "headGroupSpec": ray_group(first, 8265, **{"dashboard-host": "0.0.0.0"}),
            "workerGroupSpecs": [{**worker, **ray_group(second, 8080)}],
        },
    }
    api.must("POST", path, cluster)

    def ready() -> list[str]:
        pods = api.list("pods", namespace, labels="ray.io/cluster=train")
        is_ready = [
            any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
            for pod in pods
        ]
        heads = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "head"]
        return [pod["status"]["podIP"] for pod in heads] if is_ready == [True, True] else []

    (address,) = shell.plane.until(ready, "both pods of the cluster are ready", 180)
    found = document(
        shell.start(
            *(
                "--on",
                "ray",
                "--json",
                "--timeout",
                "8m",
                "--owner",
                "ann",
                "--device",
                "cpu",
                "--check",
                "exact",
                "--python",
                "/usr/bin/python3",
            ),
            *("--option", f"address=http://{address}:8265", "--option", "program=/usr/local/bin/gpukeeper"),
            *("--option", f"python={folder_of(NEWEST) / 'bin/python'}"),
        )
    )
    sent = reports(found)
    assert len(sent) == 2
    for report in sent.values():
        assert "exact" in passed(report), [one["reason"] for one in report["findings"]]
    api.must("DELETE", f"{path}/train")
    shell.plane.until(lambda: api.names("pods", namespace) == set(), "its pods are gone", 120)

"""Manifests that a user applied, without the launcher, on real nodes: `accept fetch` collects, `remove` removes.

The files of examples/acceptance-on-kubernetes for several nodes are one run, and a manifest for a label needs neither
the names of nodes nor an image with gpukeeper. C3.1, C3.2, C3.4, C4.1
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.real.image import acceptance_image as image
from tests.real.kube.real_node import RealNode, import_image
from tests.real.kube.test_examples import STRICT, placed
from tests.real.launch.kubelets import RUNTIME
from tests.real.launch.test_kubernetes_examples import FOLDER
from tests.real.launch.test_kubernetes_kubelet import Shell, document, is_one_run, kubelets, passed, reports, shell

__all__ = ["kubelets", "shell"]
PLAIN = "local/python:1"  # Debian with Python; PyTorch is mounted, as if it were in it, and gpukeeper is not there


def apply(shell: Shell, documents: Iterable[dict[str, Any]]) -> None:
    for one in documents:
        where, made = placed(one, shell.namespace)
        answer = shell.plane.api.call("POST", where, made, query=STRICT)
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
    """Every pod of the run has written its termination message, or has ended."""

    def done() -> bool:
        pods = shell.plane.api.list("pods", shell.namespace, labels=f"gpukeeper.io/run={run}")
        states = [one for pod in pods for one in pod["status"].get("containerStatuses", ())]
        return len([one for one in states if one.get("ready") or "terminated" in one["state"]]) == count

    shell.plane.until(done, f"{count} pods of {run} have reported", 300)


@pytest.mark.parametrize("name", ["two-nodes", "statefulset"])
def test_an_example_for_several_nodes_is_one_run(shell: Shell, kubelets: list[RealNode], name: str) -> None:
    nodes = kubelets[:2]
    apply(shell, adapted(name, nodes))
    reported(shell, name, 2)
    sent = reports(document(shell.start("fetch", name, "--on", "kubernetes", "--json")))
    assert set(sent) == {one.name for one in nodes}
    is_one_run(sent, 2)
    document(shell.start("remove", name, "--on", "kubernetes", "--json"))
    assert shell.left() == []


def test_every_node_with_a_label_from_an_image_without_gpukeeper(
    shell: Shell, kubelets: list[RealNode], tmp_path: Path
) -> None:
    """The program is in ConfigMaps; the manifest names a label; its pods are found and removed by the id of the run."""
    nodes, base = kubelets[:2], image.folder() / "base.tar"
    for node in nodes:
        import_image(node, PLAIN, base, {"Env": [image.PATH]})
        shell.plane.api.patch("nodes", None, node.name, {"metadata": {"labels": {"test/gpus": shell.namespace}}})
    made = [sys.executable, str(image.STEPS / "program.py"), str(image.folder() / "context"), str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True)
    apply(shell, YAML(typ="safe").load_all(tmp_path / "gpukeeper-program.yaml"))
    options = ("pull-policy=Never", f"runtime-class={RUNTIME}", "shm=256Mi", "program=gpukeeper-program")
    rendered = shell.start(
        *("--on", "kubernetes", "--as", "daemonset", "--nodes", f"test/gpus={shell.namespace}", "--render"),
        *("--gpus-per-node", "1", "--image", PLAIN, "--device", "cpu", "--check", "environment,exact"),
        *(word for one in options for word in ("--option", one)),
    )
    out, err = rendered.communicate(timeout=60)
    assert rendered.returncode == 0, err
    manifests = list(YAML(typ="safe").load_all(out))
    assert not [node.name for node in nodes if node.name in out]
    apply(shell, manifests)
    run = manifests[0]["metadata"]["labels"]["gpukeeper.io/run"]
    reported(shell, run, 2)
    sent = reports(document(shell.start("remove", run, "--on", "kubernetes", "--json")))
    assert set(sent) == {one.name for one in nodes}
    assert all("exact" in passed(one) for one in sent.values())
    assert shell.left() == []

"""`gpukeeper accept preflight` on a real API server: planted problems, a login that may only read, and a trial that
leaves nothing behind, also when it is interrupted or killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests import forked
from tests.real.kube.api import Api
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.nodes import GPU
from tests.real.kube.real_node import RealNode

PROGRAM = Path(sys.executable).with_name("gpukeeper")
ROLE = Path(__file__).resolve().parents[3] / "examples" / "kubernetes" / "rbac-preflight.yaml"
FAILED, INTERRUPTED = 4, 130
TRIALS = "gpukeeper.io/trial"


class Shell:
    def __init__(self, home: Path, kubeconfig: Path, namespace: str) -> None:
        self.env = {**forked.environment(), "HOME": str(home), "KUBECONFIG": str(kubeconfig), "LOGNAME": "ann"}
        self.namespace = namespace

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [str(PROGRAM), "accept", "preflight", "--on", "kubernetes", "--namespace", self.namespace, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def findings(self, *words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        """The exit code, and the findings by code."""
        whole = ["accept", "preflight", "--on", "kubernetes", "--namespace", self.namespace, *words, "--json"]
        code, out, err = forked.run("gpukeeper", whole, self.env)
        assert out, err
        found: dict[str, list[dict[str, Any]]] = {}
        for one in json.loads(out)["findings"]:
            found.setdefault(one["code"], []).append(one)
        return code, found


@pytest.fixture
def shell(plane: ControlPlane, namespace: str, tmp_path: Path) -> Shell:
    return Shell(tmp_path, plane.kubeconfig(), namespace)


def verdicts(found: dict[str, list[dict[str, Any]]], code: str) -> list[str]:
    return [one["verdict"] for one in found.get(code, [])]


def test_planted_problems_are_found_by_a_login_that_may_only_read(
    plane: ControlPlane, api: Api, namespace: str, kwok_node: str, tmp_path: Path
) -> None:
    role = next(one for one in YAML(typ="safe").load_all(ROLE) if one["kind"] == "ClusterRole")
    reader = Shell(tmp_path, plane.kubeconfig(plane.new_user(role["rules"])), namespace)
    api.patch("nodes", None, kwok_node, {"spec": {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}})
    quota = {"kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": {f"requests.{GPU}": "4"}}}
    api.create(quota, namespace)
    limit = {"type": "Container", "default": {"memory": "512Mi"}}
    api.create({"kind": "LimitRange", "metadata": {"name": "tight"}, "spec": {"limits": [limit]}}, namespace)
    plane.until(lambda: (api.get("resourcequotas", namespace, "small") or {})["status"].get("hard"), "it is counted")

    code, found = reader.findings("--nodes", kwok_node, "--image", "accept:1")

    assert code == FAILED
    assert verdicts(found, "gpu-nodes") == ["PASS"]
    assert '{key: team, operator: Equal, value: "a", effect: NoSchedule}' in found["taints"][0]["message"]
    (short,) = found["quota"]
    assert short["message"].startswith(f"ResourceQuota small: requests.{GPU} is limited to 4, 0 in use")
    assert verdicts(found, "limit-range") == ["FAIL"]
    assert {"may not create jobs.batch", "may not create pods"} <= {
        one["message"].partition(" in namespace")[0] for one in found["rights"]
    }
    unread = {code for code, some in found.items() for one in some if one["verdict"] == "INCONCLUSIVE"}
    assert unread == {"image", "drivers"}  # what only a trial shows; everything else could be read

    # The printed command fixes it.
    patch = json.loads(short["fix"][0].partition(" -p ")[2].strip("'"))
    api.patch("resourcequotas", namespace, "small", patch)
    assert verdicts(reader.findings("--nodes", kwok_node)[1], "quota") == ["PASS"]


def test_what_a_login_may_not_read_is_never_fine(
    plane: ControlPlane, namespace: str, kwok_node: str, tmp_path: Path
) -> None:
    blind = Shell(tmp_path, plane.kubeconfig(plane.new_user()), namespace)
    code, found = blind.findings("--nodes", kwok_node)
    assert code == FAILED  # it may ask what it may do, and it may do nothing
    for one in ("gpu-nodes", "device-plugin", "gpus-in-use", "quota", "limit-range", "namespace"):
        assert verdicts(found, one) == ["INCONCLUSIVE"], one
    assert "PASS" not in {
        verdict for code in found if code not in ("cluster", "client") for verdict in verdicts(found, code)
    }


def test_a_trial_on_a_real_node_reports_what_is_there_and_is_removed(
    shell: Shell, api: Api, namespace: str, real_node: RealNode
) -> None:
    words = ("--nodes", real_node.name, "--trial-on", real_node.name, "--image", "local/busybox:1")
    code, found = shell.findings(*words, "--trial-within", "90s")
    assert code == FAILED, found  # the image has neither gpukeeper nor a GPU
    assert verdicts(found, "trial") == ["PASS"], found["trial"]
    (facts,) = [one["message"] for one in found["trial-node"] if one["verdict"] == "PASS"]
    assert "user 10001, capabilities 0000000000000000" in facts
    assert "cpus " in facts
    assert "eth0" in found["trial-network"][0]["message"]
    assert verdicts(found, "trial-gpu") == ["FAIL"]
    assert api.list("pods", namespace) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_trial_removes_its_pod(
    shell: Shell, plane: ControlPlane, api: Api, namespace: str, kwok_node: str, number: signal.Signals
) -> None:
    process = shell.start("--trial-on", kwok_node, "--image", "accept:1")
    plane.until(lambda: api.list("pods", namespace, labels=TRIALS), "the trial runs")
    process.send_signal(number)
    process.communicate(timeout=90)
    assert process.returncode == INTERRUPTED
    assert api.list("pods", namespace) == []


def test_a_killed_trial_is_named_and_removed_by_the_next_one(
    shell: Shell, plane: ControlPlane, api: Api, namespace: str, kwok_node: str
) -> None:
    process = shell.start("--trial-on", kwok_node, "--image", "accept:1")
    (left,) = plane.until(lambda: api.list("pods", namespace, labels=TRIALS), "the trial runs")
    process.kill()
    process.communicate(timeout=30)
    assert left["spec"]["activeDeadlineSeconds"] == 360
    api.wait_pods(namespace, 1)
    words = ("--trial-on", kwok_node, "--image", "accept:1", "--trial-within", "1s")
    name = left["metadata"]["name"]
    assert shell.findings(*words)[1]["trial-left"][0]["fix"] == [f"kubectl -n {namespace} delete pod {name}"]
    plane.finish_pod(namespace, left["metadata"]["name"], exit_code=1)
    assert verdicts(shell.findings(*words)[1], "trial-left") == ["PASS"]
    assert api.list("pods", namespace) == []


def test_a_trial_that_no_node_takes_says_why(
    shell: Shell, api: Api, new_namespace: Callable[[], str], namespace: str, kwok_node: str
) -> None:
    code, found = shell.findings("--trial-on", "no-such-node", "--image", "accept:1", "--trial-within", "3s")
    assert code == FAILED
    assert "Unschedulable" in found["trial"][0]["message"]
    assert api.list("pods", namespace) == []

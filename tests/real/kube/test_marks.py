"""`gpukeeper accept mark` and `gpukeeper node quarantine|return` as commands, with exactly the rights of the example:
what the API server and the scheduler then do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ruamel.yaml import YAML

from gpukeeper.acceptance.reports.store import ReportFolder, folder_name, load_file
from gpukeeper.clients.kubernetes.api import NODES
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Node
from gpukeeper.model.gpu import Grade
from gpukeeper.wiring.kubernetes import cluster_api
from tests import forked
from tests.real.kube.api import Api, condition
from tests.real.kube.control_plane import ControlPlane

PROGRAM = Path(sys.executable).with_name("gpukeeper")
RIGHTS = Path(__file__).parents[3] / "examples" / "kubernetes" / "rbac-mark.yaml"
EXAMPLE = RIGHTS.parents[1] / "acceptance" / "h200-quick" / "report.json"
NOW = datetime.now(UTC).replace(microsecond=0)
BEFORE = NOW - timedelta(hours=1)
TAINT, QUARANTINE = "gpukeeper.io/acceptance-failed", "gpukeeper.io/quarantine"


@pytest.fixture
def nodes(plane: ControlPlane, namespace: str) -> Iterator[list[str]]:
    names = [f"node-{namespace}-{index}" for index in range(3)]
    try:
        for name in names:
            plane.gpu_node(name)
        yield names
    finally:
        plane.healthy()
        for name in names:
            plane.remove_node(name)


@pytest.fixture
def user(plane: ControlPlane) -> str:
    """With the rights of the example and no others."""
    parts = list(YAML(typ="safe").load_all(RIGHTS.read_text()))
    (everywhere,) = [one for one in parts if one["kind"] == "ClusterRole"]
    user = plane.new_user(everywhere["rules"])
    (role,) = [one for one in parts if one["kind"] == "Role"]
    plane.grant(user, role["rules"], namespace=role["metadata"]["namespace"])
    return user


@pytest.fixture
def environ(plane: ControlPlane, user: str, tmp_path: Path) -> dict[str, str]:
    return {
        **forked.environment(),
        "HOME": str(tmp_path),
        "GPUKEEPER_STATE": str(tmp_path / "state"),
        "KUBECONFIG": str(plane.kubeconfig(user)),
    }


@pytest.fixture
def command(api: Api, environ: dict[str, str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        limit = ["--most", str(out(api) + 1)] if words[1] in ("mark", "quarantine") else []
        whole = [*words, *limit, "--on", "kubernetes", "--json"]
        code, printed, messages = forked.run("gpukeeper", whole, environ)
        assert printed, messages
        return code, json.loads(printed)

    return run


@pytest.fixture
def mark(command: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code, document = command("accept", "mark", *words, "--taint", "--report-dir", str(tmp_path))
        assert document["schema"] == "gpukeeper/accept-mark/v1"
        return code, document

    return run


def write(folder: Path, run: str, verdicts: dict[str, Grade], at: datetime, **fields: Any) -> None:
    """Reports of a real H200. A verdict is computed from findings when it is read: a failure needs one that failed."""
    measured = load_file(EXAMPLE)
    first = next(one for one in measured.findings if one.verdict is Grade.PASS and one.gpu is not None)
    failed = msgspec.structs.replace(first, verdict=Grade.FAIL, code="planted", message="planted")
    for node, verdict in verdicts.items():
        findings = [failed if one is first and verdict is Grade.FAIL else one for one in measured.findings]
        report = msgspec.structs.replace(
            measured,
            run=run,
            node=node,
            machine=msgspec.structs.replace(measured.machine, node=node),
            started=at - (measured.ended - measured.started),
            ended=at,
            verdict=verdict,
            findings=tuple(findings),
            **fields,
        )
        ReportFolder(folder).write(report, name=folder_name(run, node))


def out(api: Api) -> int:
    """Nodes that are out already: tests before this one share the control plane."""
    there = [api.get("nodes", None, one) for one in api.names("nodes")]
    return sum(
        bool(one["spec"].get("taints") or one["spec"].get("unschedulable")) or condition(one, "Ready") != "True"
        for one in there
        if one is not None
    )


def taints(api: Api, node: str) -> set[str]:
    found = api.get("nodes", None, node)
    assert found is not None
    return {one["key"] for one in found["spec"].get("taints", [])}


def pod(node: str, name: str, *, tolerates: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [{"name": "main", "image": "none"}],
        "tolerations": [{"key": TAINT, "operator": "Exists"}] if tolerates else [],
    }
    return {"kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_a_failed_node_takes_only_work_that_tolerates_it_until_a_newer_pass(
    api: Api, nodes: list[str], namespace: str, mark: Callable[..., Any], tmp_path: Path
) -> None:
    bad, good = nodes[1], nodes[0]
    untouched = api.get("nodes", None, bad)["metadata"].get("labels")  # type: ignore[index]
    write(tmp_path, "r9", {bad: Grade.FAIL}, BEFORE, interrupted=True)
    code, document = mark("r9", "--apply")
    assert (code, document["nodes"]) == (3, [])
    assert document["plan"]["kept"][0]["why"].startswith("the run was interrupted")
    found = api.get("nodes", None, bad)
    assert found is not None
    assert (taints(api, bad), found["metadata"].get("labels")) == (set(), untouched)
    assert condition(found, "GPUAcceptance") is None

    write(tmp_path, "r1", dict.fromkeys(nodes, Grade.PASS) | {bad: Grade.FAIL}, BEFORE)
    code, document = mark("r1")
    assert (code, document["applied"], taints(api, bad)) == (0, False, set())  # a plan
    code, document = mark("r1", "--apply")
    assert code == 0, document
    assert taints(api, bad) == {TAINT}
    assert not api.get("nodes", None, bad)["spec"].get("unschedulable")  # type: ignore[index]
    assert condition(api.get("nodes", None, bad), "GPUAcceptance") == "False"
    assert condition(api.get("nodes", None, bad), "Ready") == "True"
    assert condition(api.get("nodes", None, good), "GPUAcceptance") == "True"
    assert good in api.names("nodes", labels="gpukeeper.io/acceptance=passed,gpukeeper.io/acceptance-run=r1")

    api.create(pod(bad, "normal", tolerates=False), namespace)
    api.create(pod(bad, "retest", tolerates=True), namespace)
    api.wait_for("pods", namespace, "retest", lambda one: bool(one and one["spec"].get("nodeName") == bad))
    api.wait_for("pods", namespace, "normal", lambda one: condition(one, "PodScheduled") == "False")

    write(tmp_path, "r0", {bad: Grade.PASS}, BEFORE - timedelta(hours=1))
    code, document = mark("r0", "--apply")
    assert "is newer" in document["plan"]["kept"][0]["why"]
    assert taints(api, bad) == {TAINT}
    write(tmp_path, "r3", {bad: Grade.PASS}, NOW + timedelta(hours=1))
    code, document = mark("r3", "--apply")
    assert (code, taints(api, bad)) == (3, {TAINT})
    assert "in the future" in document["plan"]["kept"][0]["why"]
    write(tmp_path, "r2", {bad: Grade.PASS}, NOW)
    code, document = mark("r2", "--apply")
    assert (code, taints(api, bad)) == (0, set()), document
    api.wait_for("pods", namespace, "normal", lambda one: bool(one and one["spec"].get("nodeName") == bad))


def kept_of(found: dict[str, Any] | None) -> dict[str, Any]:
    """What a quarantine and its end must leave as it was."""
    assert found is not None
    types = [one["type"] for one in found["status"]["conditions"]]
    meta = found["metadata"]
    return {
        "labels": meta.get("labels", {}),
        "annotations": meta.get("annotations", {}),
        "taints": found["spec"].get("taints", []),
        "unschedulable": found["spec"].get("unschedulable", False),
        "conditions": sorted(types),
    }


def test_a_quarantined_node_takes_no_new_work_until_it_is_returned(
    api: Api, nodes: list[str], namespace: str, command: Callable[..., Any]
) -> None:
    bad = nodes[1]
    before = kept_of(api.get("nodes", None, bad))
    words = ("node", "quarantine", bad, "--reason", "fans are loud", "--for", "7d")
    code, document = command(*words)
    assert (code, document["applied"], kept_of(api.get("nodes", None, bad))) == (0, False, before)
    code, document = command(*words, "--apply")
    assert (code, document["schema"]) == (0, "gpukeeper/node-quarantine/v1"), document
    assert document["nodes"][0]["quarantined"]
    found = api.get("nodes", None, bad)
    assert found is not None
    assert QUARANTINE in taints(api, bad)
    assert (condition(found, "GPUQuarantined"), condition(found, "Ready")) == ("True", "True")
    assert not found["spec"].get("unschedulable")
    assert bad in api.names("nodes", labels=f"{QUARANTINE}=yes")
    _, listed = command("node", "list")
    assert listed["schema"] == "gpukeeper/cluster-nodes/v1"
    (state,) = [one for one in listed["nodes"] if one["node"] == bad]
    assert (state["quarantined"], state["expired"]) == (True, False)
    assert "fans are loud" in state["quarantine"]

    api.create(pod(bad, "waits", tolerates=False), namespace)
    api.wait_for("pods", namespace, "waits", lambda one: condition(one, "PodScheduled") == "False")
    code, document = command("node", "return", bad, "--apply")
    assert (code, document["schema"]) == (0, "gpukeeper/node-return/v1"), document
    assert kept_of(api.get("nodes", None, bad)) == before
    api.wait_for("pods", namespace, "waits", lambda one: bool(one and one["spec"].get("nodeName") == bad))


def test_a_node_that_failed_is_returned_only_with_force(
    api: Api, nodes: list[str], command: Callable[..., Any], mark: Callable[..., Any], tmp_path: Path
) -> None:
    bad = nodes[1]
    write(tmp_path, "r1", dict.fromkeys(nodes, Grade.PASS) | {bad: Grade.FAIL}, BEFORE)
    assert mark("r1", "--apply")[0] == 0
    code, document = command("node", "return", bad, "--apply")
    assert (code, taints(api, bad)) == (3, {TAINT})
    assert "its last acceptance failed (run r1" in document["plan"]["kept"][0]["why"]
    code, document = command("node", "return", bad, "--apply", "--force", "--yes")
    assert (code, taints(api, bad)) == (0, set()), document
    assert bad in api.names("nodes", labels="gpukeeper.io/acceptance=failed")


def test_many_quarantines_at_once_never_exceed_the_limit(
    api: Api, nodes: list[str], environ: dict[str, str], namespace: str
) -> None:
    """Three programs at the same moment, one more node may be out: one after the other counts and writes."""
    words = [str(PROGRAM), "node", "quarantine", "--on", "kubernetes", "--json", "--apply", "--most", str(out(api) + 1)]
    running = [
        subprocess.Popen([*words, one], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in nodes
    ]
    seen = 0
    while any(one.poll() is None for one in running):
        seen = max(seen, sum(QUARANTINE in taints(api, one) for one in nodes))
    assert seen <= 1
    for one in running:
        one.communicate(timeout=60)
    codes = sorted(one.returncode for one in running)
    assert codes == [0, 3, 3]
    assert sum(QUARANTINE in taints(api, one) for one in nodes) == 1


def test_without_the_right_to_the_lease_nothing_is_written(
    plane: ControlPlane, api: Api, nodes: list[str], environ: dict[str, str], command: Callable[..., Any]
) -> None:
    (role,) = [one for one in YAML(typ="safe").load_all(RIGHTS.read_text()) if one["kind"] == "ClusterRole"]
    environ["KUBECONFIG"] = str(plane.kubeconfig(plane.new_user(role["rules"])))
    before = kept_of(api.get("nodes", None, nodes[0]))
    code, document = command("node", "quarantine", nodes[0], "--apply")
    assert (code, kept_of(api.get("nodes", None, nodes[0]))) == (3, before)
    assert "needs get, create and update on leases" in document["nodes"][0]["deferred"]


@pytest.mark.parametrize("status", [False, True])
def test_the_server_refuses_a_write_to_a_node_that_changed_since_it_was_read(
    plane: ControlPlane, user: str, nodes: list[str], status: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the marks rely on, also for the condition."""
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig(user)))
    condition = {"type": "GPUAcceptance", "status": "False", "reason": "Planted", "message": "planted"}
    new: dict[str, Any] = {"status": {"conditions": [condition]}} if status else {"spec": {"taints": []}}

    async def stale() -> None:
        cluster = cluster_api({})
        try:
            read = await cluster.get(NODES, nodes[0], Node)
            assert read is not None
            meta = {"uid": read.metadata.uid, "resourceVersion": read.metadata.resource_version}
            await cluster.patch(NODES, nodes[0], {"metadata": {"labels": {"changed": "yes"}}}, Node)
            how, part = ("strategic", "status") if status else ("merge", "")
            with pytest.raises(ApiError) as refused:
                await cluster.patch(NODES, nodes[0], {"metadata": meta, **new}, Node, how=how, subresource=part)  # type: ignore[arg-type]
            assert refused.value.reason == "Conflict"
        finally:
            await cluster.close()

    asyncio.run(stale())

"""Why a node did not report, in the words of a real API server, scheduler, controllers and kubelet: INCONCLUSIVE, with
the reason in the report of the run. One run for each reason, all at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.fleet.collect import MissingNode
from gpukeeper.acceptance.fleet.launcher import Target
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.acceptance.launchers.story import NODES_CSV, RunArchive
from gpukeeper.blocking import SystemClock
from gpukeeper.model.gpu import Grade
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.real_node import RealNode
from tests.real.launch.beds import Bed

TAINT = {"key": "lab/reserved", "value": "yes", "effect": "NoSchedule"}
QUOTA = {"kind": "ResourceQuota", "metadata": {"name": "no-gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}}


def begin(made: Bed, run: str, node: str, *, gpus: int = 8, options: dict[str, str] | None = None, **spec: Any) -> None:
    """Without a check of the nodes before: the cluster itself has to refuse."""
    wanted = made.spec(run, **{"nodes": (node,), "selector": "", "backoff": 0, **spec})
    target = Target(node=node, gpus=gpus, resource="nvidia.com/gpu")
    made.tell(lambda launcher: launcher.start(wanted, (target,)), **(options or {}))


def reported(made: Bed, run: str, folder: Path) -> MissingNode:
    """As `accept fetch` writes it."""

    async def fetched(launcher: KubernetesLauncher) -> story.Ended:
        summary = await launcher.run(run)
        assert summary is not None
        return await story.rescue(story.Setting(launcher, RunArchive(folder, run), SystemClock()), summary)

    ended = made.tell(fetched)
    assert ended.problems == (), "so that a launcher at its deadline removes the run"
    report = ended.report
    (missing,) = report.missing
    assert report.verdict is Grade.INCONCLUSIVE
    assert missing.reason.partition('"')[0] in (folder / run / NODES_CSV).read_text()
    return missing


def until_code(made: Bed, run: str, code: str, folder: Path) -> str:
    """The sentence in the report."""
    made.plane.until(lambda: {one.code for one in made.states(run).values()} == {code}, f"{run}: {code}")
    missing = reported(made, run, folder)
    assert missing.code == code
    return missing.reason


def running(made: Bed, run: str) -> Object:
    def found() -> Object | None:
        return next((one for one in made.pods(run) if one["status"].get("phase") == "Running"), None)

    return made.plane.until(found, f"the pod of {run} runs")


def test_every_reason_of_a_cluster_is_in_the_report(
    bed: Callable[[int], Bed], new_namespace: Callable[[], str], tmp_path: Path
) -> None:
    made = bed(7)
    tainted, poor, late, evicted, lost, full, refused = made.nodes
    api = made.plane.api
    other = Bed(made.plane, new_namespace(), made.nodes)
    api.create(QUOTA, other.namespace)
    made.plane.until(lambda: api.list("resourcequotas", other.namespace)[0].get("status"), "the quota is in force")
    api.patch("nodes", None, tainted, {"spec": {"taints": [TAINT]}})
    begin(made, "taint", tainted, options={"tolerate": "no"})
    begin(made, "resources", poor, options={"rdma": "rdma/ib=1"})
    begin(made, "deadline", late, deadline_s=3)
    for run, node in (("evicted", evicted), ("node-not-ready", lost), ("oom", full)):
        begin(made, run, node)
    begin(other, "quota", refused)

    evict = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    name = running(made, "evicted")["metadata"]["name"]
    api.patch("pods", made.namespace, name, {"status": evict}, subresource="status")
    made.plane.finish_pod(made.namespace, running(made, "oom")["metadata"]["name"], exit_code=137, reason="OOMKilled")
    running(made, "node-not-ready")
    _lose(made.plane, lost)

    assert "it does not tolerate (lab/reserved=yes:NoSchedule)" in until_code(made, "taint", "taint", tmp_path)
    assert "its node has not enough rdma/ib free" in until_code(made, "resources", "resources", tmp_path).lower()
    assert "exceeded quota: no-gpus" in until_code(other, "quota", "quota", tmp_path)
    assert "Its node evicted it: The node was low on resource" in until_code(made, "evicted", "evicted", tmp_path)
    assert "used more memory than its limit" in until_code(made, "oom", "oom", tmp_path)
    assert "activeDeadlineSeconds" in until_code(made, "deadline", "deadline", tmp_path)
    words = until_code(made, "node-not-ready", "node-not-ready", tmp_path)
    assert "Its node is not ready (KubeletNotReady): the runtime is down" in words


def test_a_node_that_is_lost_in_the_middle_is_not_waited_for(bed: Callable[[int], Bed], tmp_path: Path) -> None:
    """Its deadline is hours away; without the loss the test would wait for it."""
    made = bed(2)
    ends, dies = made.nodes
    spec = made.spec(backoff=0, deadline_s=4 * 3600)
    turns = iter((True,))

    async def sleep(seconds: float) -> None:
        if next(turns, False):
            pods = made.plane.until(lambda: _running_on(made, made.nodes), "both pods run")
            _lose(made.plane, dies)
            made.finish(pods[ends])
        await asyncio.sleep(0.2)

    async def launched(launcher: KubernetesLauncher) -> story.Ended:
        setting = story.Setting(launcher, RunArchive(tmp_path, spec.run), SystemClock(), sleep)
        return await story.launch(setting, spec, await launcher.targets(spec), keep_objects=True)

    report = made.tell(launched).report
    missing = {one.node: one for one in report.missing}
    assert {name: one.code for name, one in missing.items()} == {ends: "no-report", dies: "node-not-ready"}
    assert missing[dies].reason.startswith("Its node was lost before it reported. Its node is not ready")


def _running_on(made: Bed, nodes: Sequence[str]) -> dict[str, Object] | None:
    pods = {one["spec"].get("nodeName", ""): one for one in made.pods() if one["status"].get("phase") == "Running"}
    return pods if set(nodes) <= pods.keys() else None


def _lose(plane: ControlPlane, node: str) -> None:
    """Its kubelet reports that it is not ready; KWOK no longer speaks for it. Its pods keep their condition Ready."""
    plane.api.patch("nodes", None, node, {"metadata": {"labels": {"type": None}}})
    bad = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "the runtime is down"}

    def written() -> bool:
        plane.api.patch("nodes", None, node, {"status": {"conditions": [bad]}}, subresource="status")
        found = plane.api.get("nodes", None, node) or {}
        return bad["message"] in str(found.get("status", {}).get("conditions"))

    plane.until(written, "the node is not ready")


def test_an_image_that_cannot_be_pulled_and_a_program_that_is_missing(
    plane: ControlPlane, namespace: str, real_node: RealNode, tmp_path: Path
) -> None:
    """The words of a real kubelet."""
    made = Bed(plane, namespace, (real_node.name,))
    for run, image, policy in (
        ("pull", "127.0.0.1:1/accept:1", "IfNotPresent"),
        ("never", "local/none:1", "Never"),
        ("missing", "local/busybox:1", "Never"),
    ):
        begin(made, run, real_node.name, gpus=0, gpus_per_node=0, image=image, options={"pull-policy": policy})
    pulled = until_code(made, "pull", "image", tmp_path)
    assert "Its image cannot be pulled" in pulled
    assert "127.0.0.1:1" in pulled
    assert "ErrImageNeverPull" in until_code(made, "never", "image", tmp_path)
    assert "gpukeeper" in until_code(made, "missing", "config", tmp_path)
    for run in ("pull", "never", "missing"):
        assert not made.tell(lambda launcher, run=run: launcher.remove(run)).left  # type: ignore[misc]

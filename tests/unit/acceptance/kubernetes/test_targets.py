"""Which nodes a run tests, and what is said about the others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.collect import Collected, run_report
from gpukeeper.clients.kubernetes.api import PODS
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.kubernetes.clusters import add_node, cluster, launcher, run, spec


def test_all_nodes_are_those_with_gpus_of_either_vendor() -> None:
    api = cluster("a", "b")
    add_node(api, "amd", 4, resource="amd.com/gpu")
    add_node(api, "plain", None)
    found = run(launcher(api).targets(spec()))
    assert [(one.node, one.gpus, one.resource, one.excluded) for one in found] == [
        ("a", 8, "nvidia.com/gpu", ""),
        ("amd", 4, "amd.com/gpu", ""),
        ("b", 8, "nvidia.com/gpu", ""),
    ]


def test_a_selector_and_names_choose() -> None:
    api = cluster("a", "b")
    add_node(api, "c", labels={"pool": "new"})
    assert [one.node for one in run(launcher(api).targets(spec(selector="pool=new")))] == ["c"]
    assert [one.node for one in run(launcher(api).targets(spec(nodes=("b",))))] == ["b"]
    with pytest.raises(UsageError, match="no node x, y"):
        run(launcher(api).targets(spec(nodes=("b", "y", "x"))))
    with pytest.raises(UsageError, match="No node has the labels"):
        run(launcher(api).targets(spec(selector="pool=old")))


@pytest.mark.parametrize(
    ("node", "options", "words"),
    [
        ({"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}, {}, "not ready"),
        ({"spec": {"unschedulable": True}}, {}, "cordoned; name it with --nodes"),
        (
            {"spec": {"taints": [{"key": "maintenance", "value": "yes", "effect": "NoSchedule"}]}},
            {"tolerate": "no"},
            "maintenance=yes:NoSchedule",
        ),
        ({"spec": {"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}}, {}, ""),
        ({"allocatable": {"nvidia.com/gpu": "0"}}, {}, "none of its GPUs can be allocated"),
    ],
)
def test_a_node_that_cannot_be_tested_is_listed_with_the_reason(
    node: dict[str, Any], options: dict[str, str], words: str
) -> None:
    api = cluster()
    add_node(api, "a", **node)
    (found,) = run(launcher(api, **options).targets(spec()))
    assert words in found.excluded if words else not found.excluded


def test_a_named_cordoned_node_is_tested_and_a_named_node_without_gpus_is_explained() -> None:
    api = cluster()
    add_node(api, "a", spec={"unschedulable": True})
    add_node(api, "plain", None)
    found = {one.node: one.excluded for one in run(launcher(api).targets(spec(nodes=("a", "plain"))))}
    assert not found["a"]
    assert "announces no GPU" in found["plain"]
    assert not run(launcher(api).targets(spec(nodes=("plain",), gpus_per_node=0)))[0].excluded


def test_a_busy_node_is_not_skipped_silently() -> None:
    api = cluster("a")
    gpus = {"containers": [{"name": "x", "resources": {"limits": {"nvidia.com/gpu": "3"}}}], "nodeName": "a"}
    api.add(PODS, {"metadata": {"name": "train", "namespace": "lab"}, "spec": gpus, "status": {"phase": "Running"}})
    api.add(PODS, {"metadata": {"name": "done", "namespace": "lab"}, "spec": gpus, "status": {"phase": "Succeeded"}})
    (found,) = run(launcher(api).targets(spec()))
    assert found.excluded.startswith("3 of its 8 GPUs are in use by lab/train (3)")
    report = run_report(Collected(spec(), (found,)), datetime(2026, 1, 5, 11, tzinfo=UTC))
    assert report.verdict is Grade.INCONCLUSIVE
    assert [(one.node, one.code) for one in report.missing] == [("a", "excluded")]
    assert "in use by lab/train" in report.missing[0].reason
    assert not run(launcher(api, busy="wait").targets(spec()))[0].excluded
    assert not run(launcher(api).targets(spec(gpus_per_node=5)))[0].excluded
    api.of(PODS)[0]["metadata"]["labels"] = {"gpukeeper.io/run": "r1"}
    assert run(launcher(api).targets(spec()))[0].excluded, "a label of another namespace proves nothing"
    again = run(launcher(api, namespace="lab").targets(spec()))
    assert not again[0].excluded, "started again, its own pods are no obstacle"
    assert run(launcher(api).targets(spec(run="r2")))[0].excluded
    api.forbidden = lambda verb, resource, namespace: resource is PODS
    assert not run(launcher(api).targets(spec()))[0].excluded, "unknown is not busy: the Job waits and says why"

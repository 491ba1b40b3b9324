"""What a Ray cluster reports of itself: each planted problem is found. Over a dashboard in memory, read only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.preflight.engines import RayFacts, RayNodeFacts, judge_ray
from gpukeeper.acceptance.fleet.preflight.facts import Finding
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring.preflight import ray
from tests.unit.acceptance.launchers.ray_dashboard import FakeDashboard, a_node, served
from tests.unit.acceptance.preflight.clusters import the


def node(name: str, **changes: Any) -> RayNodeFacts:
    return RayNodeFacts(**{"node": name, "node_id": name, "gpus": 8.0, **changes})


def judged(gpus_per_node: int | None = 8, **changes: Any) -> tuple[Finding, ...]:
    made = {"address": "http://head:8265", "version": "2.60.0", "chosen": (node("a"), node("b"))}
    return judge_ray(RayFacts(**{**made, **changes}), gpus_per_node)


def test_a_good_cluster_passes() -> None:
    assert {one.verdict for one in judged()} == {Grade.PASS}


@pytest.mark.parametrize(
    ("code", "changes", "verdict", "words"),
    [
        ("ray-version", {"version": "2.9.3"}, Grade.WARN, "older than 2.40"),
        ("ray-version", {"version": "master"}, Grade.INCONCLUSIVE, "not a version"),
        ("ray-version", {"own": "2.53.0"}, Grade.WARN, "2.53.0 here"),
        ("ray-jobs", {"jobs": Unknown("404")}, Grade.INCONCLUSIVE, "404"),
        ("ray-dead", {"dead": (node("c", message="it was drained"),)}, Grade.WARN, "c: dead"),
        ("ray-nodes", {"chosen": ()}, Grade.FAIL, "no node that is alive announces a GPU"),
        ("ray-nodes", {"chosen": Unknown("cut off")}, Grade.INCONCLUSIVE, "cut off"),
        ("ray-gpus", {"chosen": (node("a", excluded="it announces 4 GPUs, 8 are requested"),)}, Grade.FAIL, "a: it"),
        ("ray-gpus", {"chosen": (node("a", gpus=16.0), node("b"))}, Grade.WARN, "a: more than 8 GPUs"),
        ("ray-free", {"chosen": (node("a", held=8.0), node("b"))}, Grade.WARN, "8 of 8 on a"),
        ("ray-free", {"held": Unknown("cut off")}, Grade.INCONCLUSIVE, "cut off"),
    ],
)
def test_planted_problems(code: str, changes: dict[str, Any], verdict: Grade, words: str) -> None:
    one = the(code, judged(**changes), verdict)
    assert words in one.message
    assert one.fix


def checked(there: FakeDashboard, *names: str, gpus_per_node: int | None = 2) -> tuple[Finding, ...]:
    return asyncio.run(ray(names, "", {"address": there.url}, gpus_per_node, {}))


def test_a_cluster_is_only_read() -> None:
    with served(FakeDashboard(a_node(1), a_node(2, state="DEAD", state_message="lost"), a_node(3))) as there:
        busy = {"actor_id": "x", "job_id": "1", "state": "ALIVE", "node_id": "3" * 56}
        there.rows["actors"].append({**busy, "required_resources": {"GPU": 2.0}})
        there.rows["tasks"] = [{"state": "RUNNING", "type": "ACTOR_TASK", "node_id": "3" * 56}]
        found = checked(there)
        assert {method for method, _ in there.asked} == {"GET"}
    assert the("ray-dead", found).about == ("10.0.0.2",)
    assert the("ray-nodes", found).about == ("10.0.0.1", "10.0.0.3")
    assert "2 of 2 on 10.0.0.3" in the("ray-free", found).message


def test_bundles_of_a_placement_group_hold_gpus() -> None:
    with served(FakeDashboard(a_node(1))) as there:
        bundle = {"node_id": "1" * 56, "unit_resources": {"GPU": 1.0}}
        there.rows["placement_groups"] = [{"placement_group_id": "g", "state": "CREATED", "bundles": [bundle]}]
        there.rows["tasks"] = []
        assert "1 of 2 on 10.0.0.1" in the("ray-free", checked(there)).message


def test_too_few_gpus_and_a_named_node_that_is_dead_are_fails() -> None:
    with served(FakeDashboard(a_node(1), a_node(2, state="DEAD"))) as there:
        there.rows["tasks"] = []
        found = checked(there, "10.0.0.1", "10.0.0.2", gpus_per_node=8)
        assert {one.about for one in found if one.verdict is Grade.FAIL} == {("10.0.0.1",), ("10.0.0.2",)}
        with pytest.raises(UsageError, match=r"Ray has no node 10\.0\.0\.9"):
            checked(there, "10.0.0.9")


def test_what_does_not_reply_or_refuses_is_not_a_pass() -> None:
    one = the("ray-cluster", asyncio.run(ray((), "", {"address": "http://127.0.0.1:9"}, None, {})))
    assert (one.verdict, one.fix[0]) == (Grade.INCONCLUSIVE, "curl -sS http://127.0.0.1:9/api/version")
    with served(FakeDashboard(a_node(1))) as there:
        there.token = "secret"
        assert the("ray-cluster", checked(there)).verdict is Grade.INCONCLUSIVE

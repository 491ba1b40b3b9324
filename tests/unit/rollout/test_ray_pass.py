"""Which nodes get a task, and what their reports become; with a Ray in memory. A real one: tests/real/ray."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.clients.ray import Pauses, RayJob, RayNode
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.rollout import ray as client
from gpukeeper.rollout import ray_pass_program
from gpukeeper.rollout.execute import Outcome
from gpukeeper.rollout.ray import RayPasses, RayPassSettings
from gpukeeper.rollout.ray_pass_program import Driver, one_pass
from tests.patience import PATIENCE

DONE = {"code": 0, "mode": "enforce", "places": [], "said": ""}
DAY = 86400.0


class FakeRay:
    """Tasks that reply at once; `failing`: nodes whose task raises."""

    __version__ = "2.60.0"

    def __init__(self, nodes: Sequence[str], head: str = "", failing: Sequence[str] = ()) -> None:
        self._nodes, self._head, self._failing = nodes, head, failing
        self.visited: list[str] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": one, "Alive": True, "Resources": {ray_pass_program.HEAD: 1.0} if one == self._head else {}}
            for one in self._nodes
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: "03000000", get_node_id=lambda: "a", gcs_address="head:6379")

    def wait(self, refs: list[str], **_: Any) -> tuple[list[str], list[str]]:
        return refs[:1], refs[1:]

    def get(self, node: str) -> dict[str, Any]:
        if node in self._failing:
            raise RuntimeError("the worker died")
        return DONE


class TriedDriver(Driver):
    """Its tasks are the names of nodes; `idle` and `store_` are given."""

    def __init__(self, ray: FakeRay, idle: Any, visits: dict[str, Any], **plan: Any) -> None:
        given = {"token": "t", "submission": "s", "nodes": [], "act": True, "deadline_s": 60.0, "again_s": DAY}
        super().__init__(ray, {**given, **plan})
        self.idle, self.visits, self.told = idle, visits, list[dict[str, Any]]()

    def idle_times(self) -> Any:
        return self.idle

    def start(self, node: str) -> Any:
        self.ray.visited.append(node)
        return node

    def kv(self) -> Any:
        def put(key: str, value: str, overwrite: bool) -> None:
            self.visits[key] = value.encode()

        return SimpleNamespace(_internal_kv_get=self.visits.get, _internal_kv_put=put)

    def tell(self, **what: Any) -> None:
        self.told.append(what)


def visits(seconds_ago: float, applied_ago: float | None) -> dict[str, Any]:
    now = time.time()
    visit = {"at": now - seconds_ago, "applied": None if applied_ago is None else now - applied_ago}
    return {ray_pass_program.VISITS + "a": json.dumps(visit).encode()}


@pytest.mark.parametrize(
    ("idle", "before", "act", "goes"),
    [
        ({"a": 300.0}, None, True, True),  # never visited
        ({"a": 300.0}, (300, 300), True, False),  # nothing ran since the last pass: it may be scaled down
        ({"a": 300.0}, (900, 900), True, True),  # something ran since
        ({"a": 300.0}, (300, None), True, True),  # only a plan was made
        ({"a": 300.0}, (300, 300), False, True),  # a plan is what a person asks for
        ({"a": 2 * DAY}, (2 * DAY, 2 * DAY), True, True),  # a cluster that is never scaled down
        ({"a": None}, None, True, False),  # work has begun
        ({}, None, True, False),  # Ray does not know it
        ("Ray does not say", None, True, False),
    ],
)
def test_a_node_is_visited_once_in_an_idle_period(
    idle: Any, before: tuple[float, float | None] | None, act: bool, goes: bool
) -> None:
    ray = FakeRay(["a"])
    driver = TriedDriver(ray, idle, visits(*before) if before else {}, nodes=["a"], act=act)
    driver.drive()
    assert (ray.visited == ["a"]) is goes, driver.told
    assert any("skipped" in one for one in driver.told) is not goes


def test_a_record_of_a_visit_that_is_damaged_is_none() -> None:
    ray = FakeRay(["a"])
    TriedDriver(ray, {"a": 300.0}, {ray_pass_program.VISITS + "a": b"damaged"}, nodes=["a"]).drive()
    assert ray.visited == ["a"]


def test_two_passes_in_a_row_visit_once_and_a_plan_between_them_changes_nothing() -> None:
    ray, known, idle = FakeRay(["a"]), dict[str, Any](), {"a": 600.0}
    for act in (True, False, True):
        TriedDriver(ray, idle, known, nodes=["a"], act=act).drive()
        idle = {"a": 0.5}  # our own task was the last one
    assert ray.visited == ["a", "a"]


def test_the_head_is_visited_although_the_driver_makes_it_busy() -> None:
    ray = FakeRay(["a"], head="a")
    TriedDriver(ray, {"a": None}, {}, nodes=["a"]).drive()
    assert ray.visited == ["a"]


def test_a_task_that_dies_hides_no_other_and_is_no_visit() -> None:
    ray, known = FakeRay(["a", "b"], failing=["a"]), dict[str, Any]()
    driver = TriedDriver(ray, {"a": 300.0, "b": 300.0}, known, nodes=["a", "b", "gone"])
    driver.drive()
    replies = {one["node"]: one.get("reply") for one in driver.told if "node" in one}
    assert "the worker died" in replies["a"]["problem"]
    assert replies["b"] == DONE
    assert replies["gone"] is None
    assert set(known) == {ray_pass_program.VISITS + "b"}
    assert driver.told[-1] == {"end": True}


@pytest.mark.parametrize(
    ("script", "reply"),
    [
        (
            'test "$GPUKEEPER_RAY_JOB" = 03000000,s && grep -q enforce "$4" && '
            'echo \'{"policy": {"mode": "enforce"}, "places": [{"platform": "ray", "place": "x", "decisions": [1]}]}\'',
            {"code": 0, "mode": "enforce", "places": [{"platform": "ray", "place": "x"}], "said": ""},
        ),
        ("echo 'no root' >&2; exit 2", {"code": 2, "problem": "no root"}),
        ("sleep 60", {"code": 124, "problem": "it did not end within 1 s"}),
    ],
)
def test_what_a_task_replies(tmp_path: Path, script: str, reply: dict[str, Any]) -> None:
    program = tmp_path / "gpukeeper"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    request = {"program": [str(program)], "act": True, "policy": "mode: enforce\n", "job": "03000000,s"}
    found = one_pass({**request, "deadline_s": 1.0 if "sleep" in script else PATIENCE})
    assert found.pop("seconds", 1) > 0
    assert found == reply


def test_a_node_without_gpukeeper_says_what_to_do(tmp_path: Path) -> None:
    request = {"program": [str(tmp_path / "none")], "act": True, "policy": "", "job": "", "deadline_s": 1.0}
    assert "Install gpukeeper there, or name it with --option program=PATH" in one_pass(request)["problem"]


# The client.


class FakeApi:
    address = "http://head:8265"

    def __init__(self, lines: Callable[[str, list[str]], list[dict[str, Any]]], status: str = "SUCCEEDED") -> None:
        self._lines, self._status = lines, status
        self.submitted: dict[str, Mapping[str, str]] = {}
        self.deleted: list[str] = []

    async def nodes(self) -> tuple[RayNode, ...]:
        names = ("busy", "idle", "unknown")
        found = [RayNode(node_id=f"id-{one}", ip="1", name=one, state="ALIVE") for one in names]
        return (*found, RayNode(node_id="id-dead", ip="1", name="dead", state="DEAD", message="gone"))

    async def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        self.submitted[name] = metadata

    async def job(self, name: str) -> RayJob | None:
        if name in self.deleted:
            return None
        return RayJob(name=name, status=self._status, message="a trace\nno module ray", metadata=self.submitted[name])

    async def log(self, name: str) -> str:
        told = self._lines(self.submitted[name][client.TOKEN], ["id-idle"])
        return "words of Ray\n" + "".join(f"{ray_pass_program.MARK}{json.dumps(one)}\n" for one in told)

    async def parts(self, name: str, job_id: str) -> tuple[str, ...]:
        return ()

    async def stop(self, name: str) -> None: ...

    async def delete(self, name: str) -> None:
        self.deleted.append(name)


async def work(nodes: Sequence[str]) -> dict[str, str | Unknown | None]:
    known: dict[str, str | Unknown | None] = {"id-busy": "actor Trainer is alive", "id-idle": None}
    return {one: known.get(one, Unknown("no answer")) for one in nodes}


def passes(api: Any, only: Sequence[str] = (), policy: str = "mode: enforce\n") -> dict[str, Any]:
    settings = RayPassSettings(token="t", pauses=Pauses(settle=timedelta(0)))
    found = asyncio.run(RayPasses(api, work, settings).run(policy, only, act=True))
    return {one.host: one for one in found}


def reports(token: str, nodes: list[str]) -> list[dict[str, Any]]:
    return [{"token": "other", "node": nodes[0], "skipped": "of another job"}, *_own(token, nodes), _end(token)]


def _own(token: str, nodes: list[str]) -> list[dict[str, Any]]:
    return [{"token": token, "node": one, "reply": DONE} for one in nodes]


def _end(token: str) -> dict[str, Any]:
    return {"token": token, "end": True}


def test_only_idle_nodes_get_a_task_and_the_job_is_removed() -> None:
    api = FakeApi(reports)
    found = passes(api)
    assert {name: one.outcome for name, one in found.items()} == {
        "busy": Outcome.SKIPPED,
        "idle": Outcome.APPLIED,
        "unknown": Outcome.BLOCKED,
    }
    assert found["busy"].words == ("busy: actor Trainer is alive",)
    assert api.deleted == list(api.submitted) == ["gpukeeper-pass-t"]


def test_where_no_node_is_idle_no_job_is_submitted() -> None:
    api = FakeApi(reports)
    assert passes(api, ["busy", "dead"])["dead"].words == ("its Ray node is dead: gone",)
    assert api.submitted == {}


def test_a_name_that_ray_does_not_have_is_refused_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match=r"Ray has no node idl\. Did you mean idle\? Nothing was done\."):
        passes(FakeApi(reports), ["idl"])


def test_a_driver_that_did_not_start_is_a_failure_with_the_reason() -> None:
    api = FakeApi(lambda token, nodes: [], status="FAILED")
    found = passes(api)["idle"]
    assert found.outcome is Outcome.FAILED
    assert "no module ray" in found.words[0]
    assert "--option python=PATH" in found.words[0]
    assert api.deleted == ["gpukeeper-pass-t"]


def test_a_policy_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="too large for a Ray job"):
        passes(FakeApi(reports), policy=os.urandom(80_000).hex())


def test_a_job_that_never_ends_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "START", timedelta(seconds=-2000))
    api = FakeApi(lambda token, nodes: [], status="RUNNING")
    monkeypatch.setattr("gpukeeper.clients.ray.STOPPING", timedelta(0))
    with pytest.raises(PlatformError, match="did not end in time"):
        passes(api)

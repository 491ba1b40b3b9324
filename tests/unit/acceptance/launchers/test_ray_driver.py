"""The driver of a run on Ray, with a Ray in memory: actors on nodes that run, wait, fail and die."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.acceptance.launchers import host_program, ray_driver_program
from gpukeeper.acceptance.launchers.ray_driver_program import MARK, Driver, NodeProgram, clean


class ActorDiedError(Exception):
    pass


class ActorUnschedulableError(Exception):
    pass


class ActorUnavailableError(Exception):
    pass


class RuntimeEnvSetupError(Exception):
    pass


class FakeRay:
    """`replies`: of each node what its actor replies to each request, in turn; an exception is raised; None never
    arrives."""

    __version__ = "2.60.0"

    def __init__(self, **replies: list[Any]) -> None:
        self.replies, self.killed, self.options = replies, list[str](), dict[str, Any]()
        self.alive = {name: {"CPU": 1.0, "GPU": 2.0} for name in replies}
        self.asked: list[tuple[str, str]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True, "Resources": total} for name, total in self.alive.items()]

    def remote(self, kind: type) -> Any:
        def options(**what: Any) -> Any:
            name = what["scheduling_strategy"]
            self.options[name] = what
            return SimpleNamespace(remote=lambda source: FakeActor(self, name))

        return SimpleNamespace(options=options)

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [one for one in refs if one.value is not None], []

    def get(self, ref: Any) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor.name)


class FakeActor:
    def __init__(self, ray: FakeRay, name: str) -> None:
        self.ray, self.name = ray, name

    def __getattr__(self, doing: str) -> Any:
        def remote(request: dict[str, Any]) -> Any:
            self.ray.asked.append((self.name, doing))
            left = self.ray.replies[self.name]
            return Ref(left.pop(0) if left else None)

        return SimpleNamespace(remote=remote)


class Ref:
    def __init__(self, value: Any) -> None:
        self.value = value


STARTED = "started"
ENDED = {"state": "ended", "node": "a", "run": "r1", "exit_code": 0}


def read(body: bytes, state: dict[str, Any] | None = None) -> Any:
    return state or {"state": "running"}, {"token": "x", "offset": 0}, body


@pytest.fixture
def drive(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    monkeypatch.setattr(ray_driver_program, "POLL_S", 0.0)
    monkeypatch.setattr(ray_driver_program, "TELL_S", 0.0)
    monkeypatch.setattr(Driver, "module", lambda self, name: FAKE_MODULES[name])

    def driven(ray: FakeRay, **changes: Any) -> list[Any]:
        nodes = [
            {"node": name, "id": name, "ip": f"10.0.0.{number}", "gpus": 2.0, "environment": {}}
            for number, name in enumerate(ray.replies)
        ]
        plan = {"token": "t", "run": "r1", "nodes": nodes, "command": ["gpukeeper"], "host": "", "together": False}
        Driver(ray, {**plan, "deadline_s": 60.0, "wait_s": 60.0, "log_most": 1000, **changes}).drive()
        lines = capfd.readouterr().out.splitlines()
        return [json.loads(line[len(MARK) :]) if line.startswith(MARK) else line for line in lines]

    return driven


FREE = {"a": {"GPU": 0.0}}
FAKE_MODULES = {
    "ray.util.scheduling_strategies": SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node),
    "ray._private.state": SimpleNamespace(available_resources_per_node=lambda: FREE),
}


def about(told: list[Any], node: str) -> list[dict[str, Any]]:
    return [one for one in told if isinstance(one, dict) and one.get("node") == node]


def test_a_node_is_started_read_to_its_end_and_removed(drive: Callable[..., list[Any]]) -> None:
    ray = FakeRay(a=[STARTED, read(b"one\ntw"), read(b"o\nthree", ENDED), []])
    told = drive(ray)
    assert [line for line in told if isinstance(line, str)] == ["a | one", "a | two", "a | three"]
    assert [one.get("phase") for one in about(told, "a")] == ["running", None]
    assert about(told, "a")[-1]["state"]["exit_code"] == 0
    assert told[-1]["end"]
    assert [doing for _, doing in ray.asked] == ["start", "read", "read", "remove"]
    assert ray.killed == ["a"]
    assert ray.options["a"]["num_gpus"] == 2.0
    assert ray.options["a"]["max_restarts"] == ray.options["a"]["max_task_retries"] == 0


def test_bytes_that_are_no_text_and_carriage_returns_do_not_break_the_log(drive: Callable[..., list[Any]]) -> None:
    told = drive(FakeRay(a=[STARTED, read(b"1%\r2%\n\xff\n", ENDED), []]))
    assert [line for line in told if isinstance(line, str)] == ["a | 1%", "a | 2%", "a | \ufffd"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RuntimeEnvSetupError("pip failed"), "runtime-env", "pip failed"),
        (ActorUnschedulableError("no"), "resources", "0 of 2 GPUs of its node are free, 2 are needed"),
        (ActorDiedError("The actor is dead.\nhint\nworker exit: oom"), "vanished", "worker exit: oom"),
        (RuntimeError("/root may be opened by others"), "refused", "may be opened by others"),
    ],
)
def test_a_node_that_fails_is_gone_with_the_reason_and_the_others_go_on(
    drive: Callable[..., list[Any]], error: Exception, code: str, words: str
) -> None:
    told = drive(FakeRay(a=[error], b=[STARTED, read(b"", ENDED), []]))
    (gone,) = about(told, "a")
    assert (gone["phase"], gone["code"]) == ("gone", code)
    assert words in gone["reason"]
    assert about(told, "b")[-1]["state"] == ENDED


def test_a_node_that_dies_and_one_that_was_dead_before(drive: Callable[..., list[Any]]) -> None:
    ray = FakeRay(a=[STARTED, read(b"begun"), ActorDiedError("its node has died")], b=[])
    del ray.alive["b"]
    original = ray.get

    def get(ref: Any) -> Any:
        if isinstance(ref.value, ActorDiedError):
            ray.alive.clear()
        return original(ref)

    ray.get = get  # type: ignore[method-assign]
    told = drive(ray)
    assert about(told, "b")[0]["code"] == "node-gone"
    assert (about(told, "a")[-1]["code"], about(told, "a")[-1]["phase"]) == ("node-gone", "gone")
    assert "a | begun" in told


def test_a_network_that_fails_for_a_moment_loses_nothing(drive: Callable[..., list[Any]]) -> None:
    told = drive(FakeRay(a=[STARTED, ActorUnavailableError("rpc"), read(b"x\n", ENDED), []]))
    assert "a | x" in told
    assert about(told, "a")[-1]["state"] == ENDED


def test_an_actor_that_dies_after_its_program_ended_changes_nothing(drive: Callable[..., list[Any]]) -> None:
    told = drive(FakeRay(a=[STARTED, read(b"x\n", ENDED), ActorDiedError("late")]))
    assert about(told, "a")[-1]["state"] == ENDED


def test_a_node_that_waits_too_long_names_the_missing_resource(drive: Callable[..., list[Any]]) -> None:
    told = drive(FakeRay(a=[]), wait_s=0.01)
    assert [one["phase"] for one in about(told, "a")] == ["waiting", "gone"]
    assert "0 of 2 GPUs of its node are free, 2 are needed" in about(told, "a")[0]["reason"]
    ray = FakeRay(a=[])
    ray.alive["a"] = {"CPU": 1.0}
    assert "announces 0 GPUs, 2 are requested" in about(drive(ray, wait_s=0.01), "a")[-1]["reason"]


class FakeGroups:
    """Placement groups: ready at once or never; bundles on the nodes that Ray chose."""

    def __init__(self, ready: bool, table: dict[str, str]) -> None:
        self.ready, self.table, self.made, self.removed = ready, table, list[Any](), 0

    def placement_group(self, bundles: Any, strategy: str, bundle_label_selector: Any = None) -> Any:
        self.made.append((bundles, strategy, bundle_label_selector))
        return SimpleNamespace(wait=lambda seconds: self.ready)

    def placement_group_table(self, group: Any) -> Any:
        return {"bundles_to_node_id": self.table}

    def remove_placement_group(self, group: Any) -> None:
        self.removed += 1


def with_groups(monkeypatch: pytest.MonkeyPatch, groups: FakeGroups) -> None:
    strategies = SimpleNamespace(
        PlacementGroupSchedulingStrategy=lambda placement_group, placement_group_bundle_index: groups.table[
            str(placement_group_bundle_index)
        ]
    )
    monkeypatch.setitem(FAKE_MODULES, "ray.util.placement_group", groups)
    monkeypatch.setitem(FAKE_MODULES, "ray.util.scheduling_strategies", strategies)


def test_together_all_gpus_are_reserved_at_once_each_on_its_node(
    drive: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = FakeGroups(ready=True, table={"0": "b", "1": "a"})
    with_groups(monkeypatch, groups)
    ended = [STARTED, read(b"", ENDED), []]
    told = drive(FakeRay(a=[*ended], b=[*ended]), together=True)
    ((bundles, strategy, selector),) = groups.made
    assert bundles == [{"GPU": 2.0, "node:10.0.0.0": 0.001}, {"GPU": 2.0, "node:10.0.0.1": 0.001}]
    assert (strategy, selector) == ("STRICT_SPREAD", [{"ray.io/node-id": "a"}, {"ray.io/node-id": "b"}])
    assert all(about(told, node)[-1]["state"] == ENDED for node in "ab")
    assert groups.removed == 1


def test_together_a_group_that_is_never_ready_starts_nothing(
    drive: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = FakeGroups(ready=False, table={})
    with_groups(monkeypatch, groups)
    ray = FakeRay(a=[], b=[])
    told = drive(ray, together=True, wait_s=0.0)
    assert all(about(told, node)[-1]["code"] == "resources" for node in "ab")
    assert "not free at once" in about(told, "a")[-1]["reason"]
    assert (ray.asked, groups.removed) == ([], 1)


def test_together_a_node_that_dies_before_the_start_is_not_waited_for(
    drive: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, ray = FakeGroups(ready=False, table={}), FakeRay(a=[], b=[])
    with_groups(monkeypatch, groups)
    made = groups.placement_group

    def dies(*given: Any, **more: Any) -> Any:
        del ray.alive["b"]
        return made(*given, **more)

    monkeypatch.setattr(groups, "placement_group", dies)
    told = drive(ray, together=True, wait_s=0.5)
    assert [about(told, node)[-1]["code"] for node in "ab"] == ["resources", "node-gone"]
    assert "the Ray node of b died" in about(told, "a")[-1]["reason"]
    assert (ray.asked, groups.removed) == ([], 1)


@pytest.mark.slow
def test_the_node_part_starts_reads_and_removes_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real host program; this process is its holder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = NodeProgram(Path(host_program.__file__).read_text())
    name = {"run": "r1", "node": "n1"}
    script = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['GPUKEEPER_NODE'])"
    request = {
        **name,
        "spec": None,
        "command": [Path(sys.executable).name, "-c", script],
        "environment": {"GPUKEEPER_NODE": "n1"},
        "deadline_s": 60.0,
        "retention_s": 60.0,
        "log_most": 1000,
        "nodes": ["n1"],
    }
    program.start(request)
    asked = {**name, "offset": 0, "token": "", "most": 1000}
    while (found := program.read(asked))[0]["state"] == "running":
        pass
    assert (found[0]["state"], found[0]["exit_code"], found[2]) == ("ended", 0, b"None n1\n")
    assert program.remove(name) == []
    assert program.read(asked)[0] is None
    with pytest.raises(RuntimeError, match="cannot be the name of a directory"):
        program.start({**request, "node": "../x"})


def test_the_plan_comes_with_the_metadata_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"nodes": [], "token": "t"}
    packed = base64.b64encode(zlib.compress(json.dumps(plan).encode())).decode()
    job = {"metadata": {ray_driver_program.PLAN: packed}, "runtime_env": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    seen: list[Any] = []
    fake = SimpleNamespace(init=lambda **what: seen.append(what))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_driver_program.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Driver, "drive", lambda self: seen.append(self.plan))
    ray_driver_program.main()
    assert seen == [{"log_to_driver": False}, plan]


def test_of_a_long_message_the_first_and_the_last_line_stay() -> None:
    assert clean("The actor died.\n  a hint\n\nbecause of\x1b[0m this.") == "The actor died.; because of[0m this"

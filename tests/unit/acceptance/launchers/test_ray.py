"""Runs on a Ray cluster, against a dashboard in memory."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase, RunSpec, Target
from gpukeeper.acceptance.launchers import ray
from gpukeeper.acceptance.launchers.ray import RayLauncher, read_log
from gpukeeper.clients import ray as rayjobs
from gpukeeper.clients.ray import Pauses, RayNode, named_nodes
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring.ray import ray_launcher as open_ray
from tests.unit.acceptance.launchers.ray_dashboard import FakeDashboard, a_node, ended, served

N1, N2 = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def dashboard() -> Iterator[FakeDashboard]:
    with served(FakeDashboard(a_node(1), a_node(2))) as made:
        yield made


def a_spec(**changes: Any) -> RunSpec:
    made = {"run": "r1", "owner": "ann", "created": datetime(2026, 1, 1, tzinfo=UTC), "engine": "ray"}
    return RunSpec(**{**made, **changes})


def a_launcher(dashboard: FakeDashboard, environ: dict[str, str] | None = None, **options: str) -> RayLauncher:
    made = open_ray({"address": dashboard.url, **options}, environ or {})
    made._settings.pauses = Pauses(settle=timedelta(0))
    return made


async def started(dashboard: FakeDashboard, **changes: Any) -> RayLauncher:
    launcher, spec = a_launcher(dashboard), a_spec(**changes)
    await launcher.start(spec, await launcher.targets(spec))
    return launcher


def targets(dashboard: FakeDashboard, options: dict[str, str] | None = None, **changes: Any) -> dict[str, Target]:
    found = asyncio.run(a_launcher(dashboard, None, **(options or {})).targets(a_spec(**changes)))
    return {one.node: one for one in found}


def plan_of(dashboard: FakeDashboard) -> dict[str, Any]:
    metadata = dashboard.jobs["gpukeeper-r1"]["metadata"]
    return cast("dict[str, Any]", json.loads(zlib.decompress(base64.b64decode(metadata["gpukeeper.io/plan"]))))


def statuses(launcher: RayLauncher) -> dict[str, NodeStatus]:
    found = asyncio.run(launcher.run("r1"))
    assert found is not None
    return {one.node: one for one in found.nodes}


def test_a_run_is_one_job_that_any_machine_finds_again(dashboard: FakeDashboard) -> None:
    async def story() -> None:
        await started(dashboard)
        dashboard.runs("r1")
        dashboard.tell("r1", node=N1, phase="running")
        dashboard.write("r1", f"{N1} | a")
        other = a_launcher(dashboard)
        (found,) = cast("tuple[Any, ...]", await other.runs())
        assert (found.spec, found.objects) == (a_spec(), ("job/gpukeeper-r1",))
        assert [(one.node, one.phase) for one in found.nodes] == [(N1, Phase.RUNNING), (N2, Phase.WAITING)]
        assert await other.output(found.spec, N1) == b"a\n"
        removal = await other.remove("r1")
        assert (removal.removed, removal.left) == (("job/gpukeeper-r1",), ())
        assert await other.run("r1") is None
        assert isinstance(await other.output(found.spec, N1), Unknown)

    asyncio.run(story())


def test_the_driver_gets_each_node_by_its_id_with_its_gpus(dashboard: FakeDashboard) -> None:
    asyncio.run(started(dashboard, gpus_per_node=1, arguments=("--quick",), environment={"NCCL_DEBUG": "INFO"}))
    plan = plan_of(dashboard)
    assert plan["command"] == ["gpukeeper", "accept", "--report-to-log", "r1", "--quick"]
    assert [(one["node"], one["id"], one["gpus"]) for one in plan["nodes"]] == [
        (N1, "1" * 56, 1.0),
        (N2, "2" * 56, 1.0),
    ]
    assert plan["nodes"][0]["environment"] == {
        "NCCL_DEBUG": "INFO",
        "GPUKEEPER_GROUP_SIZE": "1",
        "GPUKEEPER_NODE": N1,
    }
    assert dashboard.jobs["gpukeeper-r1"]["entrypoint"].startswith("exec python3 -c 'import sys; sys.path")


def test_together_every_node_gets_the_address_of_the_first(dashboard: FakeDashboard) -> None:
    asyncio.run(started(dashboard, together=True))
    plan = plan_of(dashboard)
    assert plan["together"]
    assert plan["nodes"][1]["environment"] == {
        "GPUKEEPER_NODE": N2,
        "MASTER_ADDR": N1,
        "MASTER_PORT": "29500",
        "GPUKEEPER_GROUP_SIZE": "2",
        "GPUKEEPER_GROUP_INDEX": "1",
    }


def test_a_second_start_creates_nothing(dashboard: FakeDashboard) -> None:
    asyncio.run(started(dashboard))
    token = dashboard.jobs["gpukeeper-r1"]["metadata"]["gpukeeper.io/token"]
    dashboard.ends("r1", "SUCCEEDED")
    asyncio.run(started(dashboard))
    assert dashboard.jobs["gpukeeper-r1"]["metadata"]["gpukeeper.io/token"] == token
    assert [one for one in dashboard.asked if one[0] == "POST"] == [("POST", "/api/jobs/")]


def test_a_foreign_job_with_that_name_is_never_touched(dashboard: FakeDashboard) -> None:
    dashboard.jobs["gpukeeper-r1"] = {"status": "RUNNING", "submission_id": "gpukeeper-r1", "metadata": {}}
    with pytest.raises(UsageError, match="another job has the name gpukeeper-r1"):
        asyncio.run(started(dashboard))
    assert asyncio.run(a_launcher(dashboard).remove("r1")).removed == ()
    assert asyncio.run(a_launcher(dashboard).runs()) == ()
    assert {method for method, _ in dashboard.asked} == {"GET"}


def test_a_running_job_is_stopped_and_its_record_deleted_only_when_its_actors_are_gone(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rayjobs, "STOPPING", timedelta(0))
    asyncio.run(started(dashboard))
    dashboard.runs("r1")
    dashboard.rows["actors"] = [{"actor_id": "a1", "job_id": "02000000", "state": "ALIVE"}]
    left = asyncio.run(a_launcher(dashboard).remove("r1")).left
    assert left == (("job/gpukeeper-r1", "Ray has not ended actor a1"),)
    assert dashboard.jobs["gpukeeper-r1"]["status"] == "STOPPED"
    dashboard.rows["actors"] = [{"actor_id": "a2", "job_id": "03000000", "state": "ALIVE"}]  # of another job
    dashboard.rows["placement_groups"] = [
        {"placement_group_id": "g1", "creator_job_id": "02000000", "state": "CREATED"}
    ]
    assert "placement group g1" in asyncio.run(a_launcher(dashboard).remove("r1")).left[0][1]
    dashboard.rows["placement_groups"][0]["state"] = "REMOVED"
    assert asyncio.run(a_launcher(dashboard).remove("r1")).left == ()
    assert dashboard.jobs == {}


def test_what_is_still_there_after_a_removal_is_reported(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rayjobs, "STOPPING", timedelta(0))
    asyncio.run(started(dashboard))
    dashboard.ignores_stop = True
    assert "still pending" in asyncio.run(a_launcher(dashboard).remove("r1")).left[0][1]
    dashboard.ignores_stop, dashboard.keeps = False, True
    assert asyncio.run(a_launcher(dashboard).remove("r1")).left[0][1] == "still there after it was removed"


def test_a_record_that_ray_writes_again_after_its_job_was_deleted_goes_too(dashboard: FakeDashboard) -> None:
    asyncio.run(started(dashboard))
    dashboard.ends("r1", "SUCCEEDED")
    dashboard.rows["actors"] = [
        {"actor_id": "s", "job_id": "01000000", "name": "_ray_internal_job_actor_gpukeeper-r2", "state": "ALIVE"}
    ]  # of another job
    dashboard.ghosts = 1
    assert asyncio.run(a_launcher(dashboard).remove("r1")).removed == ("job/gpukeeper-r1",)
    assert dashboard.jobs == {}


def test_the_state_of_a_node_comes_from_the_log_of_the_job(dashboard: FakeDashboard) -> None:
    asyncio.run(started(dashboard))
    launcher = a_launcher(dashboard)
    assert {one.phase for one in statuses(launcher).values()} == {Phase.WAITING}
    dashboard.runs("r1")
    dashboard.tell("r1", node=N1, phase="waiting", code="resources", reason="0 of 2 GPUs of its node are free")
    assert (statuses(launcher)[N1].code, statuses(launcher)[N1].phase) == ("resources", Phase.WAITING)
    dashboard.tell("r1", node=N1, state=ended(N1, exit_code=4, verdict="{}"))
    dashboard.tell("r1", node=N2, phase="gone", code="node-gone", reason="its Ray node died")
    found = statuses(launcher)
    assert (found[N1].phase, found[N1].exit_code, found[N1].message) == (Phase.ENDED, 4, "{}")
    assert (found[N2].phase, found[N2].code, found[N2].reason) == (Phase.GONE, "node-gone", "its Ray node died")


@pytest.mark.parametrize(
    ("status", "message", "begun", "code", "words"),
    [
        ("FAILED", "failed\nModuleNotFoundError: No module named 'ray'", False, "driver", "--option python"),
        ("FAILED", "Unexpected error: the job supervisor died", True, "vanished", "the job supervisor died"),
        ("STOPPED", "", True, "stopped", "was stopped"),
    ],
)
def test_a_node_that_had_not_ended_with_the_job_is_gone_with_the_reason(
    dashboard: FakeDashboard, status: str, message: str, begun: bool, code: str, words: str
) -> None:
    asyncio.run(started(dashboard))
    if begun:
        dashboard.runs("r1")
        dashboard.tell("r1", node=N1, phase="running")
        dashboard.tell("r1", node=N2, state=ended(N2))
    dashboard.ends("r1", status, message)
    found = statuses(a_launcher(dashboard))
    assert (found[N1].phase, found[N1].code) == (Phase.GONE, code)
    assert words in found[N1].reason
    assert found[N2].phase is (Phase.ENDED if begun else Phase.GONE)


def test_a_node_that_waited_when_the_job_ended_keeps_what_it_waited_for(dashboard: FakeDashboard) -> None:
    asyncio.run(started(dashboard))
    dashboard.runs("r1")
    dashboard.tell("r1", node=N1, phase="waiting", code="resources", reason="0 of 2 GPUs of its node are free")
    dashboard.ends("r1", "STOPPED")
    assert statuses(a_launcher(dashboard))[N1].reason == "its Ray job was stopped; 0 of 2 GPUs of its node are free"


def test_lines_of_an_earlier_job_of_that_name_do_not_count(dashboard: FakeDashboard) -> None:
    """Ray appends to the log of a job that was removed."""

    async def story() -> None:
        await started(dashboard)
        dashboard.runs("r1")
        dashboard.write("r1", f"{N1} | old")
        dashboard.tell("r1", node=N1, state=ended(N1))
        dashboard.ends("r1", "SUCCEEDED")
        launcher = a_launcher(dashboard)
        await launcher.remove("r1")
        await started(dashboard)
        found = await launcher.run("r1")
        assert found is not None
        assert found.nodes[0].phase is Phase.WAITING
        assert isinstance(await launcher.output(a_spec(), N1), Unknown)
        dashboard.runs("r1")
        dashboard.write("r1", f"{N1} | new")
        assert (await a_launcher(dashboard).output(a_spec(), N1)) == b"new\n"

    asyncio.run(story())


def test_a_record_that_was_cut_off_or_forged_is_skipped() -> None:
    """A node writes behind its own name: it cannot write a record."""
    text = "\n".join(
        [
            'gpukeeper-ray 1 {"token": "t", "begin": "2.60.0"}',
            'n1 | gpukeeper-ray 1 {"token": "t", "node": "n2", "phase": "gone"}',
            "n1 | two | three",
            "(raylet) a warning of Ray",
            'gpukeeper-ray 1 {"token": "t", "node": "n1", "phase": "running"}',
            'gpukeeper-ray 1 {"token": "t", "node": "n1", "pha',
        ]
    )
    found = read_log(text, "t", "gpukeeper")
    assert set(found.statuses) == {"n1"}
    assert bytes(found.outputs["n1"]).splitlines()[1] == b"two | three"
    assert read_log(text, "another", "gpukeeper").outputs == {}


def test_all_nodes_that_announce_a_gpu_are_selected(dashboard: FakeDashboard) -> None:
    dashboard.rows["nodes"] += [
        a_node(3, resources_total={"CPU": 4.0}),
        a_node(4, state="DEAD", state_message="health check failed"),
    ]
    assert list(targets(dashboard)) == [N1, N2]
    assert list(targets(dashboard, {"gpus": "none"})) == [N1, N2, "10.0.0.3"]
    assert list(targets(dashboard, selector="rack=r1")) == [N1]
    named = targets(dashboard, nodes=("10.0.0.3", "10.0.0.4"))
    assert "announces no GPU" in named["10.0.0.3"].excluded
    assert "dead: health check failed" in named["10.0.0.4"].excluded
    assert "announces 2 GPUs, 8 are requested" in targets(dashboard, gpus_per_node=8)[N1].excluded


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"nodes": ("10.0.0.9",)}, "Ray has no node 10.0.0.9"), ({"selector": "rack in (r1)"}, "KEY=VALUE")],
)
def test_what_cannot_be_selected_is_refused(dashboard: FakeDashboard, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        targets(dashboard, **changes)


def test_nodes_of_one_address_are_told_apart_and_a_restarted_machine_keeps_its_name() -> None:
    def node(number: str, name: str, *, alive: bool = True) -> RayNode:
        return RayNode(node_id=number * 56, ip="10.0.0.1", name=name, state="ALIVE" if alive else "DEAD")

    assert list(named_nodes([node("a", "x"), node("b", "x"), node("c", "y")])) == ["x-aaaaaaaa", "x-bbbbbbbb", "y"]
    back = named_nodes([node("d", "x", alive=False), node("e", "x")])
    assert {name: one.node_id[0] for name, one in back.items()} == {"x": "e"}


def test_render_shows_the_job_and_what_each_node_runs(dashboard: FakeDashboard) -> None:
    shown = a_launcher(dashboard).render(a_spec(), [Target(node=N1, gpus=2), Target(node=N2, excluded="dead")])
    assert f"# POST {dashboard.url}/api/jobs/" in shown
    assert '"GPUKEEPER_NODE": "10.0.0.1"' in shown
    assert "# 10.0.0.2 is left out: dead" in shown
    assert dashboard.asked == []


def test_a_run_over_more_nodes_than_a_job_can_describe_is_refused(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "METADATA_MAX", 1000)
    with pytest.raises(UsageError, match="Test the nodes in several runs"):
        asyncio.run(started(dashboard))
    assert dashboard.jobs == {}


def test_512_nodes_fit_into_one_job(dashboard: FakeDashboard) -> None:
    dashboard.rows["nodes"] = [
        a_node(
            1,
            node_id=f"{number * 7919:056x}"[::-1],
            node_ip=f"10.0.{number >> 8}.{number & 255}",
            node_name=f"g{number}",
        )
        for number in range(512)
    ]
    asyncio.run(started(dashboard, together=True))
    assert len(plan_of(dashboard)["nodes"]) == 512


def test_a_token_is_sent_to_an_address_that_a_person_named_and_to_no_other(
    dashboard: FakeDashboard, tmp_path: Path
) -> None:
    dashboard.token = "secret"
    with pytest.raises(PlatformError, match="RAY_AUTH_TOKEN"):
        asyncio.run(a_launcher(dashboard).runs())
    environ = {"RAY_AUTH_TOKEN": "secret", "RAY_ADDRESS": dashboard.url, "HOME": str(tmp_path)}
    assert asyncio.run(a_launcher(dashboard, environ).runs()) == ()
    assert asyncio.run(open_ray({}, environ).runs()) == ()
    assert open_ray({}, {**environ, "RAY_ADDRESS": "10.0.0.1:6379"})._api.address == "http://127.0.0.1:8265"
    with pytest.raises(PlatformError, match="could not be queried"):
        asyncio.run(open_ray({"address": "http://127.0.0.1:1"}, {}).runs())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pythom": "x"}, "Did you mean python?"),
        ({"address": "ray://head:10001"}, "is not the address of a Ray dashboard"),
        ({"gpus": "2"}, 'can only be "none"'),
        ({"python": "python3; rm"}, "not the name or path of an interpreter"),
        ({"wait": "soon"}, "write it like 30s"),
        ({"ca": "/nonexistent/ca.pem", "address": "https://head"}, "cannot be read"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        open_ray(options, {})

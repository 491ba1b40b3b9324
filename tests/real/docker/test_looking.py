"""Commands that only look change nothing: not a container, not an image, not a process, not even a ledger."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.real.docker import programs
from tests.real.docker.harness import MINE, Harness, ended, policy
from tests.real.docker.private_engine import DockerEngine

LOOKS = (
    ["observe"],
    ["observe", "--json"],
    ["observe", "--gpus"],
    ["observe", "--waste"],
    ["plan"],
    ["plan", "--json"],
    ["explain", "train"],
    ["workload", "list"],
    ["workload", "show", "old"],
    ["node", "list"],
    ["doctor"],
    ["ledger", "list"],
    ["policy", "show"],
)


def everything(engine: DockerEngine) -> dict[str, Any]:
    """Docker's whole view of itself, but for what ages by itself."""
    containers = {name: engine.inspect(name) for name in engine.containers()}
    images = sorted(str(image["RepoTags"]) for image in engine.api.must("GET", "/images/json"))
    changes = {name: engine.api.must("GET", f"/containers/{name}/changes") for name in containers}
    return {
        "containers": containers,
        "images": images,
        "changes": changes,
        "volumes": engine.api.must("GET", "/volumes")["Volumes"],
        "processes": {
            name: sorted(engine.pids(name)) for name, state in engine.containers().items() if state == "running"
        },
    }


def a_host_with_everything_due(engine: DockerEngine) -> str:
    """All of it would go under this policy, and nothing asks a looking command to."""
    engine.run("train", image="py:1", gpus=[0], labels=MINE, restart="always", cmd=programs.holds(engine.gpus[0].path))
    ended(engine, "old", gpus=[1], labels=MINE, config={"Volumes": {"/data": {}}})
    engine.create("never", gpus=[2], labels=MINE)
    engine.run("frozen", gpus=[3], labels=MINE, cmd=programs.trapping_shell())
    engine.pause_container("frozen")
    engine.until(lambda: engine.holders(0), "the GPU is held")
    return policy(
        retention={"succeeded": "0s", "stopped": "0s"},
        limits={"max_runtime": "1s", "never_started": "0s"},
        images={"unused": "0s"},
        scope={"docker": {}, "host": {}},
    )


def runs_for(engine: DockerEngine, name: str) -> float:
    """Seconds since its start, at least: a second is cut off."""
    found = engine.inspect(name)
    assert found is not None
    return (datetime.now(UTC) - datetime.fromisoformat(found["State"]["StartedAt"][:19] + "+00:00")).total_seconds() - 1


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_a_command_that_looks_changes_nothing(docker: DockerEngine, command: list[str]) -> None:
    text = a_host_with_everything_due(docker)
    before, since = everything(docker), time.time()
    ran = docker.gpukeeper(*command, policy=text)
    assert ran.code in (0, 3), ran
    assert docker.events(since) == []
    assert everything(docker) == before
    assert docker.holders(0) == [docker.pid("train")]
    assert not (docker.folder / "state" / "ledger.db").exists()


def test_the_same_host_is_reclaimed_when_a_user_reports_it(docker: DockerEngine) -> None:
    """So that the tests above could fail."""
    text = a_host_with_everything_due(docker)
    docker.until(lambda: runs_for(docker, "frozen") > 1, "what was started last is over max_runtime, too")
    # The first pass warns both, the second stops them.
    passes = [docker.gpukeeper("apply", "--yes", policy=text) for _ in range(2)]
    assert docker.containers() == {"train": "exited", "frozen": "exited"}, passes


def test_a_plan_in_process_writes_nothing_and_touches_nothing(docker: DockerEngine) -> None:
    a_host_with_everything_due(docker)
    harness = Harness(docker, limits={"max_runtime": "1s"})
    before, since = everything(docker), time.time()
    harness.decisions()
    assert docker.events(since) == []
    assert everything(docker) == before
    assert harness.ledger.lines == []


def test_explain_gives_the_reason_and_what_would_change_it(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    ran = docker.gpukeeper("explain", "mine", policy=policy())
    assert ran.code == 0, ran
    for words in (
        "Decision: keep",
        "label owner names nobody",
        docker.gpus[0].uuid,
        "What would change it:",
        "max_runtime",
    ):
        assert words in ran.out
    assert docker.state("mine") == "running"


def test_a_policy_that_does_not_name_docker_leaves_it_alone(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[1], labels=MINE)
    text = policy(retention={"succeeded": "0s"}, scope={"host": {}}).replace('"docker": {}, ', "", 1)
    ran = docker.gpukeeper("apply", "--yes", policy=text)
    assert ran.code in (0, 3), ran
    assert docker.state("old") == "exited"

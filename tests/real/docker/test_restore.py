"""Restore: what was stopped runs again with its restart policy; what was removed is made again from its capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, Harness, ended, policy
from tests.real.docker.private_engine import DockerEngine


def facts(engine: DockerEngine, name: str) -> dict[str, Any]:
    found = engine.inspect(name)
    assert found is not None, f"{name} is gone"
    return found


def test_what_was_stopped_runs_again_with_its_restart_policy(docker: DockerEngine) -> None:
    made = docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell(), restart="unless-stopped")
    assert docker.gpukeeper("workload", "stop", "mine", "--yes", policy=policy()).code == 0
    assert docker.state("mine") == "exited"
    ran = docker.gpukeeper("restore", "mine", policy=policy())
    assert ran.code == 0, ran
    assert (docker.id("mine"), docker.state("mine")) == (made, "running")
    assert facts(docker, "mine")["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"


@pytest.mark.smoke
def test_what_was_removed_is_made_again_as_it_was(docker: DockerEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    docker.run(
        "mine", gpus=[1], labels={**MINE, "project": "x"}, env={"SEED": "7"}, user="1000", restart="on-failure",
        binds=[f"{tmp_path}:/out"], cmd=["sh", "-c", "echo kept > /data/file"],
        config={"Volumes": {"/data": {}}, "WorkingDir": "/out", "User": "0"},
    )  # fmt: skip
    docker.until(lambda: docker.state("mine") == "exited", "it ended")
    before = facts(docker, "mine")
    text = policy(retention={"succeeded": "0s"})
    assert docker.gpukeeper("apply", "--yes", policy=text).code == 0
    assert docker.inspect("mine") is None
    ran = docker.gpukeeper("restore", "mine", policy=text)
    assert ran.code == 0, ran
    after = facts(docker, "mine")
    assert after["State"]["Status"] == "created"
    assert after["Image"] == before["Image"]
    for part in ("Env", "Labels", "Cmd", "User", "WorkingDir"):
        assert after["Config"][part] == before["Config"][part], part
    for part in ("Devices", "RestartPolicy", "NetworkMode"):
        assert after["HostConfig"][part] == before["HostConfig"][part], part
    volumes = {one["Destination"]: (one["Type"], one.get("Name"), one["Source"]) for one in before["Mounts"]}
    again = {one["Destination"]: (one["Type"], one.get("Name"), one["Source"]) for one in after["Mounts"]}
    assert again == volumes
    docker.start_container("mine")
    docker.until(lambda: docker.state("mine") == "exited", "it ran again")
    assert Path(volumes["/data"][2], "file").read_text() == "kept\n"


def test_what_we_stopped_and_then_removed_gets_the_restart_policy_from_before_the_stop(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell(), restart="always")
    harness = Harness(docker)
    harness.again()
    harness.later(minutes=30)
    harness.measured("mine")
    for _ in range(3):
        harness.again()
    assert docker.inspect("mine") is None
    assert harness.ask(SOMEBODY, "restore", "mine").done
    assert facts(docker, "mine")["HostConfig"]["RestartPolicy"]["Name"] == "always"


def test_nobody_restores_what_is_another_users(docker: DockerEngine) -> None:
    ended(docker, "mine", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    harness.again()
    assert not harness.ask("daemon", "restore", "mine").done
    assert docker.inspect("mine") is None


def test_a_name_that_is_taken_meanwhile_is_not_taken_away(docker: DockerEngine) -> None:
    ended(docker, "mine", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    harness.again()
    second = docker.run("mine", gpus=[0], labels=MINE)
    reply = harness.ask(SOMEBODY, "restore", "mine")
    assert not reply.done
    assert "that name is already in use" in reply.words
    assert (docker.id("mine"), docker.state("mine")) == (second, "running")


def test_without_its_image_it_shows_what_to_do(docker: DockerEngine) -> None:
    docker.create("source")
    docker.api.must("POST", "/commit", {}, query={"container": "source", "repo": "shortlived", "tag": "1"})
    docker.remove_container("source")
    ended(docker, "mine", image="shortlived:1", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    harness.again()
    docker.api.must("DELETE", "/images/shortlived:1")
    reply = harness.ask(SOMEBODY, "restore", "mine")
    assert not reply.done
    assert "pull or load it" in reply.words
    assert docker.inspect("mine") is None


def test_what_its_owner_started_again_is_left_running(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker)
    assert harness.ask(SOMEBODY, "stop", "mine").done
    docker.start_container("mine")
    pid = docker.pid("mine")
    harness.ask(SOMEBODY, "restore", "mine")
    assert (docker.state("mine"), docker.pid("mine")) == ("running", pid)

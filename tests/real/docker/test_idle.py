"""Idle: measured, warned, stopped, removed; and the keep-alive file, which is a lease and not a switch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpukeeper.model.decision import Action
from tests.real.docker import programs
from tests.real.docker.harness import MINE, Harness, policy
from tests.real.docker.private_engine import DockerEngine


def worker(engine: DockerEngine, name: str = "mine", **how: object) -> str:
    return engine.run(name, gpus=[0], labels=MINE, cmd=programs.trapping_shell(), **how)


def idle(engine: DockerEngine, name: str = "mine", **changes: object) -> Harness:
    """A harness half an hour later, with nothing measured but silence."""
    harness = Harness(engine, **changes)
    harness.again()
    harness.later(minutes=30)
    harness.measured(name)
    return harness


@pytest.mark.smoke
def test_what_is_idle_is_warned_then_stopped_then_removed(docker: DockerEngine) -> None:
    worker(docker)
    harness = idle(docker)
    harness.again()
    assert (docker.state("mine"), len(harness.warnings("mine"))) == ("running", 1)
    harness.again()
    assert docker.state("mine") == "exited"
    harness.again()
    assert docker.inspect("mine") is None


def test_a_class_may_keep_what_it_stopped(docker: DockerEngine) -> None:
    worker(docker)
    harness = idle(
        docker, limits={"after_idle": "keep"}, retention={"stopped": "1d", "succeeded": "1d", "failed": "7d"}
    )
    for _ in range(4):
        harness.again()
    assert docker.state("mine") == "exited"


def test_one_minute_of_work_on_the_gpu_keeps_it(docker: DockerEngine) -> None:
    worker(docker)
    harness = idle(docker)
    harness.measured("mine", gpu=90, minutes=1)
    harness.again(), harness.again()
    assert docker.state("mine") == "running"


def test_a_quiet_gpu_and_a_busy_processor_keep_it(docker: DockerEngine) -> None:
    worker(docker)
    harness = Harness(docker)
    harness.again()
    harness.later(minutes=30)
    harness.measured("mine", cpu=50.0)
    harness.again(), harness.again()
    assert docker.state("mine") == "running"


def test_what_was_not_measured_is_not_idle(docker: DockerEngine) -> None:
    worker(docker)
    harness = Harness(docker)
    harness.again()
    harness.later(hours=20)
    harness.again(), harness.again()
    assert docker.state("mine") == "running"
    assert "not measured" in harness.decisions()["mine"].reason


def test_a_restart_of_it_begins_a_new_idle_time(docker: DockerEngine) -> None:
    worker(docker)
    harness = idle(docker)
    harness.again()
    docker.api.must("POST", "/containers/mine/restart", query={"t": 1})
    harness.clock.ahead = harness.clock.ahead - harness.clock.ahead  # the new start is now
    harness.later(minutes=1)
    harness.measured("mine")
    assert harness.due("mine") is Action.KEEP
    assert docker.state("mine") == "running"


def test_a_keep_alive_file_keeps_it_for_a_day_and_no_longer(docker: DockerEngine, tmp_path: Path) -> None:
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["touch", "/workspace/.keep-alive"])
    harness = idle(docker)
    harness.again(), harness.again()
    assert docker.state("mine") == "running"
    harness.later(hours=23)
    harness.measured("mine")
    harness.again()
    assert docker.state("mine") == "running"
    docker.output("mine", ["touch", "/workspace/.keep-alive"])  # does not begin it anew
    harness.later(hours=2)
    harness.measured("mine")
    harness.again(), harness.again()
    assert docker.state("mine") == "exited"


def test_a_date_in_the_future_makes_it_no_longer(docker: DockerEngine, tmp_path: Path) -> None:
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["touch", "/workspace/.keep-alive"])
    future = time.time() + 10 * 365 * 86400
    os.utime(tmp_path / ".keep-alive", (future, future))
    harness = idle(docker)
    harness.again()
    assert docker.state("mine") == "running"
    harness.later(hours=25)
    harness.measured("mine")
    harness.again(), harness.again()
    assert docker.state("mine") == "exited"


def test_a_keep_alive_file_that_is_older_than_the_container_does_not_count(
    docker: DockerEngine, tmp_path: Path
) -> None:
    """A mounted folder outlives containers; what was written for an earlier one is not for this."""
    (tmp_path / ".keep-alive").touch()
    docker.until(lambda: time.time() - (tmp_path / ".keep-alive").stat().st_ctime > 0.1, "a moment passed")
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    harness = idle(docker)
    harness.again(), harness.again()
    assert docker.state("mine") == "exited"


def test_a_keep_alive_file_in_a_shared_directory_keeps_the_one_that_it_names(
    docker: DockerEngine, tmp_path: Path
) -> None:
    """Without a name it keeps both, and says so."""
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.run("other", gpus=[1], labels=MINE, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["touch", "/workspace/.keep-alive"])
    found = Harness(docker).subjects()
    assert [found[name].marks.keep_alive for name in ("mine", "other")] == [True, True]
    assert any("also that of other" in line for line in found["mine"].findings)
    docker.output("mine", ["sh", "-c", "echo mine > /workspace/.keep-alive"])
    found = Harness(docker).subjects()
    assert [found[name].marks.keep_alive for name in ("mine", "other")] == [True, False]
    assert not any("keep-alive" in line for line in found["other"].findings)
    (tmp_path / ".keep-alive").write_text("a long training\n")  # no name of a container: not a reason to stop one
    found = Harness(docker).subjects()
    assert [found[name].marks.keep_alive for name in ("mine", "other")] == [True, True]


def test_a_link_in_place_of_the_keep_alive_file_does_not_count(docker: DockerEngine, tmp_path: Path) -> None:
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["ln", "-s", "/etc/passwd", "/workspace/.keep-alive"])
    harness = idle(docker)
    assert harness.subject("mine").marks.keep_alive is False
    harness.again(), harness.again()
    assert docker.state("mine") == "exited"


def test_a_link_in_place_of_the_directory_is_not_followed(docker: DockerEngine, tmp_path: Path) -> None:
    """It would be resolved on the host, where a file of that name may well be."""
    (tmp_path / "elsewhere").mkdir()
    worker(docker)
    docker.output("mine", ["ln", "-s", str(tmp_path / "elsewhere"), "/workspace"])
    (tmp_path / "elsewhere" / ".keep-alive").touch()
    assert Harness(docker).subject("mine").marks.keep_alive is False


def test_nothing_inside_is_run_to_look_for_the_file(docker: DockerEngine, tmp_path: Path) -> None:
    """Programs of the container are its user's."""
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    since = time.time()
    harness = idle(docker)
    harness.again()
    assert not [action for action in docker.actions(since, container=docker.id("mine")) if "exec" in action]


def test_the_daemon_measures_and_stops_what_is_idle_and_keeps_what_is_not(docker: DockerEngine) -> None:
    """From end to end, with real counters and the engine's driver."""
    docker.run("idle", image="py:1", gpus=[0], labels=MINE, cmd=programs.holds(docker.gpus[0].path))
    docker.run("busy", image="py:1", gpus=[1], labels=MINE, cmd=programs.holds(docker.gpus[1].path))
    docker.set_gpu(1, busy=90.0)
    text = policy(
        limits={"idle": "2s", "grace": "2s"},
        activity={"tick": "1s", "signals": ["cpu"]},
        schedule={"every": "5s"},
    )
    child = docker.popen("serve", policy=text)
    docker.until(lambda: docker.state("idle") in ("exited", None), "the idle one was stopped", deadline=60)
    docker.until(lambda: docker.state("idle") is None, "and removed", deadline=120)
    child.terminate()
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert docker.state("busy") == "running", (out, err)
    assert docker.holders(1) == [docker.pid("busy")]

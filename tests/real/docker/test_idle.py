"""Idle: measured, warned, stopped, removed; and the keep-alive file, which is a lease and not a switch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpukeeper.model.decision import Action
from tests.real.docker import programs
from tests.real.docker.bed import DockerBed
from tests.real.docker.bench import MINE, Bench, policy


def worker(bed: DockerBed, name: str = "mine", **how: object) -> str:
    return bed.run(name, gpus=[0], labels=MINE, cmd=programs.trapping_shell(), **how)


def idle(bed: DockerBed, name: str = "mine", **changes: object) -> Bench:
    """A bench half an hour later, with nothing measured but silence."""
    bench = Bench(bed, **changes)
    bench.again()
    bench.later(minutes=30)
    bench.measured(name)
    return bench


def test_what_is_idle_is_warned_then_stopped_then_removed(docker: DockerBed) -> None:
    worker(docker)
    bench = idle(docker)
    bench.again()
    assert (docker.state("mine"), len(bench.warnings("mine"))) == ("running", 1)
    bench.again()
    assert docker.state("mine") == "exited"
    bench.again()
    assert docker.inspect("mine") is None


def test_a_class_may_keep_what_it_stopped(docker: DockerBed) -> None:
    worker(docker)
    bench = idle(docker, limits={"after_idle": "keep"}, retention={"stopped": "1d", "succeeded": "1d", "failed": "7d"})
    for _ in range(4):
        bench.again()
    assert docker.state("mine") == "exited"


def test_one_minute_of_work_on_the_gpu_keeps_it(docker: DockerBed) -> None:
    worker(docker)
    bench = idle(docker)
    bench.measured("mine", gpu=90, minutes=1)
    bench.again(), bench.again()
    assert docker.state("mine") == "running"


def test_a_quiet_gpu_and_a_busy_processor_keep_it(docker: DockerBed) -> None:
    worker(docker)
    bench = Bench(docker)
    bench.again()
    bench.later(minutes=30)
    bench.measured("mine", cpu=50.0)
    bench.again(), bench.again()
    assert docker.state("mine") == "running"


def test_what_was_not_measured_is_not_idle(docker: DockerBed) -> None:
    worker(docker)
    bench = Bench(docker)
    bench.again()
    bench.later(hours=20)
    bench.again(), bench.again()
    assert docker.state("mine") == "running"
    assert "not measured" in bench.decisions()["mine"].reason


def test_a_restart_of_it_begins_a_new_idle_time(docker: DockerBed) -> None:
    worker(docker)
    bench = idle(docker)
    bench.again()
    docker.api.must("POST", "/containers/mine/restart", query={"t": 1})
    bench.clock.ahead = bench.clock.ahead - bench.clock.ahead  # the new start is now
    bench.later(minutes=1)
    bench.measured("mine")
    assert bench.due("mine") is Action.KEEP
    assert docker.state("mine") == "running"


def test_a_keep_alive_file_keeps_it_for_a_day_and_no_longer(docker: DockerBed, tmp_path: Path) -> None:
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["touch", "/workspace/.keep-alive"])
    bench = idle(docker)
    bench.again(), bench.again()
    assert docker.state("mine") == "running"
    bench.later(hours=23)
    bench.measured("mine")
    bench.again()
    assert docker.state("mine") == "running"
    docker.output("mine", ["touch", "/workspace/.keep-alive"])  # does not begin it anew
    bench.later(hours=2)
    bench.measured("mine")
    bench.again(), bench.again()
    assert docker.state("mine") == "exited"


def test_a_date_in_the_future_makes_it_no_longer(docker: DockerBed, tmp_path: Path) -> None:
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["touch", "/workspace/.keep-alive"])
    future = time.time() + 10 * 365 * 86400
    os.utime(tmp_path / ".keep-alive", (future, future))
    bench = idle(docker)
    bench.again()
    assert docker.state("mine") == "running"
    bench.later(hours=25)
    bench.measured("mine")
    bench.again(), bench.again()
    assert docker.state("mine") == "exited"


def test_a_keep_alive_file_that_is_older_than_the_container_does_not_count(docker: DockerBed, tmp_path: Path) -> None:
    """A mounted folder outlives containers; what was written for an earlier one is not for this."""
    (tmp_path / ".keep-alive").touch()
    docker.until(lambda: time.time() - (tmp_path / ".keep-alive").stat().st_ctime > 0.1, "a moment passed")
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    bench = idle(docker)
    bench.again(), bench.again()
    assert docker.state("mine") == "exited"


def test_a_link_in_place_of_the_keep_alive_file_does_not_count(docker: DockerBed, tmp_path: Path) -> None:
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    docker.output("mine", ["ln", "-s", "/etc/passwd", "/workspace/.keep-alive"])
    bench = idle(docker)
    assert bench.subject("mine").marks.keep_alive is False
    bench.again(), bench.again()
    assert docker.state("mine") == "exited"


def test_a_link_in_place_of_the_folder_is_not_followed(docker: DockerBed, tmp_path: Path) -> None:
    """It would be resolved on the host, where a file of that name may well be."""
    (tmp_path / "elsewhere").mkdir()
    worker(docker)
    docker.output("mine", ["ln", "-s", str(tmp_path / "elsewhere"), "/workspace"])
    (tmp_path / "elsewhere" / ".keep-alive").touch()
    assert Bench(docker).subject("mine").marks.keep_alive is False


def test_nothing_inside_is_run_to_look_for_the_file(docker: DockerBed, tmp_path: Path) -> None:
    """Programs of the container are its user's."""
    worker(docker, binds=[f"{tmp_path}:/workspace"])
    since = time.time()
    bench = idle(docker)
    bench.again()
    assert not [action for action in docker.actions(since, container=docker.id("mine")) if "exec" in action]


def test_the_daemon_measures_and_stops_what_is_idle_and_keeps_what_is_not(docker: DockerBed) -> None:
    """From end to end, with real counters and the bed's driver."""
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
    docker.until(lambda: docker.state("idle") is None, "and removed", deadline=30)
    child.terminate()
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert docker.state("busy") == "running", (out, err)
    assert docker.holders(1) == [docker.pid("busy")]

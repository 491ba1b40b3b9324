"""A stop: the GPU's own processes are told first, restart policies do not bring it back, and its user wins."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.model.decision import Accepted, Action, Result
from tests.real.docker import kernel, programs
from tests.real.docker.harness import MINE, Harness, policy
from tests.real.docker.private_engine import DockerEngine

HOLDS = "import os, signal; os.open({path!r}, os.O_RDWR); signal.pause()"


def restart_policy(engine: DockerEngine, name: str) -> str:
    found = engine.inspect(name)
    assert found is not None
    return str(found["HostConfig"]["RestartPolicy"]["Name"])


def stopped_by_us(harness: Harness, name: str) -> Any:
    """The platform's own answer, without the looks of a whole step afterwards."""
    return harness.run(harness.platform.act(harness.asked(name, Action.STOP), harness.subject(name)))


@pytest.mark.smoke
def test_a_job_started_beside_the_first_process_saves_its_work_before_the_container_ends(
    docker: DockerEngine, tmp_path: Path
) -> None:
    """As from an editor's terminal. The first process would leave at once on SIGTERM and take it along."""
    tmp_path.chmod(0o777)
    docker.run("dev", image="py:1", gpus=[0], labels=MINE, cmd=programs.trapping_shell(), binds=[f"{tmp_path}:/out"])
    docker.exec("dev", programs.saves(docker.gpus[0].path, "/out/checkpoint", seconds=1))
    docker.until(lambda: docker.holders(0), "the job holds the GPU")
    ran = docker.gpukeeper("workload", "stop", "dev", "--yes", policy=policy())
    assert ran.code == 0, ran
    assert (tmp_path / "checkpoint").read_text() == "saved"
    assert docker.state("dev") == "exited"
    assert docker.holders(0) == []


def test_a_first_process_without_a_handler_gets_the_whole_time_and_then_ends(
    docker: DockerEngine, tmp_path: Path
) -> None:
    """`sleep` as the first process never hears SIGTERM; the job beside it does."""
    tmp_path.chmod(0o777)
    docker.run("deaf", image="py:1", gpus=[0], labels=MINE, binds=[f"{tmp_path}:/out"])
    docker.exec("deaf", programs.saves(docker.gpus[0].path, "/out/checkpoint"))
    docker.until(lambda: docker.holders(0), "the job holds the GPU")
    assert stopped_by_us(Harness(docker), "deaf") == Accepted()
    assert (tmp_path / "checkpoint").read_text() == "saved"
    found = docker.inspect("deaf")
    assert found is not None
    assert (found["State"]["Status"], found["State"]["ExitCode"]) == ("exited", 137)


def test_every_worker_that_shares_the_device_is_reported(docker: DockerEngine) -> None:
    docker.run("loader", image="py:1", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.exec("loader", programs.forks_and_waits(docker.gpus[0].path, 2))
    docker.until(lambda: len(docker.holders(0)) == 3, "a parent and two workers")
    assert stopped_by_us(Harness(docker), "loader") == Accepted()
    assert docker.holders(0) == []
    assert docker.state("loader") == "exited"


def test_others_on_the_same_gpu_are_not_told(docker: DockerEngine) -> None:
    """Neither a container that shares it nor a process of the bare host."""
    path = docker.gpus[0].path
    docker.run("mine", image="py:1", gpus=[0], labels=MINE, cmd=programs.holds(path))
    docker.run("theirs", image="py:1", gpus=[0], labels={"owner": "daemon"}, cmd=programs.holds(path))
    bare = docker.beside([sys.executable, "-c", HOLDS.format(path=path)])
    docker.until(lambda: len(docker.holders(0)) == 3, "all three hold it")
    theirs = docker.pid("theirs")
    assert stopped_by_us(Harness(docker), "mine") == Accepted()
    assert docker.state("mine") == "exited"
    assert sorted(docker.holders(0)) == sorted([theirs, bare])
    assert docker.state("theirs") == "running"


def test_the_signal_that_an_image_asks_for_is_the_one_its_first_process_gets(docker: DockerEngine) -> None:
    told = ["sh", "-c", 'trap "echo told; exit 7" 2; while sleep 1 & wait $!; do :; done']
    docker.run("polite", gpus=[0], labels=MINE, cmd=told, stop_signal="SIGINT")
    assert stopped_by_us(Harness(docker), "polite") == Accepted()
    found = docker.inspect("polite")
    assert found is not None
    assert found["State"]["ExitCode"] == 7
    assert docker.logs("polite") == "told\n"


@pytest.mark.parametrize("moment", [0.0, 0.08, 0.16, 0.26])
def test_a_user_who_restarts_it_during_our_stop_wins_and_keeps_the_restart_policy(
    docker: DockerEngine, tmp_path: Path, moment: float
) -> None:
    """Whenever it comes: a restart is a stop and a start, and ours falls before, between or after."""
    tmp_path.chmod(0o777)
    made = docker.run(
        "mine", image="py:1", gpus=[0], labels=MINE, cmd=programs.trapping_shell(), restart="always",
        binds=[f"{tmp_path}:/out"],
    )  # fmt: skip
    docker.exec("mine", programs.saves(docker.gpus[0].path, "/out/checkpoint", seconds=4))
    docker.until(lambda: docker.holders(0), "the job holds the GPU")
    harness = Harness(docker)
    step, fresh = harness.asked("mine", Action.STOP), harness.subject("mine")

    async def both() -> object:
        stopping = asyncio.create_task(harness.platform.act(step, fresh))
        await asyncio.to_thread(docker.until, lambda: restart_policy(docker, "mine") == "no", "our stop began")
        await asyncio.sleep(moment)
        await asyncio.to_thread(docker.api.must, "POST", "/containers/mine/restart", query={"t": 0})
        return await stopping

    harness.run(both())
    assert (docker.id("mine"), docker.state("mine")) == (made, "running")
    assert restart_policy(docker, "mine") == "always"
    assert harness.subject("mine").seen.incarnation != fresh.seen.incarnation


def test_what_was_started_again_since_the_plan_is_left_alone(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, limits={"max_runtime": "2h"})
    harness.later(hours=3)
    harness.again()
    step = harness.step("mine")
    assert step.decision.action is Action.STOP
    docker.api.must("POST", "/containers/mine/restart", query={"t": 1})
    assert harness.take(step).result is Result.CHANGED
    assert docker.state("mine") == "running"


def test_one_of_the_same_name_that_took_its_place_is_left_alone(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, limits={"max_runtime": "2h"})
    harness.later(hours=3)
    harness.again()
    step = harness.step("mine")
    docker.remove_container("mine")
    second = docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    assert harness.take(step).result is Result.CHANGED
    assert (docker.id("mine"), docker.state("mine")) == (second, "running")


@pytest.mark.parametrize("how", ["always", "unless-stopped", "on-failure"])
def test_a_restart_policy_does_not_bring_it_back(docker: DockerEngine, how: str) -> None:
    ends_badly = ["sh", "-c", 'trap "exit 3" 15; while sleep 1 & wait $!; do :; done']
    docker.run("mine", gpus=[0], labels=MINE, cmd=ends_badly, restart=how)
    reply = Harness(docker).ask("root", "stop", "mine")
    assert reply.done, reply
    assert docker.state("mine") == "exited"
    docker.restart()
    assert docker.state("mine") == "exited"
    assert docker.pid("mine") == 0


def test_a_job_that_ignores_the_signal_does_not_hold_up_the_stop(docker: DockerEngine) -> None:
    docker.run("stubborn", image="py:1", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    pid = docker.exec("stubborn", programs.ignores_sigterm(docker.gpus[0].path))
    docker.until(lambda: docker.holders(0), "the job holds the GPU")
    assert stopped_by_us(Harness(docker), "stubborn") == Accepted()
    assert docker.state("stubborn") == "exited"
    assert kernel.state(pid) in ("", "Z")


def test_runtime_adds_up_over_restarts(docker: DockerEngine) -> None:
    """Restarting it does not begin a new day: what it ran before counts."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, limits={"max_runtime": "10s"}, warnings={"runtime": ["60%"]}, activity={"tick": "1s"})
    harness.again()
    docker.until(lambda: harness.decisions()["mine"].action is not Action.KEEP, "most of its time is over")
    docker.api.must("POST", "/containers/mine/restart", query={"t": 1})
    began = harness.clock.now()
    docker.until(lambda: harness.again().reclaimed, "it was stopped")
    assert docker.state("mine") == "exited"
    assert (harness.outcomes("mine")[-1].at - began).total_seconds() < 10

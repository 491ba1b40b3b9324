"""An engine or a container that does not answer stalls nobody, and what is not known is kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.model.decision import Result
from gpukeeper.model.unknown import Unknown
from tests.real.docker import programs
from tests.real.docker.harness import MINE, Harness, ended, policy
from tests.real.docker.private_engine import DockerEngine


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_container_whose_keeper_hangs_does_not_hold_up_the_others(docker: DockerEngine) -> None:
    docker.run("stuck", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    ended(docker, "old", gpus=[1], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    with frozen(parent(docker.pid("stuck"))):
        harness.again()
        assert docker.inspect("old") is None
    assert docker.state("stuck") == "running"


def test_an_engine_that_hangs_ends_the_command_with_a_sentence(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE)
    with frozen(docker.engine_pid):
        ran = docker.gpukeeper("plan", policy=policy(), deadline=120)
    assert "did not answer" in ran.out + ran.err
    assert docker.state("mine") == "running"


@pytest.mark.smoke
def test_an_engine_that_is_not_there_is_reported_and_nothing_vanishes(docker: DockerEngine) -> None:
    """Not answering is not "gone": nothing is recorded as vanished."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker)
    harness.again()
    before = len(harness.ledger.lines)
    docker.kill9()
    report = harness.again()
    assert report.survey.unseen
    assert [type(line).__name__ for line in harness.ledger.lines[before:]] == ["Passed"]
    docker.start()
    docker.until(lambda: docker.inspect("mine") is not None, "it is still known")


def test_an_engine_that_is_down_is_never_nothing_to_do(docker: DockerEngine) -> None:
    """C6.2: by the commands; errors went to nowhere, and a dead engine read as an empty one.

    It failed: what succeeds shortly before a start of the engine counts as stopped by it, and is kept longer.
    """
    ended(docker, "old", code=3, gpus=[0], labels=MINE)
    text = policy(retention={"succeeded": "0s", "failed": "0s"})
    docker.kill9()
    planned = docker.gpukeeper("plan", "--exit-code", policy=text)
    assert (planned.code, planned.out) == (1, ""), planned
    applied = docker.gpukeeper("apply", "--yes", policy=text)
    assert applied.code == 3, applied
    for ran in (planned, applied):
        assert "could not be read" in ran.err
    assert "of what could be read" in planned.err
    docker.start()
    assert docker.gpukeeper("apply", "--yes", policy=text).code == 0
    assert docker.inspect("old") is None


def test_an_engine_that_dies_before_the_step_leaves_it_undone(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    step = harness.step("old")
    docker.kill9()
    outcome = harness.take(step)
    assert outcome.result not in (Result.RECLAIMED,)
    docker.start()
    assert docker.state("old") == "exited"


def test_a_read_of_an_engine_that_is_gone_is_unknown_never_gone(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker)
    ref = harness.subject("mine").ref
    docker.kill9()
    assert isinstance(harness.run(harness.platform.read(ref)), Unknown)
    docker.start()


def test_after_a_restart_of_the_engine_the_daemon_hears_it_again(docker: DockerEngine) -> None:
    child = docker.popen("serve", policy=policy(retention={"succeeded": "1s"}, schedule={"every": "300s"}))
    docker.until((docker.folder / "state" / "socket").exists, "the daemon listens")
    docker.restart()
    ended(docker, "old", gpus=[0], labels=MINE)
    docker.until(lambda: docker.inspect("old") is None, "its end was heard, and it went", deadline=60)
    child.terminate()
    child.communicate(timeout=30)
    assert child.returncode == 0

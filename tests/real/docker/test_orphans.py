"""Processes that a container left behind on a GPU: ended with proof, everybody else never."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukeeper.model.decision import Action
from tests.real.docker import kernel, programs
from tests.real.docker.harness import MINE, Harness, ended
from tests.real.docker.private_engine import DockerEngine

HOLDS = "import os, signal; os.open({path!r}, os.O_RDWR); signal.pause()"
DEAF = "import os, signal; signal.signal(15, signal.SIG_IGN); os.open({path!r}, os.O_RDWR); signal.pause()"
A_STRANGERS = "ab" * 32


def left_behind(engine: DockerEngine, container: str, program: str = HOLDS) -> int:
    """A process that holds the third GPU in the cgroup of a container."""
    pid = engine.beside([sys.executable, "-c", program.format(path=engine.gpus[2].path)], cgroup_of=container)
    engine.until(lambda: pid in engine.holders(2), "it holds the GPU")
    return pid


def alive(pid: int) -> bool:
    return kernel.state(pid) not in ("", "Z")


def of_an_ended_container(engine: DockerEngine, program: str = HOLDS) -> int:
    """It began before the container ended, as every real remainder did."""
    pid = engine.beside([sys.executable, "-c", program.format(path=engine.gpus[2].path)])
    engine.until(lambda: pid in engine.holders(2), "it holds the GPU")
    made = ended(engine, "old", gpus=[2], labels=MINE)
    for root in (one for one in kernel.cgroup_roots() if one.name in ("cgroup", "devices", "pids")):
        folder = root / engine.container_cgroup.format(id=made)
        folder.mkdir(parents=True, exist_ok=True)
        engine._cgroups.append(folder)
        (folder / "cgroup.procs").write_text(str(pid))
    assert made in Path(f"/proc/{pid}/cgroup").read_text()
    return pid


@pytest.mark.smoke
def test_the_remainder_of_an_ended_container_is_ended(docker: DockerEngine) -> None:
    pid = of_an_ended_container(docker)
    harness = Harness(docker)
    harness.again()
    assert alive(pid)
    harness.later(minutes=2)
    harness.again()
    docker.until(lambda: not alive(pid), "it was ended")
    assert docker.holders(2) == []
    assert docker.state("old") == "exited"


def test_the_remainder_of_a_removed_container_is_ended(docker: DockerEngine) -> None:
    made = docker.run("gone", gpus=[2], labels=MINE)
    harness = Harness(docker)
    harness.again()
    docker.remove_container("gone")
    harness.again()
    pid = left_behind(docker, made)
    harness.again()
    assert alive(pid)  # its time begins when it is first seen without its container
    harness.later(minutes=2)
    harness.again()
    docker.until(lambda: not alive(pid), "it was ended")


def test_one_that_ignores_the_first_signal_gets_the_last(docker: DockerEngine) -> None:
    pid = of_an_ended_container(docker, DEAF)
    harness = Harness(docker)
    harness.later(minutes=2)
    harness.again()
    docker.until(lambda: not alive(pid), "it was ended")


def test_a_bystander_of_the_bare_host_is_never_touched(docker: DockerEngine) -> None:
    bystander = docker.beside([sys.executable, "-c", HOLDS.format(path=docker.gpus[2].path)])
    pid = of_an_ended_container(docker)
    harness = Harness(docker)
    harness.later(minutes=2)
    harness.again()
    docker.until(lambda: not alive(pid), "the remainder was ended")
    assert alive(bystander)
    assert docker.holders(2) == [bystander]


def test_the_container_of_another_engine_is_never_touched(docker: DockerEngine) -> None:
    """The same kind of cgroup, an id that this engine never had: it may be alive elsewhere."""
    pid = left_behind(docker, A_STRANGERS)
    harness = Harness(docker)
    harness.again()
    harness.later(days=3)
    report = harness.again()
    assert not report.outcomes
    assert alive(pid)
    orphan = next(one for one in harness.decisions().values() if str(pid) in one.seen.ref.name)
    assert (orphan.action, "no proof" in orphan.reason) == (Action.KEEP, True)


def test_what_runs_in_a_running_container_is_no_remainder(docker: DockerEngine) -> None:
    docker.run("mine", image="py:1", gpus=[2], labels=MINE, cmd=programs.trapping_shell())
    docker.exec("mine", programs.forks_and_ends(docker.gpus[2].path))
    docker.until(lambda: docker.holders(2), "the child holds it")
    held = docker.holders(2)
    harness = Harness(docker)
    harness.again()
    harness.later(hours=2)
    harness.again()
    assert docker.holders(2) == held
    assert docker.state("mine") == "running"


def test_one_that_began_after_the_end_is_not_its_remainder(docker: DockerEngine) -> None:
    """A pid or a cgroup that was used again proves nothing."""
    made = ended(docker, "old", gpus=[2], labels=MINE)
    harness = Harness(docker)
    harness.again()
    # The kernel tells starts in whole seconds since boot, so that two or three of them prove nothing.
    docker.until(lambda: _seconds_since_end(docker, "old") > 5, "the end is a while ago")
    pid = left_behind(docker, made)
    harness.later(minutes=2)
    harness.again()
    assert alive(pid)


def test_a_policy_may_only_report_them(docker: DockerEngine) -> None:
    pid = of_an_ended_container(docker)
    harness = Harness(docker, orphans=False)
    harness.later(minutes=2)
    harness.again()
    assert alive(pid)


def _seconds_since_end(engine: DockerEngine, name: str) -> float:
    found = engine.inspect(name)
    assert found is not None
    return (datetime.now(UTC) - datetime.fromisoformat(found["State"]["FinishedAt"][:19] + "+00:00")).total_seconds()

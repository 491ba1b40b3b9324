"""Podman by the same API. What every platform must keep is in the contract suite; here, that it really works."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.model.decision import Accepted, Action
from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, Harness, ended
from tests.real.docker.private_engine import PodmanEngine


@pytest.mark.smoke
def test_podman_removes_what_is_over(podman: PodmanEngine) -> None:
    ended(podman, "old", gpus=[0], labels=MINE)
    podman.run("young", gpus=[1], labels=MINE)
    harness = Harness(podman)
    # It names devices by their numbers, which all pretended GPUs share: that it has one is all that can be asked.
    assert harness.subject("young").class_ != "without-gpu"
    harness.later(minutes=90)
    harness.again()
    assert podman.containers() == {"young": "running"}


def test_what_podman_removed_is_made_again_with_its_device(podman: PodmanEngine) -> None:
    """Podman 4.3 reports a device without its access, and refuses to create a container so."""
    ended(podman, "mine", gpus=[0], labels=MINE)
    before = podman.inspect("mine")
    harness = Harness(podman)
    harness.later(minutes=90)
    harness.again()
    assert podman.inspect("mine") is None
    reply = harness.ask(SOMEBODY, "restore", "mine")
    assert reply.done, reply
    after = podman.inspect("mine")
    assert before is not None
    assert after is not None
    assert after["HostConfig"]["Devices"] == before["HostConfig"]["Devices"]
    assert podman.start_container("mine").ok
    podman.until(lambda: podman.state("mine") == "exited", "it ran again")
    assert "mine was here" in podman.logs("mine")


def test_podmans_jobs_save_before_their_container_ends(podman: PodmanEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    podman.run("dev", image="py:1", gpus=[0], labels=MINE, cmd=programs.trapping_shell(), binds=[f"{tmp_path}:/out"])
    podman.exec("dev", programs.saves(podman.gpus[0].path, "/out/checkpoint"))
    podman.until(lambda: podman.holders(0), "the job holds the GPU")
    harness = Harness(podman)
    answer = harness.run(harness.platform.act(harness.asked("dev", Action.STOP), harness.subject("dev")))
    assert answer == Accepted()
    assert (tmp_path / "checkpoint").read_text() == "saved"
    assert podman.state("dev") == "exited"

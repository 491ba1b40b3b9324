"""What an engine forgets and the ledger knows: a GPU that was only held, who stopped it, since when an image is unused.

Every look after the stop is that of another gpukeeper, which has the ledger and nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.model.decision import Action
from gpukeeper.model.subject import Outcome
from tests.real.docker import programs
from tests.real.docker.harness import MINE, Harness
from tests.real.docker.private_engine import DockerEngine
from tests.real.docker.test_leftovers import image, is_there, no_images_are_left

__all__ = ["no_images_are_left"]
HIDDEN: dict[str, dict[str, Any]] = {
    "the folder": {"binds": ["/dev:/dev"]},
    "privileged": {"host_config": {"Privileged": True}},
}
LIMITS = {"after_idle": "keep", "hold_after_stop": "0s"}


def another(harness: Harness, **changes: Any) -> Harness:
    """A gpukeeper that was started anew over the same ledger, at the same time."""
    made = Harness(harness.engine, **changes)
    made.ledger, made.signals, made.evidence = InMemoryLedger(harness.ledger.lines), harness.signals, harness.evidence
    made.clock.ahead = harness.clock.ahead
    made.keeper = made._keeper()
    return made


def stopped_for_idleness(harness: Harness, name: str) -> None:
    harness.again()
    harness.later(minutes=30)
    harness.measured(name)
    harness.again(), harness.again()
    assert harness.engine.state(name) == "exited"


@pytest.mark.parametrize("how", HIDDEN)
def test_a_gpu_that_nothing_in_its_description_names_is_remembered_when_it_was_stopped(
    docker: DockerEngine, how: str
) -> None:
    made = docker.create("sly", image="py:1", labels=MINE, cmd=programs.holds(docker.gpus[0].path), **HIDDEN[how])
    started = docker.start_container(made)
    if not started.ok and "unable to apply caps" in str(started):
        pytest.skip("this machine lets nobody start a privileged container")
    assert started.ok, started
    docker.until(lambda: docker.holders(0), "it opened the GPU")
    harness = Harness(docker)
    assert harness.subject("sly").class_ == "docker"
    stopped_for_idleness(harness, "sly")
    assert harness.subject("sly").class_ == "without-gpu", "the engine does not know"
    second = another(harness)
    second.again()
    assert docker.inspect("sly") is None


def test_one_that_opened_its_gpu_after_it_was_first_seen_is_remembered(docker: DockerEngine) -> None:
    path = docker.gpus[0].path
    docker.run("sly", image="py:1", labels=MINE, binds=[f"{path}:{path}"], cmd=programs.trapping_shell())
    harness = Harness(docker)
    harness.again()
    docker.exec("sly", programs.holds(path))
    docker.until(lambda: docker.holders(0), "it opened the GPU")
    stopped_for_idleness(harness, "sly")
    another(harness).again()
    assert docker.inspect("sly") is None


def test_what_never_had_a_gpu_is_left_alone_when_it_ended(docker: DockerEngine) -> None:
    docker.run("web", labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker)
    harness.again()
    docker.stop_container("web")
    harness.later(days=30)
    another(harness).again()
    assert docker.state("web") == "exited"


def test_after_a_restart_of_the_engine_what_we_stopped_is_still_what_we_stopped(docker: DockerEngine) -> None:
    """It ends with an exit code that reads as a failure, which is kept for two hours; stopped is kept for one."""
    ends_badly = ["sh", "-c", 'trap "exit 3" 15; while sleep 1 & wait $!; do :; done']
    docker.run("mine", gpus=[0], labels=MINE, cmd=ends_badly)
    harness = Harness(docker, limits=LIMITS)
    stopped_for_idleness(harness, "mine")
    docker.restart()
    second = another(harness, limits=LIMITS)
    assert second.subject("mine").outcome is Outcome.FAILED, "the engine does not know"
    assert "stopped" in second.decisions()["mine"].reason
    second.later(minutes=90)
    assert second.due("mine") is Action.REMOVE


def test_after_a_restart_of_the_engine_what_a_person_stopped_was_stopped(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, limits=LIMITS)
    harness.again()
    docker.stop_container("mine")
    harness.again()
    assert "stopped" in harness.decisions()["mine"].reason
    docker.restart()
    assert "stopped" in another(harness, limits=LIMITS).decisions()["mine"].reason


def test_a_restart_of_the_engine_does_not_make_an_image_used(docker: DockerEngine) -> None:
    unused = {"unused": "1h", "keep": ["box:*", "py:*"]}
    image(docker, "nightly:1")
    harness = Harness(docker, images=unused)
    harness.again()
    docker.create("short", image="nightly:1")
    docker.remove_container("short")
    harness.again()
    harness.later(minutes=50)
    docker.restart()
    second = another(harness, images=unused)
    second.again()
    assert is_there(docker, "nightly:1")
    second.later(minutes=20)
    second.again()
    assert not is_there(docker, "nightly:1")

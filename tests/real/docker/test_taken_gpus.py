"""A container that its owner stopped and started again, on a GPU that went to another user meanwhile (C9.4)."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from gpukeeper.model import reading
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Complaint, WarningSent
from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, SOMEBODY_ELSE, Harness
from tests.real.docker.private_engine import DockerEngine

RULE = "taken_gpu"
HELD = timedelta(seconds=1)


def harness_of(docker: DockerEngine, hold: str, **changes: Any) -> Harness:
    return Harness(docker, limits={"hold_after_stop": hold}, **changes)


def restarted_beside_a_tenant(docker: DockerEngine, harness: Harness) -> None:
    """Stopped by its owner; the tenant starts after HELD; then the first one is started again."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness.again()
    docker.stop_container("mine")
    harness.again()
    found = docker.inspect("mine")
    assert found is not None
    ended = reading.moment(found["State"]["FinishedAt"])
    docker.until(lambda: time.time() > (ended + HELD).timestamp(), "the hold is over")
    docker.run("tenant", gpus=[0], labels={"owner": SOMEBODY_ELSE}, cmd=programs.trapping_shell())
    harness.again()
    docker.start_container("mine")


def test_its_owner_is_warned_once_admins_are_notified_and_both_run_on(docker: DockerEngine) -> None:
    harness = harness_of(docker, "1s")
    restarted_beside_a_tenant(docker, harness)
    for _ in range(3):
        harness.again()
    (warning,) = [line for line in harness.ledger.lines if isinstance(line, WarningSent)]
    assert (warning.rule, warning.owner) == (RULE, SOMEBODY)
    assert f"docker/here/tenant of {SOMEBODY_ELSE} has held" in warning.message
    assert any(f"restarted on GPU {docker.gpus[0].uuid}" in line.what for line in complaints(harness))
    assert docker.containers() == {"mine": "running", "tenant": "running"}


def test_the_setting_stops_it_after_the_warning_and_never_the_tenant(docker: DockerEngine) -> None:
    harness = harness_of(docker, "1s", gpu={"stop_on_taken": True})
    restarted_beside_a_tenant(docker, harness)
    harness.again()
    assert docker.state("mine") == "running"
    harness.again()
    assert docker.containers() == {"mine": "exited", "tenant": "running"}
    outcome = harness.outcomes("mine")[-1]
    assert (outcome.rule, outcome.action, outcome.result) == (RULE, Action.STOP, Result.RECLAIMED)


def test_whoever_starts_within_the_hold_is_no_new_tenant(docker: DockerEngine) -> None:
    """The GPU is still the owner's: for 15 minutes by default, in the time of the engine."""
    harness = harness_of(docker, "15m", gpu={"stop_on_taken": True})
    restarted_beside_a_tenant(docker, harness)
    harness.again(), harness.again()
    assert not [line for line in harness.ledger.lines if isinstance(line, WarningSent)]
    assert docker.containers() == {"mine": "running", "tenant": "running"}


def complaints(harness: Harness) -> list[Complaint]:
    return [line for line in harness.ledger.lines if isinstance(line, Complaint)]

"""Volumes and networks: only what no container refers to, only by policy, and no volume that has a name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpukeeper.model.decision import Action, Changed, Refused, Result, Verdict
from gpukeeper.model.subject import Shape, Subject
from tests.real.docker.harness import MINE, Harness
from tests.real.docker.private_engine import DockerEngine, PodmanEngine, PrivateEngine

ANONYMOUS = "a1" * 32
REMOVED = {"volumes": {"anonymous_unused": "1h"}, "networks": {"unused": "1h"}}


@pytest.fixture(autouse=True)
def nothing_is_left(docker: DockerEngine) -> Iterator[None]:
    yield
    for container in docker.containers():
        docker.remove_container(container)
    for volume in docker.api.must("GET", "/volumes")["Volumes"] or ():
        docker.api.call("DELETE", f"/volumes/{volume['Name']}")
    for network in docker.api.must("GET", "/networks"):
        if network["Name"].startswith("lab"):
            docker.api.call("DELETE", f"/networks/{network['Id']}")


def volume(docker: PrivateEngine, name: str = ANONYMOUS, **more: object) -> str:
    docker.api.must("POST", "/volumes/create", {"Name": name, **more})
    return name


def network(docker: PrivateEngine, name: str = "lab") -> str:
    return str(docker.api.must("POST", "/networks/create", {"Name": name})["Id"])


def has_volume(docker: PrivateEngine, name: str = ANONYMOUS) -> bool:
    return docker.api.call("GET", f"/volumes/{name}").ok


def has_network(docker: PrivateEngine, name: str = "lab") -> bool:
    return docker.api.call("GET", f"/networks/{name}").ok


def user(docker: DockerEngine, name: str = "user", **how: Any) -> None:
    """A container that has both, and never started."""
    binds = [f"{ANONYMOUS}:/data"]
    docker.create(name, cmd=["true"], binds=binds, network="lab", **how)


def found(harness: Harness, shape: Shape) -> Subject:
    (one,) = [one for one in harness.subjects().values() if one.shape is shape]
    return one


def unused(docker: PrivateEngine, **policy: Any) -> Harness:
    """A volume without a name and a network, seen unused for two hours."""
    volume(docker), network(docker)
    harness = Harness(docker, **(policy or REMOVED))
    harness.again()
    harness.later(hours=2)
    return harness


def test_both_are_only_reported_without_a_policy_for_them(docker: DockerEngine) -> None:
    harness = unused(docker, images={})
    decided = harness.decisions()
    for name, kind in (("volume-a1a1a1a1a1a1", "volume"), ("lab", "network")):
        assert decided[name].verdict is Verdict.REPORT
        assert f"only reports unused {kind}s" in decided[name].reason
        asked = harness.asked(name, Action.REMOVE)
        assert isinstance(harness.run(harness.platform.act(asked, harness.looked(name))), Refused)
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (True, True)


def test_both_go_when_they_were_seen_unused_for_long_enough_and_their_description_is_kept(
    docker: DockerEngine,
) -> None:
    harness = unused(docker)
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (False, False)
    for name, word in (("volume-a1a1a1a1a1a1", ANONYMOUS), ("lab", "lab")):
        (outcome,) = harness.outcomes(name)
        assert outcome.result is Result.RECLAIMED, outcome
        assert word in json.dumps(json.loads(harness.captured(name)["manifest.json"]))


def test_what_came_with_the_engine_is_not_listed(docker: DockerEngine) -> None:
    harness = Harness(docker, **REMOVED)
    assert [one.ref.name for one in harness.subjects().values() if one.shape is Shape.NETWORK] == []


def test_a_volume_with_a_name_stays_however_old(docker: DockerEngine) -> None:
    volume(docker, "results")
    harness = Harness(docker, **REMOVED)
    harness.again()
    harness.later(days=300)
    harness.again()
    assert has_volume(docker, "results")
    assert harness.decisions()["results"].reason.endswith("it has a name, so it is only reported")
    answer = harness.run(harness.platform.act(harness.asked("results", Action.REMOVE), harness.looked("results")))
    assert isinstance(answer, Refused)


def test_a_volume_whose_files_may_be_elsewhere_stays(docker: DockerEngine) -> None:
    volume(docker, DriverOpts={"type": "tmpfs", "device": "tmpfs"})
    harness = Harness(docker, **REMOVED)
    harness.again()
    harness.later(days=300)
    harness.again()
    assert has_volume(docker)


def test_what_a_container_refers_to_stays_even_if_it_never_ran(docker: DockerEngine) -> None:
    volume(docker), network(docker)
    user(docker)
    harness = Harness(docker, **REMOVED)
    harness.again()
    harness.later(days=10)
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (True, True)
    docker.remove_container("user")
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (True, True), "time begins when the container went"
    harness.later(hours=2)
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (False, False)


def test_a_container_that_came_and_went_between_two_lists_used_them(docker: DockerEngine) -> None:
    """No list ever showed it; only the engine's events did."""
    volume(docker), network(docker)
    harness = Harness(docker, **REMOVED)
    harness.again()
    harness.later(minutes=90)
    docker.run("user", cmd=["true"], binds=[f"{ANONYMOUS}:/data"], network="lab")
    docker.until(lambda: docker.state("user") == "exited", "it ended")
    docker.remove_container("user")
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (True, True)


def test_what_gets_a_container_after_the_plan_is_recorded_as_changed(docker: DockerEngine) -> None:
    harness = unused(docker)
    steps = [harness.step(name) for name in ("volume-a1a1a1a1a1a1", "lab")]
    assert [step.decision.action for step in steps] == [Action.REMOVE] * 2
    user(docker)
    for step in steps:
        outcome = harness.take(step)
        assert outcome.result is Result.CHANGED
        assert "a workload refers to it" in outcome.reason
    assert (has_volume(docker), has_network(docker)) == (True, True)


def test_the_engine_itself_refuses_a_volume_that_gets_a_container_at_the_last_moment(docker: DockerEngine) -> None:
    """After our last read: the engine knows of it, and its refusal is a change."""
    harness = unused(docker)
    step, fresh = harness.step("volume-a1a1a1a1a1a1"), harness.looked("volume-a1a1a1a1a1a1")
    user(docker)
    answer = harness.run(harness.platform.act(step, fresh))
    assert isinstance(answer, Changed), answer
    assert has_volume(docker)


def test_the_engine_itself_refuses_a_network_that_gets_a_running_container(docker: DockerEngine) -> None:
    harness = unused(docker)
    step, fresh = harness.step("lab"), harness.looked("lab")
    docker.run("user", cmd=["sleep", "100"], network="lab")
    answer = harness.run(harness.platform.act(step, fresh))
    assert isinstance(answer, Changed), answer
    assert has_network(docker)


def test_both_stay_as_long_as_the_container_that_had_them_can_be_restored(docker: DockerEngine) -> None:
    volume(docker), network(docker)
    user(docker, gpus=[0], labels=MINE)
    docker.api.must("POST", "/containers/user/start")
    docker.until(lambda: docker.state("user") == "exited", "it ended")
    harness = Harness(docker, **REMOVED, capture={"keep": "9h"})
    harness.again()
    harness.later(minutes=90)
    harness.again()
    assert docker.inspect("user") is None
    harness.again()
    harness.later(hours=3)
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (True, True), "unused for longer than an hour"
    harness.later(hours=9)
    harness.again()
    assert (has_volume(docker), has_network(docker)) == (False, False)


def test_podman_reports_no_use_so_both_are_only_reported(podman: PodmanEngine) -> None:
    harness = unused(podman)
    harness.again()
    assert (has_volume(podman), has_network(podman)) == (True, True)
    assert harness.decisions()["lab"].reason.endswith(
        "Podman does not report when containers use it, so it is only reported"
    )
    podman.api.must("DELETE", "/networks/lab")

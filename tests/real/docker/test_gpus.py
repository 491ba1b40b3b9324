"""Which GPUs a container has: what it was given, what it asked for, and what its processes have open."""

from __future__ import annotations

import json

import pytest

from gpukeeper.model.decision import Action
from gpukeeper.model.unknown import Unknown
from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, Harness, policy
from tests.real.docker.private_engine import DockerEngine


def test_devices_and_requests_mean_the_same_gpus(docker: DockerEngine) -> None:
    uuids = [gpu.uuid for gpu in docker.gpus]
    docker.create("given", gpus=[0, 2])
    docker.create("named", asks=[1, 3])
    docker.create("counted", asks=2)
    docker.create("everything", asks="all")
    subjects = Harness(docker).subjects()
    assert subjects["given"].devices == (uuids[0], uuids[2])
    assert subjects["named"].devices == (uuids[1], uuids[3])
    assert subjects["counted"].devices == (uuids[0], uuids[1])
    assert subjects["everything"].devices == tuple(uuids)


def test_who_opens_a_gpu_without_having_asked_is_found_by_what_is_open(docker: DockerEngine) -> None:
    """Mounted like a folder, or seen by a privileged container: nothing in its description says GPU."""
    path = docker.gpus[3].path
    docker.run("sly", image="py:1", binds=[f"{path}:{path}"], cmd=programs.trapping_shell())
    harness = Harness(docker)
    assert (harness.subject("sly").devices, harness.subject("sly").class_) == ((), "without-gpu")
    docker.exec("sly", programs.holds(path))
    docker.until(lambda: docker.holders(3), "it opened one")
    assert harness.subject("sly").devices == (docker.gpus[3].uuid,)
    assert harness.subject("sly").class_ == "unknown"


def test_a_variable_alone_gives_no_gpu(docker: DockerEngine) -> None:
    """Most CUDA images set it; without NVIDIA's runtime nothing comes of it."""
    docker.run("image-default", env={"NVIDIA_VISIBLE_DEVICES": "all"}, labels=MINE)
    found = Harness(docker).subject("image-default")
    assert (found.devices, found.class_) == ((), "without-gpu")


def test_a_gpu_that_is_not_here_is_unknown_and_keeps(docker: DockerEngine) -> None:
    gone = {"Driver": "", "Capabilities": [["gpu"]], "DeviceIDs": ["GPU-ffffffff-0000-0000-0000-000000000000"]}
    docker.create("elsewhere", labels=MINE, host_config={"DeviceRequests": [gone]})
    harness = Harness(docker)
    assert isinstance(harness.subject("elsewhere").devices, Unknown)
    assert harness.subject("elsewhere").findings


def test_a_sick_driver_stops_nothing_for_being_idle(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.child_says("inventory", {"state": "failed", "why": "the pretended driver is sick"})
    docker.child_says("usage", {"state": "failed", "why": "the pretended driver is sick"})
    ran = docker.gpukeeper("apply", "--yes", "--json", policy=policy(limits={"idle": "2s"}, activity={"tick": "1s"}))
    assert ran.code == 0, ran
    assert docker.state("mine") == "running"
    told = docker.gpukeeper("explain", "mine", policy=policy())
    assert "the pretended driver is sick" in told.out


def test_observe_gpus_names_who_has_which(docker: DockerEngine) -> None:
    docker.run("train", image="py:1", gpus=[1], labels=MINE, cmd=programs.holds(docker.gpus[1].path))
    docker.until(lambda: docker.holders(1), "it holds its GPU")
    ran = docker.gpukeeper("observe", "--gpus", policy=policy(scope={"docker": {}, "host": {}}))
    assert ran.code == 0, ran
    lines = [line.split() for line in ran.out.splitlines()]
    train = next(line for line in lines if line[1].endswith("gpu-1"))
    assert train[0] == "running"
    assert train[2].endswith("/train")
    assert train[3] == SOMEBODY
    assert next(line for line in lines if line[1].endswith("gpu-2"))[:3:2] == ["free", "-"]
    assert docker.state("train") == "running"


def test_two_on_one_gpu_are_reported_and_nobody_is_touched(docker: DockerEngine) -> None:
    docker.run("first", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.run("second", gpus=[0], labels={"owner": "daemon"}, cmd=programs.trapping_shell())
    ran = docker.gpukeeper("observe", "--json", policy=policy(scope={"docker": {}, "host": {}}))
    words = [one["words"] for one in json.loads(ran.out)["findings"]]
    assert any("first" in one and "second" in one for one in words), words
    assert docker.containers() == {"first": "running", "second": "running"}


def test_a_label_that_names_a_gpu_it_does_not_have_is_reported(docker: DockerEngine) -> None:
    docker.run("liar", gpus=[0], labels={**MINE, "ds01.gpu.uuid": docker.gpus[3].uuid})
    found = Harness(docker).subject("liar")
    assert found.devices == (docker.gpus[0].uuid,)
    assert any(docker.gpus[3].uuid in words for words in found.findings)


@pytest.mark.parametrize(("advice", "found"), [("none", "cleaned"), ("reset", "quarantined")])
def test_after_the_end_of_its_work_a_gpu_is_proven_clean_or_quarantined(
    docker: DockerEngine, advice: str, found: str
) -> None:
    docker.run("train", image="py:1", gpus=[2], labels=MINE, cmd=programs.holds(docker.gpus[2].path))
    docker.until(lambda: docker.holders(2), "it holds its GPU")
    text = policy()
    docker.set_gpu(2, advice=advice)
    ran = docker.gpukeeper("workload", "stop", "train", "--yes", policy=text)
    assert docker.state("train") == "exited", ran
    ran = docker.gpukeeper("apply", "--yes", policy=text)
    assert docker.holders(2) == []
    listed = docker.gpukeeper("node", "list", policy=text)
    line = next(line for line in listed.out.splitlines() if docker.gpus[2].uuid in line)
    assert line.split()[0] == found, (ran, line)
    others = [line for line in listed.out.splitlines() if docker.gpus[3].uuid in line]
    assert others[0].startswith("not checked")


def test_a_dev_container_with_a_whole_gpu_is_reported_never_stopped(docker: DockerEngine) -> None:
    docker.run("dev", gpus=[0], labels={**MINE, "devcontainer.local_folder": "/nowhere"}, cmd=programs.trapping_shell())
    harness = Harness(docker)
    harness.again()
    harness.later(minutes=50)
    harness.measured("dev", minutes=70)
    decision = harness.decisions()["dev"]
    assert decision.action is Action.WARN
    assert "its class has no idle time" in decision.reason
    harness.again()
    assert [line.message for line in harness.warnings("dev")]
    assert harness.decisions()["dev"].action is Action.KEEP  # once a day, and nothing follows
    harness.again()
    assert docker.state("dev") == "running"

"""The test engine itself: what scenarios rely on is really so."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukeeper.devices.busy import UsageJudge
from tests.engines import has_docker, require
from tests.real.docker import programs
from tests.real.docker.private_engine import DockerEngine, PodmanEngine, PrivateEngine, docker_engine


def test_docker_answers_on_a_socket_of_its_own(docker: DockerEngine) -> None:
    assert docker.api.must("GET", "/info")["DockerRootDir"] == f"{docker.folder}/data"
    assert docker.containers() == {}


def test_podman_answers_the_same_api(podman: PodmanEngine) -> None:
    components = [part["Name"] for part in podman.api.must("GET", "/version")["Components"]]
    assert "Podman Engine" in components
    assert podman.containers() == {}


def test_a_container_runs_and_its_end_is_an_event(engine: PrivateEngine) -> None:
    began = time.time()
    made = engine.run("short", cmd=["sh", "-c", "echo hello; exit 3"])
    engine.until(lambda: engine.state("short") == "exited", "it exited")
    found = engine.inspect("short")
    assert found is not None
    assert (found["Id"], found["State"]["ExitCode"]) == (made, 3)
    engine.until(
        lambda: {"create", "start", "die"} <= set(engine.actions(began, container=made)), "its events are told"
    )
    assert engine.logs("short") == "hello\n"


def test_labels_and_gpus_are_as_asked(docker: DockerEngine) -> None:
    docker.run("labelled", labels={"owner": "ann"}, gpus=[0, 2], env={"MODE": "quick"}, user="1000")
    found = docker.inspect("labelled")
    assert found is not None
    assert found["Config"]["Labels"]["owner"] == "ann"
    given = [device["PathOnHost"] for device in found["HostConfig"]["Devices"]]
    assert given == [docker.gpus[0].path, docker.gpus[2].path]
    assert docker.output("labelled", ["sh", "-c", "echo $MODE; id -u"]) == (0, "quick\n1000\n")


def test_a_program_beside_the_first_holds_a_gpu_in_its_containers_cgroup(engine: PrivateEngine) -> None:
    """By `exec`, as an editor's server and its terminals are."""
    made = engine.run("dev", image="py:1", gpus=[1])
    pid = engine.exec("dev", programs.holds(engine.gpus[1].path))
    engine.until(lambda: engine.holders(1), "the GPU is held")
    assert engine.holders(1) == [pid]
    assert engine.holders(0) == []
    assert made in Path(f"/proc/{pid}/cgroup").read_text()
    assert sorted(engine.pids("dev")) == sorted([engine.pid("dev"), pid])


def test_a_shell_of_busybox_can_hold_a_gpu_too(docker: DockerEngine) -> None:
    docker.run("box", gpus=[0], cmd=programs.shell(docker.gpus[0].path))
    docker.until(lambda: docker.holders(0) == [docker.pid("box")], "its first process holds the GPU")


def test_a_gpu_that_is_only_requested_cannot_start(docker: DockerEngine) -> None:
    docker.create("waiting", asks=[3])
    answer = docker.start_container("waiting")
    assert answer.status == 500, answer
    found = docker.inspect("waiting")
    assert found is not None
    assert found["State"]["Status"] == "created"
    assert found["State"]["ExitCode"] == 128
    assert found["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == [docker.gpus[3].uuid]


def test_a_program_saves_on_sigterm_before_it_ends(docker: DockerEngine, tmp_path: Path) -> None:
    saves = programs.saves(docker.gpus[0].path, "/out/checkpoint")
    docker.run("train", image="py:1", gpus=[0], cmd=saves, binds=[f"{tmp_path}:/out"])
    docker.until(lambda: "ready" in docker.logs("train"), "it is ready")
    assert docker.stop_container("train").status == 204
    assert (tmp_path / "checkpoint").read_text() == "saved"


def test_a_child_keeps_the_gpu_that_its_dead_parent_opened(docker: DockerEngine) -> None:
    docker.run("loader", image="py:1", gpus=[0])
    parent = docker.exec("loader", programs.forks_and_ends(docker.gpus[0].path))
    docker.until(lambda: docker.holders(0) and parent not in docker.holders(0), "only the child holds it")


def test_workers_share_the_device_of_their_parent(docker: DockerEngine) -> None:
    docker.run("loader", image="py:1", gpus=[0], cmd=programs.forks_and_waits(docker.gpus[0].path, 2))
    docker.until(lambda: len(docker.holders(0)) == 3, "a parent and two workers")


def test_a_terminal_in_a_container_is_a_terminal_on_the_host(docker: DockerEngine) -> None:
    docker.run("tty", tty=True, cmd=["sleep", "1000"])
    assert os.readlink(f"/proc/{docker.pid('tty')}/fd/0").startswith("/dev/pts/")  # noqa: PTH115


def test_a_published_port_is_reached_and_its_traffic_is_counted(docker: DockerEngine) -> None:
    if docker.network != "bridge":
        pytest.skip("no bridge could be made here: containers have no network")
    docker.run("server", image="py:1", gpus=[0], cmd=programs.serves(docker.gpus[0].path), ports={8080: 0})
    docker.until(lambda: "ready" in docker.logs("server"), "it listens")
    with socket.create_connection(("127.0.0.1", docker.port("server", 8080)), timeout=10) as guest:
        assert guest.recv(100) == b"hello"
    once = {"stream": "false", "one-shot": "true"}
    assert docker.api.must("GET", "/containers/server/stats", query=once)["networks"]["eth0"]["tx_bytes"] > 0


def test_with_live_restore_containers_survive_their_engine() -> None:
    require("docker", has_docker())
    with docker_engine(live_restore=True) as engine:
        engine.run("survivor")
        first = engine.pid("survivor")
        engine.kill9()
        engine.start()
        assert (engine.state("survivor"), engine.pid("survivor")) == ("running", first)


def test_a_closed_bed_leaves_nothing_behind() -> None:
    require("docker", has_docker())
    with docker_engine() as engine:
        engine.run("left", gpus=[0], cmd=programs.shell(engine.gpus[0].path))
        first = engine.pid("left")
        engine.kill9()
        assert Path(f"/proc/{first}").exists()
    engine.until(lambda: not Path(f"/proc/{first}").exists(), "its container ended")
    assert not engine.folder.exists()
    assert str(engine.folder) not in Path("/proc/self/mountinfo").read_text()
    assert not any(Path(gpu.path).exists() for gpu in engine.gpus)


def test_a_leftover_in_the_cgroup_of_a_removed_container_holds_its_gpu(docker: DockerEngine) -> None:
    gone = docker.run("gone", gpus=[2])
    docker.remove_container("gone")
    assert docker.inspect("gone") is None
    held = f"import os, signal; os.open({docker.gpus[2].path!r}, os.O_RDWR); signal.pause()"
    pid = docker.beside([sys.executable, "-c", held], cgroup_of=gone)
    docker.until(lambda: docker.holders(2) == [pid], "the leftover holds the GPU")
    assert docker.pids(gone) == [pid]


def test_containers_of_a_killed_engine_run_on_and_the_next_one_knows_them(docker: DockerEngine) -> None:
    made = docker.run("survivor", cmd=programs.trapping_shell())
    first = docker.pid("survivor")
    docker.kill9()
    assert not docker.api.answers()
    assert Path(f"/proc/{first}").exists()
    docker.start()
    assert docker.id("survivor") == made


def test_after_a_restart_of_the_engine_only_restart_policies_bring_containers_back(docker: DockerEngine) -> None:
    docker.run("plain", cmd=programs.trapping_shell())
    docker.run("again", cmd=programs.trapping_shell(), restart="always")
    docker.restart()
    assert docker.state("plain") == "exited"
    docker.until(lambda: docker.state("again") == "running", "its policy brought it back")


def test_gpukeeper_itself_runs_against_the_bed_and_sees_its_gpus(docker: DockerEngine) -> None:
    ran = docker.gpukeeper("observe", "--json")
    assert ran.code == 0, ran
    for gpu in docker.gpus:
        assert gpu.uuid in ran.out


def test_a_driver_that_fails_is_heard_by_gpukeeper(docker: DockerEngine) -> None:
    docker.child_says("inventory", {"state": "failed", "why": "the pretended driver is sick"})
    ran = docker.gpukeeper("observe", "--json")
    assert "the pretended driver is sick" in ran.out + ran.err


def test_the_pretended_driver_answers_every_question(docker: DockerEngine) -> None:
    """With the reading side of each, so that a record that changes is noticed here."""
    docker.set_gpu(1, busy=80.0, memory_used_mib=20_000)
    docker.set_gpu(2, advice="reset")
    docker.run("holder", gpus=[1], cmd=programs.shell(docker.gpus[1].path))
    docker.until(lambda: docker.holders(1), "the GPU is held")
    answers = {about: docker.ask_child(about) for about in ("inventory", "condition", "usage")}
    assert {answer.state for answer in answers.values()} == {"answered"}
    assert answers["inventory"].gpus == docker.inventory()
    conditions = answers["condition"].gpus
    assert [gpu.advice for gpu in conditions] == ["none", "none", "reset", "none"]
    assert conditions[1].listed == tuple(docker.holders(1))
    readings = answers["usage"].gpus
    assert [gpu.activity.gpm for gpu in readings] == [0.0, 80.0, 0.0, 0.0]
    uses = UsageJudge().judge(readings, datetime.now(UTC))
    assert uses[docker.gpus[1].uuid].busy == 80.0


def test_each_bed_has_gpus_of_its_own(docker: DockerEngine, podman: PodmanEngine) -> None:
    assert not {gpu.path for gpu in docker.gpus} & {gpu.path for gpu in podman.gpus}
    assert all(Path(gpu.path).is_char_device() for gpu in (*docker.gpus, *podman.gpus))

"""What a container is in, as Docker has it, decides what becomes of it."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.clients.docker import Inspected
from gpukeeper.model.decision import Accepted, Action, Changed, Result, Verdict
from gpukeeper.model.event import Noticed
from gpukeeper.model.subject import Outcome, State
from tests.patience import PATIENCE
from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, Harness, ended
from tests.real.docker.private_engine import DockerEngine, PodmanEngine, PrivateEngine


def restarts(engine: PrivateEngine, name: str) -> int:
    found = engine.inspect(name)
    return int(found["RestartCount"]) if found is not None else 0


def policy_of(engine: PrivateEngine, name: str) -> str:
    found = engine.inspect(name)
    return str(found["HostConfig"]["RestartPolicy"]["Name"]) if found is not None else ""


def test_what_was_created_and_never_started_goes_after_its_time(docker: DockerEngine) -> None:
    docker.create("forgotten", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.again()
    assert docker.state("forgotten") == "created"
    harness.later(minutes=31)
    harness.again()
    assert docker.inspect("forgotten") is None


def test_a_start_that_failed_for_want_of_a_gpu_is_a_container_that_never_started(docker: DockerEngine) -> None:
    docker.create("waiting", asks=[3], labels=MINE)
    assert docker.start_container("waiting").status == 500
    found = docker.inspect("waiting")
    assert found is not None
    assert found["State"]["ExitCode"] == 128
    harness = Harness(docker)
    assert harness.subject("waiting").state is State.CREATED
    assert harness.subject("waiting").devices == (docker.gpus[3].uuid,)
    harness.later(minutes=31)
    harness.again()
    assert docker.inspect("waiting") is None


def test_what_succeeded_goes_before_what_failed(docker: DockerEngine) -> None:
    ended(docker, "fine", gpus=[0], labels=MINE)
    ended(docker, "broken", 1, gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.again()
    assert docker.containers() == {"fine": "exited", "broken": "exited"}
    harness.later(minutes=90)
    harness.again()
    assert docker.containers() == {"broken": "exited"}
    harness.later(minutes=90)
    harness.again()
    assert docker.containers() == {}


def test_what_its_owner_stopped_is_neither_success_nor_failure(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.stop_container("mine")
    docker.run("killed", gpus=[0], labels=MINE)
    docker.signal_container("killed", "KILL")
    docker.until(lambda: docker.state("killed") == "exited", "it was killed")
    subjects = Harness(docker).subjects()
    assert [subjects[name].outcome for name in ("mine", "killed")] == [Outcome.STOPPED, Outcome.STOPPED]


def test_a_crash_without_word_of_a_stop_is_a_failure_and_kept_longer(docker: DockerEngine) -> None:
    docker.run("crash", gpus=[0], labels=MINE, cmd=["sh", "-c", "exit 137"])
    docker.until(lambda: docker.state("crash") == "exited", "it crashed")
    assert Harness(docker).subject("crash").outcome is Outcome.FAILED


def test_a_failure_says_its_exit_code_in_plan_and_ledger(docker: DockerEngine) -> None:
    ended(docker, "broken", 3, gpus=[0], labels=MINE)
    harness = Harness(docker)
    assert harness.decisions()["broken"].reason.startswith("failed with exit code 3, ")
    harness.later(days=8)
    harness.again()
    assert docker.inspect("broken") is None
    assert harness.outcomes("broken")[-1].reason.startswith("failed with exit code 3, 8d ago, kept for ")
    noticed = [
        line for line in harness.ledger.lines if isinstance(line, Noticed) and line.ref and line.ref.name == "broken"
    ]
    assert [line.ended_with for line in noticed] == ["exit code 3"]


def test_what_ran_out_of_memory_is_reported_to_have(docker: DockerEngine) -> None:
    """A real kill by the kernel, where the engine may limit memory; elsewhere nothing is made up."""
    limits = {"Memory": 32 * 1024 * 1024, "MemorySwap": 32 * 1024 * 1024}
    greedy = ["sh", "-c", "head -c 200000000 /dev/zero | tail"]
    docker.run("greedy", gpus=[0], labels=MINE, cmd=greedy, host_config=limits)
    docker.until(lambda: docker.state("greedy") == "exited", "it ended")
    found = docker.inspect("greedy")
    assert found is not None
    subject = Harness(docker).subject("greedy")
    assert ("out of memory" in subject.ended_with) == found["State"]["OOMKilled"]
    if found["State"]["OOMKilled"]:
        assert subject.outcome is Outcome.FAILED
        assert subject.ended_with == f"exit code {found['State']['ExitCode']}, out of memory"


def test_a_stop_by_hand_keeps_the_gpu_for_its_owner_for_a_while(docker: DockerEngine) -> None:
    """Retention has passed; the hold after a manual stop has not."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, retention={"stopped": "1m", "succeeded": "1m"}, limits={"hold_after_stop": "15m"})
    harness.again()
    docker.stop_container("mine")
    harness.again()
    harness.later(minutes=10)
    harness.again()
    assert docker.state("mine") == "exited"
    harness.later(minutes=10)
    harness.again()
    assert docker.inspect("mine") is None


def test_what_we_stopped_for_being_idle_is_not_held_like_a_stop_by_hand(docker: DockerEngine) -> None:
    docker.run("idle", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, limits={"hold_after_stop": "15m"})
    harness.later(minutes=20)
    harness.measured("idle")
    harness.again(), harness.again()
    assert docker.state("idle") == "exited"
    harness.again()
    assert docker.inspect("idle") is None


def test_a_paused_container_still_holds_its_gpu_and_is_stopped_at_its_maximum(docker: DockerEngine) -> None:
    docker.run("frozen", gpus=[0], labels=MINE, image="py:1", cmd=programs.holds(docker.gpus[0].path))
    docker.until(lambda: docker.holders(0), "it holds its GPU")
    docker.pause_container("frozen")
    harness = Harness(docker, limits={"max_runtime": "2h"})
    assert harness.subject("frozen").state is State.PAUSED
    harness.later(hours=3)
    harness.again(), harness.again()
    assert docker.state("frozen") == "exited"
    assert docker.holders(0) == []


def test_one_that_restarts_again_and_again_is_stopped_for_good(docker: DockerEngine) -> None:
    docker.run("loop", gpus=[0], labels=MINE, cmd=["sh", "-c", "sleep 0.3; exit 1"], restart="always")
    docker.until(lambda: docker.state("loop") == "restarting", "it is between two starts")
    harness = Harness(docker)
    assert harness.subject("loop").state is State.RUNNING
    fresh = harness.subject("loop")
    answer = harness.run(harness.platform.act(harness.asked("loop", Action.STOP), fresh))
    found = docker.inspect("loop")
    assert found is not None
    if isinstance(answer, Accepted):
        assert (found["State"]["Status"], found["HostConfig"]["RestartPolicy"]["Name"]) == ("exited", "no")
    else:
        # It started once more before we came: that one was not looked at, and keeps what its owner gave it. Or it ended
        # in the moment of the update, and Docker says so.
        assert isinstance(answer, Changed) or "cannot update a stopped container" in str(answer), answer
        assert found["HostConfig"]["RestartPolicy"]["Name"] == "always"


@pytest.mark.parametrize("run", ["", "sleep 1; "])
def test_one_that_fails_again_and_again_is_reported_warned_and_stopped(docker: DockerEngine, run: str) -> None:
    """Its engine starts it each time, so no run of it is ever idle for long."""
    docker.run("loop", gpus=[0], labels=MINE, cmd=["sh", "-c", f"{run}exit 1"], restart="always")
    docker.run("meant", gpus=[1], labels=MINE, cmd=["sh", "-c", "exit 0"], restart="always")
    for name in ("loop", "meant"):
        docker.until(lambda name=name: restarts(docker, name) >= 5, f"{name} was started again five times")
    harness = Harness(docker, limits={"idle": "1m"})
    decision = harness.decisions()["loop"]
    assert (decision.rule, decision.verdict, decision.action) == ("restart_loop", Verdict.REPORT, Action.KEEP)
    assert "times in a row" in decision.reason
    assert harness.decisions()["meant"].rule != "restart_loop"  # it succeeds: that is how it is meant to run
    harness.later(seconds=40)
    docker.until(lambda: harness.again() and harness.warnings("loop"), "its owner was warned")
    assert {one.rule for one in harness.warnings("loop")} == {"restart_loop"}
    assert docker.state("loop") != "exited"
    harness.later(seconds=40)
    docker.until(lambda: harness.again() and docker.state("loop") == "exited", "it was stopped")
    assert [one.rule for one in harness.outcomes("loop") if one.result is Result.RECLAIMED] == ["restart_loop"]
    assert policy_of(docker, "loop") == "no"
    assert harness.ask(SOMEBODY, "restore", "loop").done
    assert policy_of(docker, "loop") == "always"


def test_on_podman_the_events_of_a_daemon_show_that_one_fails_again_and_again(podman: PodmanEngine) -> None:
    """Podman 4.3 answers nothing when it is asked for events of the past."""
    podman.run("loop", gpus=[0], labels=MINE, cmd=["sh", "-c", "sleep 1; exit 1"], restart="always")
    harness = Harness(podman)

    async def hear() -> None:
        async with asyncio.timeout(PATIENCE):
            async for _ in harness.platform.wake():
                found = await harness.platform.records.inspect(podman.id("loop"))
                seen = harness.platform.records.crashes(found) if isinstance(found, Inspected) else None
                if seen is not None and seen.count >= 5:
                    return

    harness.run(hear())
    podman.until(lambda: harness.decisions()["loop"].rule == "restart_loop", "it is reported")


def test_what_ends_with_its_engine_was_stopped_and_did_not_succeed(docker: DockerEngine) -> None:
    """Its handler exits 0, and the engine's report of that is lost."""
    ended(docker, "done", gpus=[1], labels=MINE)
    docker.run("served", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker)
    harness.again()
    docker.restart()
    harness.platform.records.forget()  # as when the stream of events ends
    found = docker.inspect("served")
    assert found is not None
    assert (found["State"]["Status"], found["State"]["ExitCode"]) == ("exited", 0)
    assert harness.subject("served").outcome is Outcome.STOPPED
    assert harness.subject("done").outcome is Outcome.SUCCEEDED
    assert Harness(docker).subject("served").outcome is Outcome.STOPPED  # also to a process that heard nothing


def test_a_running_container_within_its_limits_is_left_alone(docker: DockerEngine) -> None:
    docker.run("busy", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.again()
    harness.later(minutes=20)
    harness.measured("busy", gpu=60)
    report = harness.again()
    assert (docker.state("busy"), report.outcomes) == ("running", [])


def test_one_that_vanishes_with_its_stop_is_captured_before(docker: DockerEngine) -> None:
    docker.run(
        "vanishing",
        gpus=[0],
        labels=MINE,
        rm=True,
        cmd=["sh", "-c", 'echo precious; trap "exit 0" 15; while sleep 1 & wait $!; do :; done'],
    )
    docker.until(lambda: "precious" in docker.logs("vanishing"), "it said something")
    harness = Harness(docker)
    reply = harness.ask("root", "stop", "vanishing")
    assert reply.done, reply
    docker.until(lambda: docker.inspect("vanishing") is None, "it went with its stop")
    files = harness.captured("vanishing")
    assert b"precious" in files["log.txt"]
    assert b'"AutoRemove":true' in files["manifest.json"]
    assert harness.outcomes("vanishing")[-1].result is Result.RECLAIMED


def test_a_container_of_a_kubelet_is_left_alone(docker: DockerEngine) -> None:
    labels = {"io.kubernetes.pod.name": "trainer-0", "io.kubernetes.container.name": "main", **MINE}
    ended(docker, "k8s_main_trainer-0", gpus=[0], labels=labels)
    docker.create("k8s_POD_trainer-0", gpus=[0], labels=labels)
    harness = Harness(docker)
    harness.again()
    harness.later(days=400)
    harness.again()
    assert docker.containers() == {"k8s_main_trainer-0": "exited", "k8s_POD_trainer-0": "created"}


def test_what_has_nothing_to_do_with_a_gpu_is_never_touched(docker: DockerEngine) -> None:
    """However long it was stopped, never started or running."""
    ended(docker, "old", labels=MINE)
    ended(docker, "old-failure", 1)
    docker.create("never")
    docker.run("database", cmd=programs.trapping_shell())
    began = docker.containers()
    harness = Harness(docker, limits={"max_runtime": "1h"})
    harness.again()
    for _ in range(3):
        harness.later(days=200)
        report = harness.again()
        assert not report.outcomes
        assert not report.warnings
    assert docker.containers() == began
    assert all(one.action is Action.KEEP for name, one in harness.decisions().items() if name in began)

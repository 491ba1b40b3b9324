"""What a daemon must know of the time before it began: what ran was not measured, and the clock may have jumped."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.real.docker import programs
from tests.real.docker.harness import MINE, policy
from tests.real.docker.private_engine import DockerEngine

IDLE, LEAD = timedelta(seconds=16), timedelta(seconds=6)
POLICY = policy(
    limits={"idle": "16s", "grace": "1s", "after_idle": "keep"},
    activity={"tick": "1s", "signals": ["cpu"]},
    warnings={"idle": ["25%"], "lead": "6s", "require_delivery": False},
    schedule={"every": "5s"},
)


def lines(engine: DockerEngine, kind: str) -> list[dict[str, Any]]:
    ran = engine.gpukeeper("ledger", "list", "--json", "--last", "100000", "--type", kind)
    assert ran.code == 0, ran
    found: list[dict[str, Any]] = json.loads(ran.out)["lines"]
    return found


def test_work_done_while_no_daemon_ran_is_not_idle_time_and_the_lead_begins_again(docker: DockerEngine) -> None:
    docker.run("mine", image="py:1", gpus=[0], labels=MINE, cmd=programs.holds(docker.gpus[0].path))
    first = docker.popen("serve", policy=POLICY)
    docker.until(lambda: lines(docker, "warning"), "it was warned", deadline=60)
    first.kill()
    first.wait(timeout=10)
    assert docker.state("mine") == "running"
    before = len(lines(docker, "warning"))
    docker.set_gpu(0, busy=95.0)  # a run that begins and ends while nobody looks
    docker.set_gpu(0, busy=0.0)
    restarted = datetime.now(UTC)
    second = docker.popen("serve", policy=POLICY)
    docker.until(lambda: docker.state("mine") == "exited", "it was idle all the time and was stopped", deadline=90)
    second.terminate()
    second.wait(timeout=30)
    again = [datetime.fromisoformat(one["at"]) for one in lines(docker, "warning")[before:]]
    stop = next(datetime.fromisoformat(one["at"]) for one in lines(docker, "intent") if one["action"] == "stop")
    assert stop >= restarted + IDLE, "idle time counts from the first reading after the gap"
    assert again, "a warning of before the gap has expired"
    assert stop - again[0] >= LEAD


def test_a_killed_daemon_does_not_forget_that_the_clock_jumped(docker: DockerEngine) -> None:
    """An hour ahead, breaker open, `kill -9`, started again: by the clock the retention of 30 minutes has passed."""
    docker.run("eval", image="py:1", gpus=[0], labels=MINE, cmd=["true"])
    docker.until(lambda: docker.state("eval") == "exited", "it ended")
    ahead = docker.folder / "ahead"
    ahead.write_text("0")
    env, text = {"GPUKEEPER_BED_AHEAD": str(ahead)}, policy(retention={"succeeded": "30m"}, schedule={"every": "2s"})

    def breakers() -> list[str | None]:
        return [one.get("breaker") for one in lines(docker, "pass")]

    first = docker.popen("serve", policy=text, env=env)
    docker.until(lambda: breakers()[1:], "it is watched by a clock that is right", deadline=60)
    ahead.write_text("3600")
    docker.until(lambda: breakers()[-1], "the breaker is open", deadline=60)
    first.kill()
    first.wait(timeout=10)
    before = len(breakers())
    second = docker.popen("serve", policy=text, env=env)
    docker.until(lambda: breakers()[before + 2 :], "three passes of the next daemon", deadline=60)
    assert all("The clock jumped" in str(one) for one in breakers()[before:])
    assert docker.state("eval") == "exited"
    second.kill()
    second.wait(timeout=10)
    ahead.write_text("0")  # corrected while nothing ran: that is a jump, too
    before = len(breakers())
    third = docker.popen("serve", policy=text, env=env)
    docker.until(lambda: breakers()[before + 2 :], "three passes by the right time", deadline=60)
    assert all(breakers()[before:])
    third.terminate()
    third.wait(timeout=30)
    assert docker.state("eval") == "exited"

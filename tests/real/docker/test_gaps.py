"""What runs while no daemon does: nobody measures it, and nobody may call it idle afterwards."""

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
    warnings={"idle": ["25%"], "lead": "6s"},
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

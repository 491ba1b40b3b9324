"""gpukeeper is killed at each point of a step, by name and not by chance, and a plain `apply` goes on after it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.halt import ACTED, BEFORE_THE_ACT, BEFORE_THE_INTENT, BEFORE_THE_OUTCOME, CLOSED, POINTS
from tests.real.docker.private_engine import DockerEngine
from tests.real.docker.test_crashes import POLICY, Fleet
from tests.smoke import smoke

DUE = {"stop": "overdue", "remove": "ended"}
BEFORE = {"stop": "running", "remove": "exited"}
AFTER = {"stop": "exited", "remove": None}


@pytest.mark.parametrize("action", DUE)
@pytest.mark.parametrize("point", smoke(POINTS, ACTED.__eq__))
def test_killed_at_a_point_of_a_step_nothing_wrong_goes_and_nothing_twice(
    docker: DockerEngine, action: str, point: str
) -> None:
    fleet = Fleet(docker, {DUE[action]: 1, "never": 1})
    name = f"{DUE[action]}-1"
    _kill(fleet, action, point, name)
    uid = docker.id(name) if docker.inspect(name) else None
    fleet.listen()
    acted = point in (*BEFORE_THE_OUTCOME, CLOSED)
    assert docker.containers().get(name) == (AFTER if acted else BEFORE)[action]
    steps = [line for line in fleet.lines() if line.get("step") and line["ref"]["name"] == name]
    own = [line for line in steps if line["type"] in ("intent", "outcome")]
    assert [line["type"] for line in own] == _written(point)

    fleet.apply()
    fleet.check()
    assert uid is None or _signals(fleet, uid) == (1 if action == "stop" else 0)
    if point in BEFORE_THE_ACT + BEFORE_THE_OUTCOME:
        (outcome,) = (one for one in fleet.lines() if one["type"] == "outcome" and one["step"] == own[0]["step"])
        assert outcome["result"] == ("reclaimed" if acted else "still there")
        assert "in a later pass" in outcome["reason"]


def _kill(fleet: Fleet, action: str, point: str, name: str) -> None:
    if action == "stop":
        assert fleet.engine.gpukeeper("apply", "--yes", policy=POLICY).code == 0  # warns, and stops in the next pass
    else:
        fleet.engine.until(lambda: fleet.engine.state(name) == "exited", "it ended")
    ran = fleet.engine.gpukeeper("apply", "--yes", policy=POLICY, halt=(point, name))
    assert ran.code == -signal.SIGKILL, ran


def _written(point: str) -> list[str]:
    if point in BEFORE_THE_INTENT:
        return []
    return ["intent", "outcome"] if point == CLOSED else ["intent"]


def _signals(fleet: Fleet, uid: str) -> int:
    heard: list[dict[str, Any]] = list(fleet.heard.values())
    return sum(one["Actor"]["ID"] == uid and one["Action"].partition(":")[0] == "kill" for one in heard)

"""Five hundred containers: everything is seen, cost follows change, and one that is stuck stops nobody."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real.docker import programs
from tests.real.docker.private_engine import DockerEngine, Ran
from tests.real.docker.proxy import Proxy, proxy

CONTAINERS, RUNNING = 500, 10
POLICY = """
mode: plan
scope: {docker: {}}
schedule: {every: 5s}
"""
LIST, IMAGES = "/containers/json", "/images/json"


@pytest.fixture(scope="module")
def many(the_docker: DockerEngine) -> Iterator[DockerEngine]:
    for number in range(CONTAINERS - RUNNING):
        the_docker.create(f"idle-{number}", gpus=[number % 4] if number % 2 else [], user="1000")
    for number in range(RUNNING):
        the_docker.run(f"busy-{number}", gpus=[number % 4], cmd=programs.shell(the_docker.gpus[number % 4].path))
    yield the_docker
    the_docker.clear()


@pytest.fixture
def between(many: DockerEngine) -> Iterator[Proxy]:
    with proxy(many.folder / "p", many.socket) as one:
        yield one


def test_a_plan_decides_about_every_one(many: DockerEngine) -> None:
    place = _docker(many.gpukeeper("plan", "--json", policy=POLICY))
    assert (place["running"], place["unseen"]) == (RUNNING, [])
    assert sorted(one["seen"]["ref"]["uid"] for one in _containers(place)) == sorted(_ids(many))
    assert len(_containers(place)) == CONTAINERS


def test_a_stuck_container_among_five_hundred_stalls_nothing_else(many: DockerEngine, between: Proxy) -> None:
    stuck = many.id("idle-77")
    between.stuck.add(f"/containers/{stuck}/json")
    began = time.monotonic()
    place = _docker(many.gpukeeper("plan", "--json", policy=POLICY, env={"DOCKER_HOST": between.host}))
    took = time.monotonic() - began
    assert [one["what"] for one in place["unseen"]] == ["idle-77"]
    assert "did not answer" in place["unseen"][0]["why"]
    assert {one["seen"]["ref"]["uid"] for one in _containers(place)} == set(_ids(many)) - {stuck}
    assert took < 60, f"{took:.0f} s: the deadline of one question is 10 s, and the others go on meanwhile"


def test_a_pass_of_serve_asks_about_nothing_that_did_not_change(many: DockerEngine, between: Proxy) -> None:
    many.popen("serve", policy=POLICY, env={"DOCKER_HOST": between.host})
    many.until(lambda: between.asked.count(LIST) >= 3, "the first passes are over", 120)
    _next_list(many, between)
    between.asked.clear()
    for _ in range(2):
        _next_list(many, between)
    assert set(between.asked) <= {LIST, IMAGES, "/volumes", "/networks"}, between.asked
    # What changes is asked about, and it alone.
    between.asked.clear()
    started = many.id("idle-42")
    many.start_container("idle-42")
    many.until(lambda: f"/containers/{started}/json" in between.asked, "it is asked about", 120)
    _next_list(many, between)
    assert {path for path in between.asked if path.endswith("/json")} <= {
        *(LIST, IMAGES, f"/containers/{started}/json"),
        f"/images/{_inspected(many, 'idle-42')['Image'].replace(':', '%3A')}/json",
    }
    many.remove_container("idle-42")


def _next_list(engine: DockerEngine, between: Proxy) -> None:
    before = between.asked.count(IMAGES)  # the last question of a pass
    engine.until(lambda: between.asked.count(IMAGES) > before, "another pass", 120)


def _docker(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran
    found: dict[str, Any] = next(one for one in json.loads(ran.out)["places"] if one["platform"] == "docker")
    return found


def _containers(place: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in place["decisions"] if one["seen"]["ref"]["kind"] == "container"]


def _ids(engine: DockerEngine) -> list[str]:
    return [one["Id"] for one in engine.api.must("GET", "/containers/json", query={"all": 1})]


def _inspected(engine: DockerEngine, name: str) -> dict[str, Any]:
    found = engine.inspect(name)
    assert found is not None
    return found

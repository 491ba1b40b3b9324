"""Acceptance runs on a real engine: whole, past the deadline, and with a launcher that kills itself at a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.collect import encode_frames
from gpukeeper.acceptance.fleet.launcher import Launcher, Phase
from gpukeeper.acceptance.launchers.docker import DockerApi, DockerLauncher
from gpukeeper.clients.docker import Engine, Inspected
from gpukeeper.interfaces.cli.accept_remote import open_launcher
from tests.real.docker.private_engine import DockerEngine
from tests.real.launch.passes import Moment, Point, a_spec, kills_itself, launch, next_pass, reports

IMAGE = "accept:1"
# In place of gpukeeper: prints what a node prints.
STUB = """
mkdir -p /usr/local/bin
printf "%s\\n" "#!/bin/sh" "$1" > /usr/local/bin/gpukeeper
chmod 755 /usr/local/bin/gpukeeper
"""
REPORT = random.Random(0).randbytes(3000).hex().encode()


class KilledApi(DockerApi):
    def __init__(self, engine: Engine, point: Point) -> None:
        super().__init__(engine)
        self._point = point

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        await self._point.around("create", lambda: DockerApi.create(self, name, body))

    async def start(self, uid: str) -> None:
        await self._point.around("start", lambda: DockerApi.start(self, uid))

    async def containers(self, label: str) -> tuple[Inspected, ...]:
        return await self._point.around("containers", lambda: DockerApi.containers(self, label))

    async def log(self, uid: str) -> bytes | None:
        return await self._point.around("log", lambda: DockerApi.log(self, uid))

    async def remove(self, uid: str) -> None:
        await self._point.around("remove", lambda: DockerApi.remove(self, uid))


@pytest.fixture
def engine(docker: DockerEngine) -> Iterator[DockerEngine]:
    docker.run("make", image="box:1")
    code, out = docker.output("make", ["sh", "-c", STUB, "sh", 'printf "%s" "$FRAMES"; sleep ${LASTS:-0}'])
    assert code == 0, out
    docker.api.must("POST", "/commit", {}, query={"container": "make", "repo": "accept", "tag": "1"})
    docker.remove_container("make")
    yield docker
    docker.api.call("DELETE", f"/images/{IMAGE}", query={"force": 1})


def opened(engine: DockerEngine) -> Launcher:
    return open_launcher("docker", {"engine": engine.host})


def node_of(engine: DockerEngine) -> str:
    return str(engine.api.must("GET", "/info")["Name"])


def spec_of(engine: DockerEngine, run: str, environment: Mapping[str, str] | None = None, **changes: Any) -> Any:
    lines = "\n".join(["log", *encode_frames(REPORT, run, node_of(engine)), ""])
    given = {"FRAMES": lines, **(environment or {})}
    return a_spec(run, "docker", image=IMAGE, gpus_per_node=0, environment=given, **changes)


def passes_until_empty(engine: DockerEngine, into: Path) -> bool:
    """The engine may still be carrying out a request of a launcher that was killed: a later pass finds that."""
    asyncio.run(next_pass(lambda: opened(engine), into))
    return engine.containers() == {}


@pytest.mark.smoke
def test_a_run_is_started_collected_and_removed(engine: DockerEngine, tmp_path: Path) -> None:
    asyncio.run(launch(opened(engine), spec_of(engine, "whole"), tmp_path))
    assert reports(tmp_path, "whole", node_of(engine)) == {REPORT}
    assert engine.containers() == {}


def test_the_deadline_is_kept_without_any_launcher(engine: DockerEngine) -> None:
    async def begin() -> None:
        launcher, spec = opened(engine), spec_of(engine, "late", {"LASTS": "1000"}, deadline_s=1.0)
        await launcher.start(spec, await launcher.targets(spec))
        await launcher.close()

    async def read() -> Any:
        launcher = opened(engine)
        found = await launcher.run("late")
        await launcher.close()
        assert found is not None
        return found.nodes[0]

    asyncio.run(begin())
    engine.until(lambda: engine.state("gpukeeper-late") == "exited", "it ended")
    node = asyncio.run(read())
    assert (node.phase, node.code) == (Phase.ENDED, "deadline")


@pytest.mark.parametrize("operation", ["create", "start", "containers", "log", "remove"])
def test_a_launcher_killed_at_any_request_leaves_nothing_and_loses_no_report(
    engine: DockerEngine, tmp_path: Path, operation: str
) -> None:
    for moment in Moment:
        spec = spec_of(engine, f"{operation}-{moment}")

        def work(moment: Moment = moment, spec: Any = spec) -> None:
            api = KilledApi(Engine(engine.host), Point(operation, moment, 1))
            asyncio.run(launch(DockerLauncher(api), spec, tmp_path))

        kills_itself(work)
        engine.until(lambda: passes_until_empty(engine, tmp_path), f"nothing is left of {spec.run}")
        if operation in {"log", "remove"}:
            assert reports(tmp_path, spec.run, node_of(engine)) == {REPORT}, spec.run

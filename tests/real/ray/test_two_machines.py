"""A worker on another machine than its head: what it can ask there, and what is said where it cannot."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.disk import open_files
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Accepted, Action, Decision, Step
from gpukeeper.model.policy import PlaceScope, Policy, Temporary
from gpukeeper.model.subject import Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.nodes import Process, read_processes
from gpukeeper.platforms.ray.settings import RaySettings
from gpukeeper.platforms.ray.survey import NodesAccess
from tests.engines import has_ray, require
from tests.real.ray.clusters import VERSIONS, until
from tests.real.ray.machines import HEAD, Machines, two_machines
from tests.real.ray.test_adapter import Ahead

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def everything_seen() -> OpenFiles:
    return msgspec.structs.replace(open_files.scan(), hidden=None)


def of_the_worker(here: Machines) -> RayPlatform:
    """gpukeeper as it runs on the second machine: it sees that one's processes and files, and its network."""
    home = str(Path(f"/proc/{here.worker}/ns/pid").readlink())

    def everyone() -> tuple[Process, ...]:
        return tuple(one for one in read_processes() if one.pids == home)

    ray = RaySettings(roots=(str(here.scratch),), cpu=1e9, window=timedelta(milliseconds=1), sessions=None, logs=None)
    temporary = (Temporary(root=str(here.scratch), names=("tmp*",), above=0, platform="ray"),)
    policy = Policy(scope={"ray": PlaceScope()}, platforms={"ray": ray}, temporary=temporary)
    access = NodesAccess(everyone=everyone, scan=everything_seen)
    return RayPlatform("second", policy, Ahead(), access=access, environ={})


async def found(ray: RayPlatform) -> list[Subject]:
    return [one async for page in ray.observe(PlaceScope()) for one in page.subjects]


def node_of(ray: RayPlatform) -> Subject:
    (node,) = [one for one in run(found(ray)) if one.shape is Shape.NODE]
    return node


def left_by_work(here: Machines) -> Path:
    tree = here.worker_files / "tmpold"
    tree.mkdir()
    (tree / "data").write_bytes(b"x" * 8192)
    return tree


@contextmanager
def driver_on_the_worker(here: Machines) -> Iterator[None]:
    program = f"import ray, sys; ray.init(address='{HEAD}:6379'); print('ready', flush=True); sys.stdin.read()"
    inside = ["nsenter", "--target", str(here.worker), "--net", "--mount", "--pid"]
    with subprocess.Popen(
        [*inside, str(here.cluster.python), "-c", program],
        env=here.cluster.env,
        cwd=here.cluster.root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            assert any("ready" in line for line in child.stdout), "the driver did not start"
            yield
        finally:
            child.stdin.close()
            child.stdout.read()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plain_head_cannot_be_queried_and_it_is_reported_what_to_set(version: str) -> None:
    """`ray start --head` binds its dashboard to 127.0.0.1: a worker elsewhere is kept as it is, with the remedy."""
    require("ray", has_ray(version))
    with two_machines(version) as here:
        tree = left_by_work(here)
        ray = of_the_worker(here)
        node = node_of(ray)
        assert isinstance(node.busy, Unknown)
        assert f"listens only on 127.0.0.1 of the head ({HEAD})" in node.busy.why
        assert "--dashboard-host=0.0.0.0" in node.busy.why
        assert "ray.dashboard" in node.busy.why
        assert tree.exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_with_a_dashboard_that_workers_reach_an_idle_one_is_cleaned_and_a_busy_one_is_not(version: str) -> None:
    require("ray", has_ray(version))
    with two_machines(version, "--dashboard-host=0.0.0.0") as here:
        tree = left_by_work(here)
        ray = of_the_worker(here)
        with driver_on_the_worker(here):
            busy = until(lambda: node_of(ray).busy, "the driver is seen")
            assert isinstance(busy, str), busy
        until(lambda: node_of(ray).busy is None, "the worker is idle by its cluster's word")
        (subject,) = [one for one in run(found(ray)) if one.ref.name.endswith("/tmpold")]
        assert (subject.busy, subject.in_use) == (None, False)
        step = Step("1.1", Decision(seen=subject.seen, action=Action.REMOVE, rule="temporary_tree", reason="because"))
        assert isinstance(run(ray.act(step, subject)), Accepted)
        assert isinstance(run(ray.read(subject.ref)), Gone)
        assert not tree.exists()

"""Does work run? By what processes call themselves, raylet by raylet."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.nodes import Node, NodeAccess, Process, raylet_of
from gpukeeper.platforms.ray.settings import Timeouts
from gpukeeper.platforms.ray.state import OWN_JOB, DashboardQueries, Idleness, of_ray, works
from tests.unit.platforms.ray.nodes_here import SESSION, as_raylet, process, raylet

AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def node(*processes: Process) -> Node:
    raylets = tuple(found for one in processes if (found := raylet_of(one)) is not None)
    return Node(name="n", uid="u", door=NodeAccess(), processes=processes, raylets=raylets)


def with_agents(pid: int) -> list[Process]:
    return [raylet(pid, "/tmp/ray"), *(process(pid + n + 1, title, parent=pid) for n, title in enumerate(AGENTS))]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], None),
        ([process(50, "ray::IDLE", parent=10)], None),
        ([process(50, "bash")], None),  # nobody of Ray's started it
        ([process(50, "ray::train_step", parent=10)], "train_step"),
        ([process(50, "ray::Orphan", parent=1)], "Orphan"),
        ([process(50, "my-own-name", parent=10)], "my-own-name"),
        ([process(50, "ray::IDLE", parent=10), process(51, "ffmpeg", "-i", "x", parent=50)], "ffmpeg"),
        ([process(50, "ray::DashboardAgent", parent=10)], "DashboardAgent"),
    ],
)
def test_whatever_a_raylet_started_and_is_not_idle_is_work(more: list[Process], words: str | None) -> None:
    found = works(node(*with_agents(10), *more))
    assert found is None if words is None else words in str(found)


def test_two_raylets_of_one_machine_have_agents_each() -> None:
    assert works(node(*with_agents(10), *with_agents(20))) is None


def rows(*found: dict[str, object]) -> dict[str, object]:
    page = {"result": list(found), "total": len(found), "num_after_truncation": len(found), "num_filtered": len(found)}
    return {"result": True, "msg": "", "data": {"result": page}}


@contextmanager
def dashboard(session: str, actors: list[dict[str, object]]) -> Iterator[str]:
    """A dashboard of one Ray node called abc."""
    answers: dict[str, object] = {
        "/api/version": {"ray_version": "2.60.0", "session_name": session},
        "/api/v0/nodes": rows({"node_id": "abc", "node_ip": "127.0.0.1", "state": "ALIVE", "is_head_node": True}),
        "/api/v0/actors": rows(*actors),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path.partition("?")[0], rows())).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def asked(address: str, setting: str | None = None) -> str | Unknown | None:
    one = as_raylet(raylet(2**22, "/tmp/ray", f"--python_worker_command=python --webui={address}"))
    return asyncio.run(DashboardQueries(setting, {}).busy([one]))


def test_ray_is_queried_where_its_raylet_says() -> None:
    with dashboard(SESSION, []) as address:
        assert asked(address) is None
    actor = {"actor_id": "1", "class_name": "Trainer", "state": "ALIVE", "node_id": "abc"}
    with dashboard(SESSION, [actor]) as address:
        assert asked(address) == "actor Trainer is alive"


def test_a_dashboard_of_another_session_says_nothing() -> None:
    with dashboard("session_of_another", []) as address:
        found = asked(address)
    assert isinstance(found, Unknown)
    assert "another session" in found.why


def test_the_policys_address_is_queried_first_and_the_raylets_own_when_it_is_another_cluster() -> None:
    with dashboard("session_of_another", []) as other, dashboard(SESSION, []) as address:
        assert asked(address, setting=other) is None
        assert asked("127.0.0.1:9", setting=address) is None


def test_a_dashboard_that_is_not_there_is_unknown() -> None:
    assert isinstance(asked("127.0.0.1:9"), Unknown)


def test_of_a_machine_only_what_a_raylet_started_or_calls_itself_so_is_rays() -> None:
    begun = process(50, "python", "step.py", parent=10)
    titled = process(51, "ray::Orphan")
    here = node(raylet(10, "/tmp/ray"), begun, titled, process(52, "postgres"), process(53, "my ray::no"))
    assert {one.pid for one in of_ray(here)} == {50, 51}
    container = Node(name="n", uid="u", door=NodeAccess(10, 1), processes=here.processes, raylets=here.raylets)
    assert {one.pid for one in of_ray(container)} == {10, 50, 51, 52, 53}


@pytest.mark.parametrize(("environ", "words"), [({}, "sweep"), ({OWN_JOB: "03000000"}, None)])
def test_the_task_that_runs_us_is_no_work_if_it_reports_it(environ: dict[str, str], words: str | None) -> None:
    task = process(50, "ray::sweep", parent=10)
    us = process(os.getpid(), "python", "-m", "gpukeeper", parent=50)
    ours = process(60, "du", parent=os.getpid())
    here = node(*with_agents(10), task, us, ours)
    idleness = Idleness(environ, tuple, "/proc", Timeouts())
    found = idleness.works(here)
    assert found is None if words is None else words in str(found)
    other = process(51, "ray::other", parent=10)
    assert idleness.works(node(*here.processes, other)) is not None


@pytest.mark.parametrize(
    ("own", "title", "parent", "is_work"),
    [
        ("03000000,gpukeeper-pass-1,71", "ray::JobSupervisor", 10, False),
        ("03000000,gpukeeper-pass-1", "ray::JobSupervisor", 10, True),  # the driver is not on this node
        ("03000000,gpukeeper-pass-1,99", "ray::JobSupervisor", 10, True),  # the pid of nothing
        ("03000000,gpukeeper-pass-1,71", "ray::Trainer", 10, True),  # an actor of a user
        ("03000000,gpukeeper-pass-1,71", "ray::JobSupervisor", 1, True),  # not started by Ray
        ("03000000,gpukeeper-pass-1,x", "ray::JobSupervisor", 10, True),
    ],
)
def test_the_driver_of_our_job_and_its_supervisor_are_no_work(own: str, title: str, parent: int, is_work: bool) -> None:
    task, us = process(50, "ray::one_pass", parent=10), process(os.getpid(), "python", parent=50)
    supervisor, driver = process(70, title, parent=parent), process(71, "python", "-c", "x", parent=70)
    watcher = process(72, "/bin/sh", "-c", "sleep 1", parent=70)
    here = node(*with_agents(10), task, us, supervisor, driver, watcher)
    idleness = Idleness({OWN_JOB: own}, tuple, "/proc", Timeouts())
    assert (idleness.works(here) is not None) is is_work
    another = process(80, "ray::JobSupervisor", parent=10)
    assert idleness.works(node(*here.processes, another, process(81, "python", "train.py", parent=80))) is not None

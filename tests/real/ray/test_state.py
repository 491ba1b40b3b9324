"""What cannot be learned from a real Ray is unknown, never idle: dead raylets and dashboards, tokens, strangers, and
lists that are cut off.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.clients.ray import StateApi
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.busy import ClusterState, busy
from gpukeeper.platforms.ray.nodes import raylet_of, read_processes
from gpukeeper.platforms.ray.state import DashboardQueries
from gpukeeper.platforms.ray.state import answers_of as state_of
from tests.real.ray.asking import answers_of, api_of, api_that_reports, ray_says, until_idle
from tests.real.ray.clusters import NEWEST, VERSIONS, Cluster, until
from tests.real.ray.test_versions import SLEEPER

Fresh = Callable[..., Cluster]
SOON = timedelta(seconds=2)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_node_of_a_killed_raylet_is_never_idle(fresh_cluster: Fresh, version: str) -> None:
    """At first Ray still believes in it, then calls it dead; of a driver that was there it never hears again."""
    cluster = fresh_cluster(version, nodes=2)
    _, second = cluster.nodes
    body = (
        f"actor = Sleeper.options(scheduling_strategy=on({second.node_id!r})).remote()\nray.get(actor.pid.remote())\n"
    )
    cluster.drive(SLEEPER + body + "say('ready')\nwait_for_end()").said()
    second.kill_raylet()
    seen: list[str | Unknown | None] = []

    def is_called_dead() -> bool:
        answers = answers_of(cluster.head)
        seen.append(busy(second.node_id, answers))
        if not isinstance(answers.nodes, tuple):  # its dashboard is busy with the death
            return False
        return any(node.node_id == second.node_id and node.state == "DEAD" for node in answers.nodes)

    def only_its_driver_is_left() -> bool:
        """Actors are requested before nodes, so that the last of them may be listed beside a dead node."""
        return is_called_dead() and (isinstance(seen[-1], Unknown) or str(seen[-1]).startswith("driver of job "))

    until(only_its_driver_is_left, "Ray calls it dead", lambda: str(seen[-3:]))
    assert None not in seen


def test_without_dashboard_or_its_store_nothing_is_known(fresh_cluster: Fresh) -> None:
    cluster = fresh_cluster()
    head = cluster.head
    api = StateApi(api_of(head).address, deadline=SOON)
    (dashboard,) = [pid for pid, title in cluster.processes().items() if "/ray/dashboard/dashboard.py" in title]
    (store,) = [pid for pid, title in cluster.processes().items() if "/gcs_server " in title]

    os.kill(dashboard, signal.SIGSTOP)
    assert "did not answer within 2s" in _why(api, cluster)
    os.kill(dashboard, signal.SIGCONT)
    until(lambda: busy(head.node_id, _answers(api, cluster)) is None, "it answers again")

    os.kill(store, signal.SIGSTOP)
    assert api.address in _why(api, cluster)
    os.kill(store, signal.SIGKILL)
    assert api.address in _why(api, cluster)

    os.kill(dashboard, signal.SIGKILL)
    until(lambda: "refused" in _why(api, cluster), "nobody listens", lambda: _why(api, cluster))
    assert api_that_reports(head, SOON) is None


def test_a_token_goes_to_the_address_that_the_policy_names_and_to_no_other(fresh_cluster: Fresh) -> None:
    token = "0123456789abcdef0123456789abcdef"
    cluster = fresh_cluster(env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    head = cluster.head

    (raylet,) = (one for process in read_processes() if (one := raylet_of(process)) and one.node_id == head.node_id)

    def asked(setting: str | None, given: str | None) -> str | Unknown | None:
        environ = {} if given is None else {"RAY_AUTH_TOKEN": given}
        return asyncio.run(DashboardQueries(setting, environ).busy([raylet]))

    assert "requires a token" in str(asked(None, token))
    assert "requires a token" in str(asked(cluster.dashboard, None))
    assert "refused the token" in str(asked(cluster.dashboard, "f" * 32))
    assert asked(cluster.dashboard, token) is None


@pytest.mark.parametrize("any_cluster", [NEWEST], indirect=True)
def test_another_session_is_not_accepted(any_cluster: Cluster) -> None:
    """A port is used again by the next cluster, or by somebody else's."""
    gone = "session_2026-01-01_00-00-00_000000_1"
    answers = asyncio.run(state_of(StateApi(any_cluster.dashboard), gone))
    found = busy(any_cluster.head.node_id, answers)
    assert isinstance(found, Unknown)
    assert f"is {any_cluster.head.session}, not {gone}" in found.why


@pytest.mark.parametrize("any_cluster", [NEWEST], indirect=True)
def test_a_node_that_ray_does_not_know_is_unknown(any_cluster: Cluster) -> None:
    answers = asyncio.run(state_of(StateApi(any_cluster.dashboard), any_cluster.head.session))
    assert busy("0" * 56, answers) == Unknown("Ray does not know node 00000000")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_cut_off_list_hides_is_found_and_forgotten_tasks_are_no_reason_to_know_nothing(
    fresh_cluster: Fresh, version: str
) -> None:
    """The dashboard gets so many rows from its store, dead ones among them: here 6 instead of 10,000. And the store
    drops the events of tasks when it has too many, and says so for ever.
    """
    few = {"RAY_MAX_LIMIT_FROM_DATA_SOURCE": "6", "RAY_task_events_max_num_task_in_gcs": "20"}
    cluster = fresh_cluster(version, env=few)
    head = cluster.head
    body = """
@ray.remote(num_cpus=0)
def short():
    pass
for _ in range(8):
    actor = Sleeper.remote()
    ray.get(actor.pid.remote())
    ray.kill(actor)
ray.get([short.remote() for _ in range(40)])
lasting = Sleeper.options(name="lasting", lifetime="detached").remote()
ray.get(lasting.pid.remote())
say("ready")
wait_for_end()
"""
    driver = cluster.drive(SLEEPER + body)
    driver.said()
    page = _get(f"{cluster.dashboard}/api/v0/actors?limit=10000")["data"]["result"]
    assert page["num_after_truncation"] < page["total"], "it is not cut off: the test tests nothing"
    until(lambda: str(ray_says(head)).startswith("driver of job "), "the driver is seen", lambda: str(ray_says(head)))
    driver.end()
    until(lambda: ray_says(head) == "actor Sleeper is alive", "the actor is seen", lambda: str(ray_says(head)))
    cluster.drive('ray.kill(ray.get_actor("lasting"))').end()
    until_idle(head)


def _answers(api: StateApi, cluster: Cluster) -> ClusterState:
    return asyncio.run(state_of(api, cluster.head.session))


def _why(api: StateApi, cluster: Cluster) -> str:
    found = busy(cluster.head.node_id, _answers(api, cluster))
    assert isinstance(found, Unknown), found
    return found.why


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)

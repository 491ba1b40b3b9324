"""What counts as busy, on every release that we run: by Ray's own word and by the titles of its processes."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from gpukeeper.platforms.ray.busy import foreign, quiet
from tests.real.ray.asking import api_of, is_idle, ray_says, until_idle
from tests.real.ray.clusters import NEWEST, VERSIONS, Cluster, until
from tests.smoke import smoke

SLEEPER = """
@ray.remote(num_cpus=0)
class Sleeper:
    def pid(self):
        return os.getpid()
"""


def test_the_dashboard_is_found_by_any_raylet_and_names_their_session(any_cluster: Cluster) -> None:
    head, second = any_cluster.nodes
    assert head.session == second.session
    assert api_of(head).address == api_of(second).address == any_cluster.dashboard


@pytest.mark.parametrize("any_cluster", smoke(VERSIONS, NEWEST.__eq__), indirect=True)
def test_nodes_without_work_are_idle(any_cluster: Cluster) -> None:
    until_idle(*any_cluster.nodes)


def test_all_of_rays_own_programs_are_known(any_cluster: Cluster) -> None:
    until_idle(*any_cluster.nodes)
    titles = any_cluster.processes().values()
    assert quiet(titles) is None
    assert foreign(titles) is None


def test_a_driver_that_only_holds_an_object_keeps_its_node_busy(any_cluster: Cluster) -> None:
    until_idle(*any_cluster.nodes)
    driver = any_cluster.drive(
        "held = ray.put(os.urandom(1_000_000))\nsay('ready', ray.get_runtime_context().get_node_id())\nwait_for_end()"
    )
    where = driver.said()
    its = next(node for node in any_cluster.nodes if node.node_id == where)
    (other,) = [node for node in any_cluster.nodes if node is not its]
    assert str(ray_says(its)).startswith("driver of job ")
    assert "driver-" in str(foreign([any_cluster.processes()[driver.pid]]))
    until(lambda: is_idle(other), "the other node is idle")
    driver.end()
    until_idle(its)


def test_an_actor_that_needs_nothing_and_does_nothing_keeps_only_its_node_busy(any_cluster: Cluster) -> None:
    """Also one that outlives its driver, until it is killed."""
    head, second = any_cluster.nodes
    until_idle(head, second)
    body = f"""
actor = Sleeper.options(scheduling_strategy=on({second.node_id!r}), name="lasting", lifetime="detached").remote()
ray.get(actor.pid.remote())
say("ready")
wait_for_end()
"""
    driver = any_cluster.drive(SLEEPER + body)
    driver.said()
    assert ray_says(second) == "actor Sleeper is alive" or "driver" in str(ray_says(second))
    assert quiet(second.titles()) == "worker Sleeper runs"
    driver.end()
    until(lambda: ray_says(second) == "actor Sleeper is alive", "only the actor is left", lambda: str(ray_says(second)))
    assert quiet(second.titles()) == "worker Sleeper runs"
    until_idle(head)
    any_cluster.drive('ray.kill(ray.get_actor("lasting"))').end()
    until_idle(second)


@pytest.mark.parametrize("any_cluster", smoke(VERSIONS, NEWEST.__eq__), indirect=True)
def test_a_running_task_keeps_only_its_node_busy_also_when_its_driver_is_killed(any_cluster: Cluster) -> None:
    head, second = any_cluster.nodes
    until_idle(head, second)
    body = f"""
@ray.remote(num_cpus=0)
def train_step():
    open({str(any_cluster.root / "began")!r}, "w").close()
    time.sleep(3600)
running = train_step.options(scheduling_strategy=on({second.node_id!r})).remote()
say("ready")
wait_for_end()
"""
    (any_cluster.root / "began").unlink(missing_ok=True)
    driver = any_cluster.drive(body)
    driver.said()
    until((any_cluster.root / "began").exists, "the task runs", lambda: driver.log)
    assert quiet(second.titles()) == "worker train_step runs"
    until(
        lambda: str(ray_says(second)) == "task train_step runs" or "driver" in str(ray_says(second)),
        "Ray has heard of it",
        lambda: str(ray_says(second)),
    )
    assert quiet(head.titles()) is None
    driver.kill()
    until_idle(head, second)


def test_a_placement_group_keeps_every_node_busy_that_holds_a_bundle(any_cluster: Cluster) -> None:
    head, second = any_cluster.nodes
    until_idle(head, second)
    body = """
from ray.util.placement_group import placement_group
group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD", name="reserved", lifetime="detached")
assert group.wait(60)
"""
    any_cluster.drive(body).end()
    for node in (head, second):
        until(lambda node=node: ray_says(node) == "placement group reserved holds a bundle", "it is held")
    any_cluster.drive('ray.util.remove_placement_group(ray.util.get_placement_group("reserved"))').end()
    until_idle(head, second)


def test_a_submitted_job_keeps_the_head_busy_also_without_any_use_of_ray(any_cluster: Cluster) -> None:
    """Ray's agent there becomes a driver for ever, which is not work."""
    head, second = any_cluster.nodes
    until_idle(head, second)
    jobs = f"{any_cluster.dashboard}/api/jobs/"
    job = _post(jobs, {"entrypoint": "sleep 3600"})["submission_id"]
    assert job in str(ray_says(head)) or "JobSupervisor" in str(ray_says(head))
    until(lambda: ray_says(head) == "actor JobSupervisor is alive", "it runs", lambda: str(ray_says(head)))
    assert ray_says(second) is None
    _post(f"{jobs}{job}/stop", {})
    until_idle(head, second)


def _post(url: str, body: dict[str, str]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

"""What Ray's answers and the titles of its processes mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.busy import (
    Bundle,
    ClusterState,
    Driver,
    Job,
    PlacementGroup,
    RayActor,
    RayNode,
    Task,
    Worker,
    busy,
    foreign,
    quiet,
    without,
)

HERE, THERE, IP = "a" * 56, "b" * 56, "10.0.0.1"
NODES = (RayNode(HERE, IP, "ALIVE", True), RayNode(THERE, IP, "ALIVE", False))
NOTHING = ClusterState(nodes=NODES, workers=(), actors=(), tasks=(), groups=(), jobs=())
RECORDED = sorted(Path(__file__).with_name("recorded").glob("ray-*.json"))
RAYLET = "/venv/ray/core/src/ray/raylet/raylet --node_id=a"


def said(**parts: Any) -> ClusterState:
    return msgspec.structs.replace(NOTHING, **parts)


def driver(job_id: str, node_id: str = HERE, alive: bool = True) -> Worker:
    return Worker(job_id + "f" * 48, "DRIVER", alive, node_id, 7)


def actor(name: str = "Trainer", state: str = "ALIVE", node_id: str | None = HERE) -> RayActor:
    return RayActor(f"{name}-{state}", name, state, node_id)


def task(name: str = "train_step", state: str = "RUNNING", node_id: str | None = HERE) -> Task:
    return Task(f"{name}-{state}", name, state, node_id)


def group(state: str = "CREATED", *node_ids: str | None, name: str | None = "reserved") -> PlacementGroup:
    return PlacementGroup(state, name, tuple(Bundle(node_id) for node_id in node_ids))


RUNNING = Job("RUNNING", "03000000", driver=Driver(IP))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (said(actors=(actor(),)), "actor Trainer is alive"),
        (said(actors=(actor("B"), actor("A"), actor("C", "DEAD"))), "2 actors are alive, A for one"),
        (said(actors=(actor(state="PENDING_CREATION"),)), "actor Trainer starts"),
        (said(actors=(actor(state="RESTARTING"),)), "actor Trainer starts"),
        (said(actors=(actor(state="NEW_IN_RAY_3"),)), "actor Trainer starts"),
        (said(tasks=(task(),)), "task train_step runs"),
        (said(tasks=(task("b"), task("a", "RUNNING_IN_RAY_GET"))), "2 tasks run, a for one"),
        (said(tasks=(task(state="PENDING_ARGS_FETCH"),)), "task train_step runs"),
        (said(tasks=(task(state="NIL"),)), "task train_step runs"),
        (said(groups=(group("CREATED", THERE, HERE),)), "placement group reserved holds a bundle"),
        (said(groups=(group("RESCHEDULING", HERE, name=None),)), "a placement group holds a bundle"),
        (said(workers=(driver("03000000"),), jobs=(RUNNING,)), "driver of job 03000000 is alive"),
        (said(jobs=(RUNNING,)), "job 03000000 is running"),
        (said(jobs=(Job("PENDING", submission_id="raysubmit_1"),)), "job raysubmit_1 is pending"),
        (said(jobs=(Job("{x}", submission_id="{0}%s"),)), "job {0}%s is {x}"),
        (said(jobs=(Job("{}\x1b[2J", "b"), Job("{y}", "a"))), "2 jobs, a for one, which is {}?[2j"),
        (said(jobs=(Job("RUNNING", submission_id="raysubmit_1", driver_node_id=HERE),)), "job raysubmit_1 is running"),
    ],
)
def test_what_runs_there_is_named(answers: ClusterState, words: str) -> None:
    assert busy(HERE, answers) == words


@pytest.mark.parametrize(
    "answers",
    [
        NOTHING,
        said(workers=(Worker("c" * 56, "WORKER", True, HERE, 7), Worker("d" * 56, "SPILL_WORKER", True, HERE, 8))),
        said(workers=(driver("03000000", alive=False),), jobs=(Job("SUCCEEDED", "03000000"),)),
        said(actors=(actor(state="DEAD"), actor(node_id=THERE), actor(state="PENDING_CREATION", node_id=None))),
        said(tasks=(task(state="FINISHED"), task(state="FAILED"), task(node_id=THERE), task(node_id=None))),
        said(groups=(group("REMOVED", HERE), group("CREATED", THERE), group("PENDING", None, ""))),
        said(
            jobs=(
                Job("SUCCEEDED", "03000000", driver=Driver(IP)),
                Job("RUNNING", "04000000", driver=Driver("10.0.0.2")),
            )
        ),
        said(jobs=(Job("RUNNING", submission_id="raysubmit_1", driver_node_id=THERE),)),
    ],
)
def test_what_is_over_idle_or_elsewhere_does_not_count(answers: ClusterState) -> None:
    assert busy(HERE, answers) is None


def test_of_two_nodes_with_one_address_only_the_drivers_own_is_busy() -> None:
    answers = said(workers=(driver("03000000", THERE),), jobs=(RUNNING,))
    assert busy(HERE, answers) is None
    assert busy(THERE, answers) == "driver of job 03000000 is alive"


def test_rays_own_agent_is_a_driver_of_no_job_and_no_work() -> None:
    answers = said(workers=(driver("01000000"),), jobs=())
    assert busy(HERE, answers) is None
    unsure = said(workers=(driver("01000000"),), jobs=Unknown("jobs?"))
    assert busy(HERE, unsure) == "driver of job 01000000 is alive"


def test_a_job_that_waits_counts_at_the_head_only() -> None:
    assert busy(THERE, said(jobs=(Job("PENDING", submission_id="raysubmit_1"),))) is None


@pytest.mark.parametrize("part", ["workers", "actors", "tasks", "groups", "jobs"])
def test_what_could_not_be_learned_is_unknown_unless_something_is_known_to_run(part: str) -> None:
    unknown = Unknown("not told")
    assert busy(HERE, said(**{part: unknown})) == unknown
    other: dict[str, Any] = {"tasks": (task(),)} if part == "actors" else {"actors": (actor(),)}
    assert isinstance(busy(HERE, said(**{part: unknown}, **other)), str)


def test_a_dead_or_foreign_node_is_unknown_never_idle() -> None:
    dead = (RayNode(HERE, IP, "DEAD", False),)
    assert busy(HERE, said(nodes=dead)) == Unknown("Ray reports node aaaaaaaa as dead")
    assert busy(HERE, said(nodes=dead, actors=(actor(),))) == "actor Trainer is alive"
    assert busy("c" * 56, NOTHING) == Unknown("Ray does not know node cccccccc")
    assert busy(HERE, said(nodes=Unknown("not told"), actors=(actor(),))) == Unknown("not told")


def test_names_of_users_stay_on_one_short_line() -> None:
    words = busy(HERE, said(tasks=(task("a\nb\x1b[31m" + "x" * 500),)))
    assert isinstance(words, str)
    assert words.isprintable()
    assert len(words) < 100


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("ray::train_step", "worker train_step runs"),
        ("ray::my task", "worker my task runs"),
        ("ray::Trainer", "worker Trainer runs"),
        ("ray::Trainer.fit", "worker Trainer.fit runs"),
        ("ray::SPILL_SpillWorker", "worker SPILL_SpillWorker runs"),
        ("ray::DELETE_RestoreWorker", "worker DELETE_RestoreWorker runs"),
        ("ray::IDLE_mine", "worker IDLE_mine runs"),
        (
            "python /venv/ray/_private/workers/setup_worker.py /venv/ray/_private/workers/default_worker.py",
            "a worker is starting",
        ),
        ("java -cp x io.ray.runtime.runner.worker.DefaultWorker", "a worker is starting"),
    ],
)
def test_a_worker_at_work_is_not_quiet(title: str, words: str) -> None:
    assert quiet([RAYLET, "ray::IDLE", title]) == words
    assert foreign([RAYLET, "ray::IDLE", title]) == words


@pytest.mark.parametrize(
    "title",
    [
        "ray::IDLE",
        "ray::IDLE_SpillWorker",
        "ray::IDLE_RestoreWorker",
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
        "",
    ],
)
def test_idle_workers_and_agents_are_quiet(title: str) -> None:
    assert quiet([RAYLET, title]) is None
    assert foreign([RAYLET, title]) is None


def test_an_actor_that_is_called_like_an_agent_is_an_actor() -> None:
    agents = ["ray::DashboardAgent"] * 2
    assert quiet([RAYLET, *agents]) == "worker DashboardAgent runs"
    assert quiet([RAYLET, RAYLET + "b", *agents]) is None


@pytest.mark.parametrize("title", ["python3 /home/ann/train.py --lr 1", "VLLM::EngineCore", "/bin/bash -l"])
def test_a_program_that_is_not_rays_own_counts_where_it_surely_belongs_to_the_session(title: str) -> None:
    assert quiet([RAYLET, title]) is None
    assert "is not one of Ray's own" in str(foreign([RAYLET, title]))


def test_a_foreign_program_is_named_without_directories_and_arguments() -> None:
    said = foreign(["/usr/bin/python3 /home/ann/train.py --password x"])
    assert said == "process python3 train.py is not one of Ray's own"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_of_a_real_cluster_everything_but_its_work_is_known(path: Path) -> None:
    """Titles of every process, as they were on a real one while a driver was at work and a worker started."""
    seen = json.loads(path.read_text())
    work = {"ray::Trainer", "ray::Trainer.fit", "ray::train_step", "ray::my task"}
    others = ("driver-0.py", "/workers/default_worker.py ")
    own = [title for title in seen["titles"] if title not in work and not any(word in title for word in others)]
    assert work < set(seen["titles"])
    assert quiet([*own, *(" ".join(argv) for argv in seen["raylets"])]) is None
    assert foreign([*own, *(" ".join(argv) for argv in seen["raylets"])]) is None
    for title in set(seen["titles"]) - set(own):
        assert foreign([*own, title]) is not None, title


def test_there_are_recorded_clusters() -> None:
    assert len(RECORDED) == 3


def test_our_own_job_is_no_work_and_every_other_is() -> None:
    ours = said(
        workers=(driver("03000000"),),
        actors=(msgspec.structs.replace(actor(), job_id="03000000"),),
        tasks=(msgspec.structs.replace(task(), job_id="03000000"),),
        jobs=(RUNNING,),
    )
    assert busy(HERE, ours) is not None
    assert busy(HERE, without("03000000", ours)) is None
    assert busy(HERE, without("04000000", ours)) == busy(HERE, ours)


def test_the_supervisor_of_our_own_job_is_no_work_and_that_of_another_is() -> None:
    """It belongs to a job of Ray's own."""
    named = msgspec.structs.replace(actor(), job_id="01000000", name="_ray_internal_job_actor_gpukeeper-pass-1")
    assert busy(HERE, without("03000000,gpukeeper-pass-1,71", said(actors=(named,)))) is None
    assert busy(HERE, without("03000000,gpukeeper-pass-2", said(actors=(named,)))) is not None
    assert busy(HERE, without("03000000", said(actors=(named,)))) is not None


@pytest.mark.parametrize("part", ["workers", "actors", "tasks", "jobs"])
def test_what_is_unknown_stays_so_without_our_job(part: str) -> None:
    assert isinstance(busy(HERE, without("03000000", said(**{part: Unknown("?")}))), Unknown)

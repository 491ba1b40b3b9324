"""What is removed beside a real Ray, and what is not. Everything that the facts allow is tried, without any age: the
clock of these tests is two days ahead: the time of a change cannot be set back, and a read may go unrecorded for a
day."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.disk import open_files
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Accepted, Action, Changed, Decision, Evidence, Refused, Step
from gpukeeper.model.policy import PlaceScope, Policy, Temporary
from gpukeeper.model.subject import Category, Gone, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.nodes import Process, read_processes
from gpukeeper.platforms.ray.settings import RaySettings
from gpukeeper.platforms.ray.survey import NodesAccess
from tests.real.ray.clusters import NEWEST, Cluster, until

FRESH = Callable[..., Cluster]
SWEEPS = 6
ACTOR_AND_TASK = """
@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, path):
        self.file = open(path, "w")
        self.file.write("state"); self.file.flush()
    def read(self):
        return open(self.file.name).read()

@ray.remote(num_cpus=0)
def train_step(path):
    with open(path, "w") as file:
        file.write("checkpoint"); file.flush()
        while not os.path.exists({end!r}):
            time.sleep(0.05)
    return open(path).read()

trainer = Trainer.remote({actor!r})
assert ray.get(trainer.read.remote()) == "state"
step = train_step.remote({task!r})
while not os.path.exists({task!r}):
    time.sleep(0.05)
say("ready")
while not os.path.exists({end!r}):
    time.sleep(0.05)
say("result", ray.get(step), ray.get(trainer.read.remote()))
wait_for_end()
"""


class Ahead:
    def __init__(self, ahead: timedelta = timedelta(days=2)) -> None:
        self.ahead = ahead

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


def everything_seen() -> OpenFiles:
    """As root on a whole machine sees it: a test machine may hide its first process even from root."""
    return msgspec.structs.replace(open_files.scan(), hidden=None)


def platform(cluster: Cluster, ahead: timedelta = timedelta(days=2), **how: Any) -> RayPlatform:
    """That sees the processes of this cluster, and of nobody else's on this machine."""
    scratch = cluster.root / "scratch"
    scratch.mkdir(exist_ok=True)
    if not (scratch / "ray").is_symlink():
        # As people do who have a big disk: the root is a link, and it is found when no raylet tells of it any more.
        (scratch / "ray").symlink_to(cluster.root / "t")
    settings = RaySettings(roots=(str(scratch),), cpu=1e9, window=timedelta(milliseconds=10))
    temporary = (Temporary(root=str(scratch), names=settings.names, above=0, platform="ray"),)
    policy = Policy(scope={"ray": PlaceScope()}, platforms={"ray": settings}, temporary=temporary)

    def everyone() -> tuple[Process, ...]:
        known = cluster.processes()
        return tuple(one for one in read_processes() if one.pid in known)

    access = NodesAccess(**{"scan": everything_seen, "everyone": everyone} | how)
    return RayPlatform("here", policy, Ahead(ahead), environ={}, access=access)


def leave(cluster: Cluster, name: str) -> Path:
    folder = cluster.root / "scratch" / name
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"x" * 100_000)
    return folder


def skeleton(cluster: Cluster, name: str) -> Path:
    """What a failed start leaves."""
    folder = cluster.root / "t" / name
    (folder / "logs").mkdir(parents=True)
    (folder / "sockets").mkdir()
    (folder / "logs" / "raylet.out").write_text("could not start\n")
    return folder


async def subjects(ray: RayPlatform, cluster: Cluster) -> list[Subject]:
    """Of this cluster; this machine may have other sessions, which are nobody's business here."""
    found = [one async for page in ray.observe(PlaceScope()) for one in page.subjects]
    return [one for one in found if one.shape is Shape.NODE or one.ref.name.startswith(str(cluster.root))]


def step(subject: Subject) -> Step:
    return Step("1.1", Decision(seen=subject.seen, action=Action.REMOVE, rule="leftover_tree", reason="because"))


def is_free(subject: Subject) -> bool:
    return subject.shape is Shape.TREE and subject.in_use is False and subject.busy is None and subject.kept is None


async def sweep(ray: RayPlatform, cluster: Cluster) -> list[str]:
    """Removes all that is free. The names of what went."""
    gone = []
    for one in await subjects(ray, cluster):
        if is_free(one):
            found = await ray.read(one.ref)
            assert isinstance(found, Subject), found
            answer = await ray.act(step(found), found)
            if isinstance(answer, Accepted) and isinstance(await ray.read(one.ref), Gone):
                gone.append(Path(one.ref.name).name)
    return gone


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def session_of(ray: RayPlatform, cluster: Cluster, name: str) -> Subject:
    found = await subjects(ray, cluster)
    return next(one for one in found if one.ref.kind == "session" and Path(one.ref.name).name == name)


async def node_of(ray: RayPlatform, cluster: Cluster) -> Subject:
    return next(one for one in await subjects(ray, cluster) if one.shape is Shape.NODE)


def end_all(cluster: Cluster) -> None:
    """As a crash of the machine's Ray does: nothing tidies up."""

    def gone() -> bool:
        for pid in (left := list(cluster.processes())):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not left

    until(gone, "nothing of the cluster runs")


def test_work_goes_on_while_everything_around_it_is_removed(fresh_cluster: FRESH) -> None:
    """An actor and a task with files in the scratch folder, through sweeps that remove all that is free."""
    cluster = fresh_cluster(NEWEST)
    ray = platform(cluster)
    names = {"actor": "tmpactor", "task": "tmptask"}
    files = {key: str(leave(cluster, name) / "open") for key, name in names.items()}
    body = ACTOR_AND_TASK
    for key, value in {**files, "end": str(cluster.root / "end")}.items():
        body = body.replace(f"{{{key}!r}}", repr(value))
    driver = cluster.drive(body)
    driver.said("ready")
    live = cluster.head.session
    gone: list[str] = []

    def removed(*names: str) -> Callable[[], bool]:
        """After one more sweep. It removes nothing while processes of other tests keep it from seeing what is used."""

        def once_more() -> bool:
            gone.extend(run(sweep(ray, cluster)))
            return set(names) <= set(gone)

        return once_more

    for number in range(SWEEPS):
        dead = skeleton(cluster, f"session_2026-01-01_00-00-00_000000_{number}")
        leave(cluster, f"tmp{number}")
        until(removed(dead.name), "the dead session is removed")
    assert (cluster.root / "t" / live).is_dir()
    assert live not in gone
    assert sorted(path.name for path in (cluster.root / "scratch").iterdir() if path.name in names.values()) == [
        *("tmpactor", "tmptask")
    ]
    # The node is busy, so not even a closed tree went; it is only said what it would be.
    assert not [name for name in gone if name.startswith("tmp")]
    node = run(node_of(ray, cluster))
    assert isinstance(node.busy, str)
    (cluster.root / "end").touch()
    assert driver.said("result") == "checkpoint state"
    driver.end()
    until(lambda: run(node_of(ray, cluster)).busy is None, "the node is idle again")
    until(removed(*(f"tmp{number}" for number in range(SWEEPS)), "tmpactor", "tmptask"), "all trees are removed")
    again = cluster.drive("say('still', ray.get(ray.remote(lambda: 7).remote()))\nwait_for_end()\n")
    assert again.said("still") == "7"
    again.end()


def test_a_session_lives_until_nothing_of_it_does(fresh_cluster: FRESH) -> None:
    """Its name's pid is dead from the start, and `session_latest` leads elsewhere; then all of it is killed."""
    cluster = fresh_cluster(NEWEST)
    ray, name = platform(cluster), cluster.head.session
    assert not Path(f"/proc/{name.rpartition('_')[2]}").exists()
    latest = cluster.root / "t/session_latest"
    latest.unlink()
    latest.symlink_to(skeleton(cluster, "session_2026-01-01_00-00-00_000000_1"))
    lives = run(session_of(ray, cluster, name))
    assert (lives.in_use, lives.state) == (True, State.RUNNING)
    assert isinstance(run(ray.act(step(lives), lives)), Changed | Refused)
    causes = run(ray.diagnose(lives.ref)).causes
    assert any("names it in its command line" in cause.words for cause in causes)

    cluster.head.kill_raylet()
    # GCS, dashboard and log monitor of it run on.
    assert run(session_of(ray, cluster, name)).in_use is True
    end_all(cluster)
    dead = run(session_of(ray, cluster, name))
    assert dead.in_use is False, dead
    assert dead.category is Category.DEAD_SESSION
    assert isinstance(dead.size, int)
    assert dead.size > 100_000

    # Too young, whatever a policy says.
    young = platform(cluster, timedelta(minutes=50))
    answer = run(young.act(step(dead), run(young.read(dead.ref))))
    assert isinstance(answer, Changed)
    assert "younger than an hour" in answer.why

    evidence = run(ray.capture(dead, ("logs",)))
    assert isinstance(evidence, Evidence)
    assert b"raylet" in evidence.files["logs/raylet.out"]
    assert max(map(len, evidence.files.values())) <= 64 * 1024
    again = run(ray.read(dead.ref))
    assert again.seen.incarnation == dead.seen.incarnation
    assert again.last_used == dead.last_used
    assert isinstance(run(ray.act(step(again), again)), Accepted)
    assert isinstance(run(ray.read(dead.ref)), Gone)
    assert not (cluster.root / "t" / name).exists()
    assert (cluster.root / "t").is_dir()


@pytest.mark.parametrize("version", ["2.40.0", NEWEST])
def test_of_two_raylets_one_dead_the_session_lives(fresh_cluster: FRESH, version: str) -> None:
    """Before 2.55 both share one folder; since then the second has one of its own, of the same name."""
    cluster = fresh_cluster(version, nodes=2)
    ray = platform(cluster)
    second = cluster.nodes[1]
    second.kill_raylet()
    until(lambda: len(second.titles()) == 1, "what it started is gone, too")
    found = [one for one in run(subjects(ray, cluster)) if one.ref.kind == "session"]
    shared = second.session_dir == cluster.head.session_dir
    assert len(found) == (1 if shared else 2)
    first = next(one for one in found if os.path.realpath(one.ref.name) == str(cluster.head.session_dir))
    assert first.in_use is True
    # The second's log monitor runs on, and Ray still speaks for a session of that name.
    assert all(one.in_use is True for one in found)
    assert run(sweep(ray, cluster)) == []
    assert cluster.head.session_dir.is_dir()
    assert second.session_dir.is_dir()


def test_a_task_that_begins_between_plan_and_act_keeps(fresh_cluster: FRESH) -> None:
    cluster = fresh_cluster(NEWEST)
    ray = platform(cluster)
    leave(cluster, "tmpone")

    async def planned() -> Subject:
        found = await subjects(ray, cluster)
        return next(one for one in found if Path(one.ref.name).name == "tmpone")

    one = run(planned())
    assert is_free(one), one
    driver = cluster.drive(
        "@ray.remote(num_cpus=0)\nclass Sleeper:\n    def hello(self): return 1\n"
        "actor = Sleeper.options(lifetime='detached', name='s').remote()\n"
        "ray.get(actor.hello.remote())\nsay('ready')\nwait_for_end()\n"
    )
    driver.said()
    driver.end()
    # No driver, no processor time: only Ray and a title know of it.
    again = run(ray.read(one.ref))
    assert isinstance(again, Subject)
    assert isinstance(again.busy, str)
    assert "Sleeper" in again.busy
    answer = run(ray.act(step(one), one))
    assert isinstance(answer, Changed)
    assert "Sleeper" in answer.why
    assert (cluster.root / "scratch/tmpone").is_dir()


def test_a_driver_alone_makes_its_node_busy(fresh_cluster: FRESH) -> None:
    cluster = fresh_cluster(NEWEST)
    ray = platform(cluster)
    assert run(node_of(ray, cluster)).busy is None
    driver = cluster.drive("say('ready')\nwait_for_end()\n")
    driver.said()
    node = run(node_of(ray, cluster))
    assert isinstance(node.busy, str)
    assert "driver" in node.busy
    assert node.labels["sessions_live"] == "1"
    assert (node.labels["ray"], node.labels["session"]) == (NEWEST, cluster.head.session)
    driver.end()
    until(lambda: run(node_of(ray, cluster)).busy is None, "the node is idle again")


def test_a_ray_that_cannot_be_queried_is_not_idle(fresh_cluster: FRESH) -> None:
    cluster = fresh_cluster(NEWEST)
    ray = platform(cluster)
    leave(cluster, "tmpone")
    for pid, title in cluster.processes().items():
        if "dashboard/dashboard.py" in title or title.startswith("ray-dashboard-"):
            os.kill(pid, signal.SIGKILL)
    node = run(node_of(ray, cluster))
    assert isinstance(node.busy, Unknown), node.busy
    assert any("is unknown" in words for words in node.findings)
    assert run(sweep(ray, cluster)) == []
    assert (cluster.root / "scratch/tmpone").is_dir()


def test_logs_of_ended_workers_go_and_nothing_else_of_a_live_session(fresh_cluster: FRESH) -> None:
    cluster = fresh_cluster(NEWEST)
    ray = platform(cluster, timedelta(days=8))
    body = (
        "@ray.remote(num_cpus=0)\nclass A:\n    def pid(self): print('hello'); return os.getpid()\n"
        "one, two = A.remote(), A.remote()\n"
        "pids = ray.get([one.pid.remote(), two.pid.remote()])\nray.kill(one)\nsay('pids', *pids)\nwait_for_end()\n"
    )
    driver = cluster.drive(body)
    dead, alive = map(int, driver.said("pids").split())
    until(lambda: not Path(f"/proc/{dead}").exists(), "the first actor's process is gone")
    logs = cluster.head.session_dir / "logs"

    def of(pid: int) -> set[str]:
        return {path.name for path in logs.rglob("*") if str(pid) in path.name}

    def still_open(pid: int) -> set[str]:
        """By the log monitor, which keeps what it follows open for a while."""
        used = everything_seen().files
        return {path.name for path in logs.rglob(f"*{pid}*") if (path.stat().st_dev, path.stat().st_ino) in used}

    others = {path for path in logs.rglob("*") if str(dead) not in path.name}
    closed = of(dead) - still_open(dead)
    assert closed

    async def removed() -> Any:
        found = next(one for one in await subjects(ray, cluster) if one.ref.kind == "logs")
        evidence = await ray.capture(found, ("logs",))
        return found, evidence, await ray.act(step(found), found), await ray.read(found.ref)

    found, evidence, answer, after = run(removed())
    assert found.category is Category.DEAD_LOGS
    assert int(found.labels["files"]) == len(closed)
    assert isinstance(evidence, Evidence)
    assert isinstance(answer, Accepted), answer
    assert isinstance(after, Gone)
    assert of(dead) == still_open(dead)
    assert of(alive)
    assert {path for path in others if not path.exists()} == set()
    assert ".gpukeeper" not in " ".join(path.name for path in logs.rglob("*"))
    driver.end()


def test_whom_it_cannot_look_into_may_use_it(fresh_cluster: FRESH) -> None:
    """Even root may be refused a process: then nothing is known to be free."""
    cluster = fresh_cluster(NEWEST)
    leave(cluster, "tmpone")
    end_all(cluster)
    hidden = "the open files of 1 other processes could not be read"

    def scan() -> OpenFiles:
        return msgspec.structs.replace(open_files.scan(), hidden=hidden)

    ray = platform(cluster, scan=scan)
    found = [one for one in run(subjects(ray, cluster)) if one.shape is Shape.TREE]
    assert {one.ref.kind for one in found} == {"session", "tree"}
    assert all(one.in_use == Unknown(hidden) for one in found)
    for one in found:
        answer = run(ray.act(step(one), one))
        assert isinstance(answer, Refused)
        assert hidden in answer.why
    assert (cluster.root / "scratch/tmpone/data").exists()

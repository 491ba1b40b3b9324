"""Ray nodes in containers of a real engine: what idle ones left goes, a busy one is untouched."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import time
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.blocking import SystemClock
from gpukeeper.clients.docker import Engine
from gpukeeper.disk import open_files
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.ledger.files import ledger_path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.decision import Accepted, Action, Changed, Decision, Step
from gpukeeper.model.policy import PlaceScope, Policy, Temporary
from gpukeeper.model.subject import Category, Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.adapter import DockerPlatform
from gpukeeper.platforms.host.connect import hostname
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.settings import NodeContainer, RaySettings
from gpukeeper.platforms.ray.survey import NodesAccess
from tests.engines import has_ray, require
from tests.real.docker import kernel
from tests.real.docker.private_engine import DockerEngine
from tests.real.ray import sandbox
from tests.real.ray.clusters import NEWEST, folder_of

MB = 1_000_000
ROOT = "/scratch-of-a-node"  # which this machine itself does not have
PYTHON = ("python3", "-c")
WAIT = (*PYTHON, "import time; time.sleep(1e6)")
HOLD = "import time; file = open({!r}); time.sleep(1e6)"
# A worker's title is all of its argv; PYTHONHOME, since Python looks for its library beside the program's name.
CALLED = "import os, sys; os.environ['PYTHONHOME'] = sys.prefix; os.execv(sys.executable, [{!r}, '-c', {!r}])"
POLICY: dict[str, object] = {
    "mode": "enforce",
    "scope": {"ray": {}},
    "disk": {"high": "100%", "low": "99%"},  # however full the disk of this machine is
    "ray": {
        "roots": [ROOT],
        "above": "50MB",
        "older_than": "1s",
        "under_pressure": "1s",
        "window": "1s",
        "cpu": "50%",
        "sessions": "none",
        "logs": "none",
    },
}


# What removes a tree inspects all processes first, and keeps it while programs start and end faster than they are read.
pytestmark = pytest.mark.alone


def scratch(engine: DockerEngine, name: str) -> Path:
    return Path(f"/proc/{engine.pid(name)}/root{ROOT}")


def worker(engine: DockerEngine, name: str, **how: Any) -> None:
    engine.run(name, image="py:1", cmd=WAIT, **how)
    scratch(engine, name).mkdir(exist_ok=True)


def fill(engine: DockerEngine, name: str, tree: str, size: int = 350 * MB) -> None:
    folder = scratch(engine, name) / tree
    folder.mkdir()
    with (folder / "data").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def entries(engine: DockerEngine, name: str) -> list[str]:
    return sorted(path.name for path in scratch(engine, name).iterdir())


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def hold(engine: DockerEngine, name: str, path: str, title: str | None = None) -> None:
    """Somebody in the container has that file open; `title`: and calls itself so."""
    program = HOLD.format(path)
    pid = engine.exec(name, [*PYTHON, program if title is None else CALLED.format(title, program)])
    engine.until(lambda: any(path in link for link in kernel.open_files(pid)), f"{path} is open")


def everything_seen() -> OpenFiles:
    """As root on a whole machine sees it: a test machine may hide its first process even from root."""
    return msgspec.structs.replace(open_files.scan(), hidden=None)


def platform(engine: DockerEngine, *names: str, above: int = 0) -> RayPlatform:
    """Of these containers only: nothing of this machine itself, whatever others do there."""

    async def inside(patterns: Sequence[str]) -> Sequence[NodeContainer]:
        return [NodeContainer(name, engine.pid(name), engine.id(name)) for name in names]

    settings = RaySettings(roots=(ROOT,), cpu=50.0, window=timedelta(seconds=1))
    temporary = (Temporary(root=ROOT, names=settings.names, above=above, platform="ray"),)
    policy = Policy(scope={"ray": PlaceScope()}, platforms={"ray": settings}, temporary=temporary)
    return RayPlatform("here", policy, SystemClock(), inside, access=NodesAccess(scan=everything_seen), environ={})


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def subjects(ray: RayPlatform) -> list[Subject]:
    return [one async for page in ray.observe(PlaceScope()) for one in page.subjects]


async def tree(ray: RayPlatform, node: str, name: str) -> Subject:
    found = await subjects(ray)
    return next(one for one in found if (one.ref.namespace, one.ref.name) == (node, f"{ROOT}/{name}"))


def removal(subject: Subject) -> Step:
    return Step("1.1", Decision(seen=subject.seen, action=Action.REMOVE, rule="temporary_tree", reason="because"))


def gpukeeper(engine: DockerEngine, *words: str, policy: dict[str, object] = POLICY) -> Any:
    done = sandbox.run(engine.folder, *words, "--json", policy=policy, env=engine.environ())
    assert done.returncode in (0, 3), f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


@pytest.mark.smoke
def test_four_workers_of_which_one_is_busy(engine: DockerEngine) -> None:
    """C10.6: each worker on its own, the active one untouched.

    By the command, from the policy to the space that came back.
    """
    names = [f"ray-worker-{number}" for number in range(4)]
    for name in names:
        worker(engine, name)
        fill(engine, name, "tmpabcdefgh", 200 * MB)
        fill(engine, name, "pip-unpack-xyz", 150 * MB)
        fill(engine, name, "mine", 10 * MB)  # of no pattern
    busy = names[2]
    hold(engine, busy, f"{ROOT}/tmpabcdefgh/data", "ray::train")
    before = {name: taken(scratch(engine, name)) for name in names}

    gpukeeper(engine, "apply", "--yes")

    after = {name: taken(scratch(engine, name)) for name in names}
    assert after[busy] == before[busy] >= 360 * MB
    assert entries(engine, busy) == ["mine", "pip-unpack-xyz", "tmpabcdefgh"]
    for name in set(names) - {busy}:
        assert before[name] >= 360 * MB
        assert after[name] < 11 * MB
        assert entries(engine, name) == ["mine"]


def test_one_worker_or_all_of_them_by_hand_by_the_same_rules(engine: DockerEngine) -> None:
    """C10.5: by the command of a person; a busy worker stays, also if it is the one that was named."""
    for name in ("ray-worker-1", "ray-worker-2", "ray-worker-3"):
        worker(engine, name)
        fill(engine, name, "tmpone", 60 * MB)
    hold(engine, "ray-worker-3", f"{ROOT}/tmpone/data", "ray::train")
    for name, left in (("ray-worker-3", 3), ("ray-worker-1", 2)):
        gpukeeper(engine, "apply", "--yes", "--platform", "ray", "--namespace", name)
        assert sum(len(entries(engine, one)) for one in ("ray-worker-1", "ray-worker-2", "ray-worker-3")) == left
    assert entries(engine, "ray-worker-1") == []
    gpukeeper(engine, "apply", "--yes", "--platform", "ray")
    assert [entries(engine, f"ray-worker-{number}") for number in (1, 2, 3)] == [[], [], ["tmpone"]]


def test_a_pass_is_on_record_and_is_no_load(engine: DockerEngine) -> None:
    """C10.6: what was decided, saved, begun and verified of each tree, with its bytes; nothing of the busy worker. One
    pass in 15 minutes takes less than 1 % of a core, and less than 30 s for each worker."""
    names = [f"ray-worker-{number}" for number in range(4)]
    for name in names:
        worker(engine, name)
        fill(engine, name, "tmpone", 60 * MB)
    hold(engine, names[3], f"{ROOT}/tmpone/data", "ray::train")
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    gpukeeper(engine, "apply", "--yes")
    after, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.01 * 15 * 60
    assert took < 30 * len(names)

    lines = [one for one in gpukeeper(engine, "ledger", "list", "--last", "1000")["lines"] if one["ref"]]
    record = {
        name: {one["type"]: one for one in lines if one["ref"]["namespace"] == name and one["ref"]["kind"] == "tree"}
        for name in names
    }
    for name in names[:3]:
        assert list(record[name]) == ["decision", "evidence", "intent", "outcome"], record[name]
        outcome = record[name]["outcome"]
        assert (outcome["result"], outcome["ref"]["name"]) == ("reclaimed", f"{ROOT}/tmpone")
        assert 60 * MB <= outcome["bytes_back"] < 61 * MB
        assert outcome["reason"]
        assert outcome["by"]
    assert "outcome" not in record[names[3]]
    assert "intent" not in record[names[3]]


def test_an_open_file_keeps_its_tree_and_no_other_also_of_the_same_name(engine: DockerEngine) -> None:
    for name in ("ray-worker-1", "ray-worker-2"):
        worker(engine, name)
        fill(engine, name, "tmpone", 60 * MB)
        fill(engine, name, "tmptwo", 60 * MB)
    hold(engine, "ray-worker-1", f"{ROOT}/tmpone/data")

    gpukeeper(engine, "apply", "--yes")

    assert entries(engine, "ray-worker-1") == ["tmpone"]
    assert entries(engine, "ray-worker-2") == []


def test_nothing_goes_below_the_threshold_of_a_node(engine: DockerEngine) -> None:
    worker(engine, "ray-worker-1")
    fill(engine, "ray-worker-1", "tmpone", 20 * MB)
    gpukeeper(engine, "apply", "--yes")
    assert entries(engine, "ray-worker-1") == ["tmpone"]


@pytest.mark.smoke
def test_what_a_killed_run_left_is_finished_by_the_next(engine: DockerEngine) -> None:
    """Whenever it dies: the tree is whole under its name, or out of sight and finished later."""
    worker(engine, "ray-worker-1")
    folder = scratch(engine, "ray-worker-1") / "tmpmany"
    for number in range(30):
        (folder / str(number)).mkdir(parents=True)
        for file in range(1000):
            (folder / str(number) / str(file)).write_bytes(b"x")

    with sandbox.start(engine.folder, "apply", "--yes", policy=POLICY, env=engine.environ()) as child:
        engine.until(lambda: child.poll() is not None or "tmpmany" not in entries(engine, "ray-worker-1"), deadline=60)
        child.kill()
        child.communicate()
    left = entries(engine, "ray-worker-1")
    assert left == [] or (
        len(left) == 1 and (left[0].startswith(".gpukeeper-trash-") or len(list(folder.iterdir())) == 30)
    )
    for _ in range(3):  # put back and decided anew, or finished at once
        gpukeeper(engine, "apply", "--yes")
    assert entries(engine, "ray-worker-1") == []


def test_a_second_run_at_once_waits_for_nobody(engine: DockerEngine) -> None:
    worker(engine, "ray-worker-1")
    fill(engine, "ray-worker-1", "tmpone", 60 * MB)

    async def meanwhile() -> Any:
        ledger = open_ledger(ledger_path({"GPUKEEPER_STATE": str(engine.folder / "state")}), write=True)
        try:
            async with ledger.lease("ray", hostname()):
                return sandbox.run(engine.folder, "apply", "--yes", policy=POLICY, env=engine.environ())
        finally:
            ledger.close()

    done = run(meanwhile())
    assert done.returncode == 3, done.stdout + done.stderr  # the other places were free
    assert "Another pass is running on ray/" in done.stderr
    assert entries(engine, "ray-worker-1") == ["tmpone"]


def test_a_node_is_found_by_its_label_and_others_are_none(engine: DockerEngine) -> None:
    worker(engine, "trainer", labels={"role": "ray-node"})
    worker(engine, "other")
    for name in ("trainer", "other"):
        fill(engine, name, "tmpone", 60 * MB)
    nodes = POLICY["ray"] | {"workers": ["role=ray-*"]}  # type: ignore[operator]

    gpukeeper(engine, "apply", "--yes", policy=POLICY | {"ray": nodes})

    assert entries(engine, "trainer") == []
    assert entries(engine, "other") == ["tmpone"]


def test_a_node_shows_what_it_holds_and_that_it_is_idle(engine: DockerEngine) -> None:
    worker(engine, "ray-worker-1")
    fill(engine, "ray-worker-1", "tmpone", 60 * MB)
    found = run(subjects(platform(engine, "ray-worker-1")))
    node = next(one for one in found if one.shape is Shape.NODE and one.ref.name == "ray-worker-1")
    assert (node.ref.uid, node.busy, node.state) == (engine.id("ray-worker-1"), None, "running")
    assert isinstance(node.size, int)
    assert 60 * MB <= node.size < 61 * MB
    assert node.disk is not None
    assert (node.disk.name, 0 < node.disk.used < 1) == ("/", True)
    assert int(node.labels["disk_size"]) > int(node.labels["disk_free"]) > 0


def test_work_that_begins_after_the_read_keeps(engine: DockerEngine) -> None:
    """A worker starts between the look that decided and the act: nobody has the tree open, and it stays."""
    worker(engine, "ray-worker-1")
    fill(engine, "ray-worker-1", "tmpone", MB)
    ray = platform(engine, "ray-worker-1")

    async def late() -> Any:
        found = await tree(ray, "ray-worker-1", "tmpone")
        assert found.busy is None
        pid = engine.exec("ray-worker-1", [*PYTHON, CALLED.format("ray::step", "import time; time.sleep(1e6)")])
        engine.until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::step"), "the worker runs")
        return await ray.act(removal(found), found), await ray.read(found.ref)

    answer, again = run(late())
    assert isinstance(answer, Changed)
    assert "worker step" in answer.why
    assert isinstance(again, Subject)
    assert again.busy is not None
    assert entries(engine, "ray-worker-1") == ["tmpone"]


def test_a_container_that_was_restarted_since_has_other_files(engine: DockerEngine) -> None:
    worker(engine, "ray-worker-1")
    fill(engine, "ray-worker-1", "tmpone", MB)
    ray = platform(engine, "ray-worker-1")

    async def late() -> Any:
        found = await tree(ray, "ray-worker-1", "tmpone")
        engine.stop_container("ray-worker-1", timeout=0)
        stopped = await ray.read(found.ref), await ray.act(removal(found), found)
        engine.start_container("ray-worker-1")
        return stopped, await ray.read(found.ref), await ray.act(removal(found), found), found

    (read, answer), again, then, found = run(late())
    assert isinstance(read, Unknown)
    assert isinstance(answer, Changed)
    # The same device number may come back with the start, or another: never is the tree taken for gone.
    assert not isinstance(again, Gone)
    if isinstance(again, Unknown) or again.seen.incarnation != found.seen.incarnation:
        assert isinstance(then, Changed)
        assert entries(engine, "ray-worker-1") == ["tmpone"]


def test_a_directory_that_two_nodes_share_is_shown_once_and_used_by_both(engine: DockerEngine, tmp_path: Path) -> None:
    for name in ("ray-worker-1", "ray-worker-2"):
        worker(engine, name, binds=[f"{tmp_path}:{ROOT}"])
    fill(engine, "ray-worker-1", "tmpone", MB)
    fill(engine, "ray-worker-1", "tmptwo", MB)
    hold(engine, "ray-worker-2", f"{ROOT}/tmpone/data")
    ray = platform(engine, "ray-worker-1", "ray-worker-2")

    async def both() -> Any:
        found = [one for one in await subjects(ray) if one.shape is Shape.TREE and one.category is Category.TEMPORARY]
        # Tests that run beside this one may have nodes with such a directory, too.
        here = ("ray-worker-1", "ray-worker-2")
        mine = [one for one in found if one.ref.name.startswith(ROOT) and one.ref.namespace in here]
        return mine, [await ray.act(removal(one), one) for one in mine]

    found, answers = run(both())
    assert [(one.ref.name, one.in_use) for one in found] == [(f"{ROOT}/tmpone", True), (f"{ROOT}/tmptwo", False)]
    assert isinstance(answers[0], Changed)
    assert isinstance(answers[1], Accepted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmpone"]


def test_links_of_a_node_lead_nowhere_else(engine: DockerEngine, tmp_path: Path) -> None:
    """A root that is a link is resolved inside the node; a tree that is a link is no tree."""
    (tmp_path / "tmpvictim").mkdir()
    engine.run("ray-worker-1", image="py:1", cmd=WAIT)
    home = Path(f"/proc/{engine.pid('ray-worker-1')}/root")
    (home / "real" / "tmpone").mkdir(parents=True)
    (home / "real" / "tmplink").symlink_to(tmp_path / "tmpvictim")
    Path(f"{home}{ROOT}").symlink_to("/real")
    ray = platform(engine, "ray-worker-1")

    async def all_of_them() -> Any:
        found = [one for one in await subjects(ray) if one.ref.name.startswith(ROOT)]
        return [one.ref.name for one in found], [await ray.act(removal(one), one) for one in found]

    names, answers = run(all_of_them())
    assert names == [f"{ROOT}/tmplink", f"{ROOT}/tmpone"]
    assert all(isinstance(answer, Accepted) for answer in answers)
    assert list((home / "real").iterdir()) == []
    assert (tmp_path / "tmpvictim").is_dir()


def test_an_engine_names_containers_by_name_or_label(engine: DockerEngine) -> None:
    worker(engine, "ray-worker-1")
    worker(engine, "trainer", labels={"role": "ray-node"})
    engine.run("ray-worker-9", image="py:1", cmd=[*PYTHON, "pass"])
    engine.until(lambda: engine.state("ray-worker-9") == "exited", "it ended")

    async def no_gpus() -> tuple[()]:
        return ()

    adapter = DockerPlatform(Engine(engine.host, {}), "here", SystemClock(), no_gpus)
    found = run(adapter.called(("ray-worker*",)))
    pids = {one.plain_name: one.state.pid for one in found}
    assert pids == {"ray-worker-1": engine.pid("ray-worker-1"), "ray-worker-9": 0}
    assert [one.plain_name for one in run(adapter.called(("role=ray-*",)))] == ["trainer"]
    assert run(adapter.called(("nobody", "role=x"))) == []
    engine.kill9()
    assert isinstance(silent := run(adapter.called(("ray-worker*",))), Unknown)
    assert re.search("answer|connect|reach", silent.why)


ACTOR = f"""
import ray, time
ray.init(address="auto", log_to_driver=False)
@ray.remote(num_cpus=0)
class Trainer:
    def hello(self): return 1
trainer = Trainer.remote()
ray.get(trainer.hello.remote())
open("{ROOT}/ready", "w").close()
time.sleep(1e6)
"""


def real_ray(engine: DockerEngine, name: str, more: Sequence[Path] = ()) -> str:
    """A head in a container, without any network: its dashboard answers nobody but its own. Ray's Python there."""
    python = folder_of(NEWEST) / "bin/python"
    mounts = {"/usr", "/lib", "/lib64", str(folder_of(NEWEST)), str(Path(os.path.realpath(python)).parents[1])}
    mounts |= {str(path) for path in more}
    start = ("-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={ROOT}/ray", "--num-cpus=1")
    flags = ("--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--include-dashboard=true")
    engine.run(
        name,
        network="none",
        binds=[f"{path}:{path}:ro" for path in mounts],
        env={"HOME": "/", "PATH": "/usr/bin:/bin", "RAY_USAGE_STATS_ENABLED": "0"},
        host_config={"ShmSize": 300_000_000},
        cmd=[str(python), *start, *flags],
    )
    engine.until(lambda: "Ray runtime started" in engine.logs(name), "Ray has started", deadline=120)
    return str(python)


@pytest.mark.parametrize("listed", [True, False])
def test_a_real_ray_in_a_container_without_network_is_queried_from_within(engine: DockerEngine, listed: bool) -> None:
    """Listed by the engine, or found by its raylet alone as a pod's would be."""
    require("ray", has_ray(NEWEST))
    python = real_ray(engine, "ray-worker-1")
    ours = engine.id("ray-worker-1")
    node = "ray-worker-1" if listed else ours[:12]
    fill(engine, "ray-worker-1", "tmpone", MB)
    ray = platform(engine, *(["ray-worker-1"] if listed else []))

    async def now() -> dict[str, Subject]:
        found = await subjects(ray)
        return {one.ref.kind: one for one in found if node in (one.ref.namespace, one.ref.name)}

    idle = engine.until(
        lambda: found if (found := run(now()))["node"].busy is None else None, "Ray is idle", deadline=60
    )
    assert (idle["node"].ref.uid, idle["node"].labels["ray"]) == (ours, NEWEST)
    assert (idle["node"].labels["sessions_live"], idle["session"].in_use) == ("1", True)
    assert (idle["tree"].busy, idle["tree"].in_use) == (None, False)

    engine.exec("ray-worker-1", [python, "-c", ACTOR])
    engine.until(lambda: "ready" in entries(engine, "ray-worker-1"), "the actor lives", deadline=60)
    busy = run(now())
    assert isinstance(busy["tree"].busy, str)
    assert isinstance(run(ray.act(removal(idle["tree"]), idle["tree"])), Changed)
    assert "tmpone" in entries(engine, "ray-worker-1")

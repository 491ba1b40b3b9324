"""Temporary trees of a node, what an interrupted removal left, and what the platform says of itself."""

from __future__ import annotations

import asyncio
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from gpukeeper.disk import mounts, trash
from gpukeeper.disk.measure import open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.model.decision import Accepted, Changed, NothingToCapture, Refused, Unseen
from gpukeeper.model.policy import Capture, PlaceScope, Policy, Reports, Temporary
from gpukeeper.model.subject import Category, Gone, Ref, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.settings import Counted, NodeContainer, RaySettings
from gpukeeper.platforms.ray.survey import NodesAccess
from tests.unit.platforms.ray.nodes_here import (
    SESSION,
    Ahead,
    child,
    everything_seen,
    observed,
    one_of,
    platform,
    process,
    raylet,
    run,
    session,
    step,
    tree,
)

OPEN = "import sys; file = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


def names(ray: RayPlatform, below: Path) -> set[str]:
    return {Path(one.ref.name).name for one in run(observed(ray, below)) if one.shape is Shape.TREE}


def test_trees_of_the_policys_names_go_and_no_others(tmp_path: Path) -> None:
    for name in ("tmpone", "pip-x", "mine", "ray_tmp_1", "_ray_lockfiles", ".tmphidden", "lost+found"):
        tree(tmp_path, name)
    ray = platform(tmp_path)
    assert names(ray, tmp_path) == {"tmpone", "pip-x", "ray_tmp_1"}
    found = one_of(ray, tmp_path, "tmpone")
    assert (found.category, found.in_use, found.busy) == (Category.TEMPORARY, False, None)
    assert (found.ref.namespace, found.ref.name) == ("here", f"{tmp_path}/tmpone")
    assert found.together == sum(one.size for one in run(observed(ray, tmp_path)) if one.shape is Shape.TREE)
    assert isinstance(run(ray.capture(found, ("logs",))), NothingToCapture)
    answer = run(ray.act(step(found), found))
    assert isinstance(answer, Accepted)
    assert answer.bytes_back == found.size
    assert isinstance(run(ray.read(found.ref)), Gone)
    assert not (tmp_path / "tmpone").exists()


@pytest.mark.parametrize("name", [b"tmp\nline", b"tmp\xff\xfe", b"tmp \x1b[31m", b"tmp'\"$(x)"])
def test_odd_names_are_shown_harmlessly_and_go(tmp_path: Path, name: bytes) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    folder.mkdir()
    ray = platform(tmp_path)
    found = next(one for one in run(observed(ray, tmp_path)) if one.shape is Shape.TREE)
    assert found.ref.name.isprintable()
    assert isinstance(run(ray.act(step(found), found)), Accepted)
    assert not folder.exists()


def test_a_file_that_is_open_keeps_its_tree_and_names_who(tmp_path: Path) -> None:
    folder = tree(tmp_path, "tmpone")
    with child(OPEN, folder / "data") as pid:
        ray = platform(tmp_path)
        found = one_of(ray, tmp_path, "tmpone")
        assert found.in_use is True
        assert f"pid {pid}" in found.labels["kept_by"]
        assert isinstance(run(ray.act(step(found), found)), Changed)
        (cause,) = run(ray.diagnose(found.ref)).causes
        assert f"pid {pid}" in cause.words
    assert folder.is_dir()


def test_a_keep_file_keeps(tmp_path: Path) -> None:
    folder = tree(tmp_path, "tmpone")
    ray = platform(tmp_path)
    before = one_of(ray, tmp_path, "tmpone")
    assert before.kept is None
    (folder / ".keep").touch()
    found = one_of(ray, tmp_path, "tmpone")
    assert found.kept is not None
    assert isinstance(run(ray.act(step(found), found)), Changed)
    assert (folder / ".keep").exists()


def test_work_on_the_node_is_reported_of_its_temporary_trees_only(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    session(tmp_path)
    worker = process(2**22, "ray::train_step", mounts=None)
    found = {one.ref.kind: one for one in run(observed(platform(tmp_path, here=lambda: (worker,)), tmp_path))}
    assert found["tree"].busy == found["node"].busy == "worker train_step runs"
    assert found["session"].busy is None


def test_work_that_begins_during_the_removal_puts_the_tree_back(tmp_path: Path) -> None:
    folder = tree(tmp_path, "tmpone")

    def here() -> tuple:  # type: ignore[type-arg]
        return () if folder.is_dir() else (process(2**22, "ray::late", mounts=None),)

    ray = platform(tmp_path, here=here)
    found = one_of(ray, tmp_path, "tmpone")
    assert found.busy is None
    answer = run(ray.act(step(found), found))
    assert isinstance(answer, Changed)
    assert "worker late" in answer.why
    assert (folder / "data").exists()


def test_a_raylet_whose_ray_cannot_be_queried_makes_the_node_unknown(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    one = raylet(2**22, str(tmp_path / "ray"), "--python_worker_command=python --webui=127.0.0.1:9", mounts=None)
    ray = platform(tmp_path, here=lambda: (one,))
    found = {one.ref.kind: one for one in run(observed(ray, tmp_path))}
    assert isinstance(found["tree"].busy, Unknown)
    assert isinstance(found["node"].busy, Unknown)
    assert any("127.0.0.1:9" in words for words in found["node"].findings)


def test_what_else_this_machine_computes_is_no_work_of_ray(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    spent = iter(range(0, 10**9, 10**6))

    def here() -> tuple:  # type: ignore[type-arg]
        return (process(2**22, "python", "train.py", mounts=None, ticks=next(spent)),)

    found = one_of(platform(tmp_path, here=here, settings={"cpu": 5.0}), tmp_path, "tmpone")
    assert found.busy is None


def test_rays_own_programs_may_take_what_they_take(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    spent = iter(range(0, 10**9, 10**6))

    def here() -> tuple:  # type: ignore[type-arg]
        return (process(2**22, "ray::IDLE", mounts=None, ticks=next(spent)),)

    assert one_of(platform(tmp_path, here=here, settings={"cpu": 5.0}), tmp_path, "tmpone").busy is None


def left_in_trash(folder: Path, name: str, *, begun: bool) -> TrashedTree:
    """As a removal leaves it that was killed in the middle."""
    about = (folder / name).stat()
    with open_directory(str(folder)) as fd:
        taken = trash.take(fd, name, (about.st_dev, about.st_ino))
        assert isinstance(taken, TrashedTree)
        if begun:
            with trash.opening(fd, taken.trash) as bin_:
                bin_.mark_for_deletion()
    return taken


def test_an_interrupted_removal_is_found_and_finished(tmp_path: Path) -> None:
    folder = tree(tmp_path, "tmpone")
    ray = platform(tmp_path)
    before = one_of(ray, tmp_path, "tmpone")
    taken = left_in_trash(tmp_path, "tmpone", begun=True)
    left = run(ray.read(before.ref))
    assert isinstance(left, Subject)
    assert (left.category, left.ref.uid) == (Category.UNFINISHED, before.ref.uid)
    assert left.ref.name == f"{tmp_path}/{taken.trash}/tmpone"
    # Decided as a temporary tree before: that is another story now.
    assert isinstance(run(ray.act(step(before), before)), Changed)
    found = one_of(ray, tmp_path, "tmpone")
    assert found.category is Category.UNFINISHED
    assert isinstance(run(ray.act(step(found), found)), Accepted)
    assert isinstance(run(ray.read(before.ref)), Gone)
    assert [path.name for path in tmp_path.iterdir()] == ["ray"]
    assert not folder.exists()


def test_what_was_only_taken_is_put_back(tmp_path: Path) -> None:
    session(tmp_path)
    ray = platform(tmp_path)
    left_in_trash(tmp_path / "ray", SESSION, begun=False)
    found = one_of(ray, tmp_path, SESSION)
    assert found.category is Category.UNFINISHED
    answer = run(ray.act(step(found), found))
    assert isinstance(answer, Changed)
    assert "put back" in answer.why
    assert one_of(ray, tmp_path, SESSION).category is Category.DEAD_SESSION


def test_a_root_that_the_machine_itself_owns_is_left_to_it(tmp_path: Path) -> None:
    """Two who act on the same tree would only take turns. Sessions are Ray's in any case."""
    tree(tmp_path, "tmpone")
    session(tmp_path)
    nodes = Temporary(root=str(tmp_path), names=("tmp*",), platform="ray")
    (tmp_path / "link").symlink_to(tmp_path)
    host = Temporary(root=str(tmp_path / "link"), names=("tmp*",))
    both = {"temporary": (nodes, host), "scope": {"ray": PlaceScope(), "host": PlaceScope()}}
    assert names(platform(tmp_path, policy=both), tmp_path) == {SESSION}
    only_ray = {"temporary": (nodes, host), "scope": {"ray": PlaceScope()}}
    assert names(platform(tmp_path, policy=only_ray), tmp_path) == {SESSION, "tmpone"}


def test_a_machine_without_ray_is_no_node(tmp_path: Path) -> None:
    settings = RaySettings(roots=(str(tmp_path),), window=timedelta(milliseconds=1))
    temporary = (Temporary(root=str(tmp_path), names=("tmp*",), platform="ray"),)
    tree(tmp_path, "tmpone")
    policy = Policy(scope={"ray": PlaceScope()}, platforms={"ray": settings}, temporary=temporary)
    ray = RayPlatform("here", policy, Ahead(), access=NodesAccess(everyone=tuple), environ={"TMPDIR": str(tmp_path)})
    if Path("/tmp/ray").exists():
        pytest.skip("this machine has a Ray root of its own")
    assert run(observed(ray, tmp_path)) == []


def test_a_read_of_a_node_tells_what_it_holds_now(tmp_path: Path) -> None:
    folder = tree(tmp_path, "tmpone")
    ray = platform(tmp_path)
    node = next(one for one in run(observed(ray, tmp_path)) if one.shape is Shape.NODE)
    assert isinstance(node.size, int)
    assert (node.ref.namespace, node.ref.name, node.disk is not None) == ("", "here", True)
    (folder / "data").unlink()
    again = run(ray.read(node.ref))
    assert isinstance(again, Subject)
    assert isinstance(again.size, int)
    assert again.size < node.size
    assert again.ref == node.ref
    assert isinstance(run(ray.act(step(node), node)), Refused)


def test_a_node_that_is_not_here_is_unknown_while_any_may_sleep(tmp_path: Path) -> None:
    asleep = [NodeContainer("worker", 0, "abc")]

    async def containers(patterns: object) -> object:
        return asleep

    ray = platform(tmp_path, containers=containers)
    ref = Ref("ray", "here", "tree", "/tmp/tmpone", "1:2", "worker")
    assert isinstance(run(ray.read(ref)), Unknown)
    asleep.clear()
    about = tmp_path.stat()
    gone = Ref("ray", "here", "tree", "/tmp/tmpone", f"{about.st_dev}:2", "worker")
    assert isinstance(run(ray.read(gone)), Gone)
    # Found by a raylet once, which ended; its files may be there.
    found = Ref("ray", "here", "tree", "/tmp/tmpone", f"{about.st_dev}:2", "0123456789ab")
    assert isinstance(run(ray.read(found)), Unknown)
    # Without an engine nobody knows which containers there are.
    assert isinstance(run(platform(tmp_path).read(gone)), Unknown)


def test_an_engine_that_does_not_answer_is_reported_and_the_rest_is_seen(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")

    async def containers(patterns: object) -> object:
        return Unknown("the engine is silent")

    ray = platform(tmp_path, containers=containers)

    async def pages() -> list[Unseen]:
        return [one async for page in ray.observe(PlaceScope()) for one in page.unseen]

    assert Unseen("containers that are nodes", "the engine is silent") in run(pages())
    assert "tmpone" in names(ray, tmp_path)


def test_another_place_is_not_read(tmp_path: Path) -> None:
    async def pages() -> list[object]:
        return [page async for page in platform(tmp_path).observe(PlaceScope(places=("elsewhere",)))]

    assert run(pages()) == []


def test_a_changed_policy_counts_from_the_next_read_on(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    ray = platform(tmp_path)
    assert "tmpone" in names(ray, tmp_path)
    nodes = RaySettings(roots=(str(tmp_path),), window=timedelta(milliseconds=1))
    ray.follow(Policy(scope={"ray": PlaceScope()}, platforms={"ray": nodes}))
    assert names(ray, tmp_path) == set()


def test_nothing_is_brought_back_told_or_taken_back(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    ray = platform(tmp_path)
    found = one_of(ray, tmp_path, "tmpone")
    assert isinstance(run(ray.restore(found.ref, None)), Refused)
    assert run(ray.notify(found, "hello")) is False
    assert run(ray.parts("x")) == ()


def test_two_removals_of_one_tree_do_not_meet(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    ray = platform(tmp_path)
    found = one_of(ray, tmp_path, "tmpone")
    ray._under_way.claim(found.ref.uid)  # as a thread that hangs leaves it
    assert isinstance(run(ray.act(step(found), found)), Refused)
    assert (tmp_path / "tmpone").is_dir()


@pytest.mark.parametrize("inside", ["", "deep/er"])
@pytest.mark.parametrize("named", ["reports", "temporary", "roots", "capture", "directories"])
def test_what_the_policy_names_or_we_need_ourselves_is_in_no_tree_that_goes(
    tmp_path: Path, named: str, inside: str
) -> None:
    folder = tree(tmp_path, "tmp_results")
    (needed := folder / inside).mkdir(parents=True, exist_ok=True)
    nodes = Temporary(root=str(tmp_path), names=("tmp*",), above=0, platform="ray")
    host = Temporary(root=str(needed), names=("x*",))
    more: dict[str, dict[str, object]] = {
        "reports": {"policy": {"reports": Reports(roots=(str(needed),))}},
        "temporary": {"policy": {"temporary": (nodes, host)}},
        "roots": {"settings": {"roots": (str(tmp_path), str(needed))}},
        "capture": {"policy": {"capture": Capture(to=str(needed))}},
        "directories": {"directories": (str(needed / "not-made-yet"),)},
    }
    free = one_of(platform(tmp_path), tmp_path, "tmp_results")
    assert free.kept is None
    ray = platform(tmp_path, **more[named])  # type: ignore[arg-type]
    found = one_of(ray, tmp_path, "tmp_results")
    assert found.kept is not None
    assert str(needed) in found.kept
    assert isinstance(run(ray.act(step(free), free)), Changed)
    assert (folder / "data").exists()


def test_a_session_that_holds_our_own_directory_stays(tmp_path: Path) -> None:
    folder = session(tmp_path)
    free = one_of(platform(tmp_path), tmp_path, SESSION)
    ray = platform(tmp_path, directories=(str(folder / "logs"),))
    assert one_of(ray, tmp_path, SESSION).kept is not None
    assert isinstance(run(ray.act(step(free), free)), Changed)
    assert folder.is_dir()


def test_work_of_ray_concerns_only_the_temporary_directories_that_ray_uses(tmp_path: Path) -> None:
    """Its dashboard does not answer, so whether it works is not known; that keeps its own folder and no other."""
    one = raylet(2**22, str(tmp_path / "ray"), "--python_worker_command=python --webui=127.0.0.1:9", mounts=None)
    ray = platform(tmp_path, here=lambda: (one,))
    assert isinstance(run(ray.busy_here(str(tmp_path))), Unknown)
    assert run(ray.busy_here(str(tmp_path / "other"))) is None
    assert run(platform(tmp_path).busy_here(str(tmp_path))) is None  # no raylet is here


def test_a_tree_has_a_uid_that_outlasts_its_device_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "tmpone")
    monkeypatch.setattr(mounts, "lasting_ids", lambda: {tmp_path.stat().st_dev: "fsid-a"})
    ray = platform(tmp_path)
    found = one_of(ray, tmp_path, "tmpone")
    assert found.lasting == f"fsid-a:{(tmp_path / 'tmpone').stat().st_ino}"
    again = run(ray.read(found.ref))
    assert isinstance(again, Subject)
    assert again.lasting == found.lasting


def test_many_trees_go_for_the_price_of_a_few_reads_of_open_files(tmp_path: Path) -> None:
    """Each is moved away and looked at after that; those that wait at the same time share the look."""
    for number in range(60):
        tree(tmp_path, f"tmp{number}")
    scans = []

    def scan() -> OpenFiles:
        scans.append(1)
        return everything_seen()

    ray = platform(tmp_path, scan=scan)
    found = [one for one in run(observed(ray, tmp_path)) if one.shape is Shape.TREE]
    scans.clear()

    async def all_of_them() -> list[object]:
        async def one(subject: Subject) -> object:
            fresh = await ray.read(subject.ref)
            assert isinstance(fresh, Subject)
            answer = await ray.act(step(fresh), fresh)
            # Removals beside it make files of their own, which may get the inode of this one: it is gone all the same.
            assert isinstance(await ray.read(subject.ref), Gone)
            return answer

        return await asyncio.gather(*(one(subject) for subject in found))

    answers = run(all_of_them())
    assert len(answers) == 60
    assert all(isinstance(one, Accepted) for one in answers)
    assert list(tmp_path.iterdir()) == [tmp_path / "ray"]
    assert len(scans) < 60, "two looks for each of 60 trees were not shared"


def test_a_tree_that_is_opened_while_others_go_beside_it_stays(tmp_path: Path) -> None:
    for number in range(20):
        tree(tmp_path, f"tmp{number}")
    ray = platform(tmp_path)
    found = {Path(one.ref.name).name: one for one in run(observed(ray, tmp_path)) if one.shape is Shape.TREE}

    async def all_of_them() -> dict[str, object]:
        async def one(subject: Subject) -> object:
            return await ray.act(step(subject), subject)

        return dict(zip(found, await asyncio.gather(*map(one, found.values())), strict=True))

    held = next((tmp_path / "tmp7").rglob("*"))
    file = next(path for path in (tmp_path / "tmp7").rglob("*") if path.is_file())
    with child(OPEN, file):
        answers = run(all_of_them())
    assert isinstance(answers.pop("tmp7"), Changed)
    assert all(isinstance(one, Accepted) for one in answers.values())
    assert held.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ray", "tmp7"]


def node_in(found: list[Subject]) -> Subject:
    return next(one for one in found if one.ref.kind == "node")


async def everything(ray: RayPlatform) -> list[Subject]:
    return [one async for page in ray.observe(PlaceScope()) for one in page.subjects]


def test_what_is_compared_with_above_is_the_sum_over_all_roots_of_a_node(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    sizes = [tree(first, "tmpone"), tree(second, "tmptwo")]
    ray = platform(first, settings={"roots": (str(first), str(second))})
    trees = [one for one in run(everything(ray)) if one.shape is Shape.TREE]
    assert len(trees) == len(sizes)
    total = sum(one.size for one in trees if isinstance(one.size, int))
    assert [one.together for one in trees] == [total, total]
    again = run(ray.read(trees[0].ref))
    assert isinstance(again, Subject)
    assert again.together == total


def test_a_node_tells_what_lies_there_under_other_names_too(tmp_path: Path) -> None:
    tree(tmp_path, "tmpone")
    before = node_in(run(everything(platform(tmp_path)))).size
    tree(tmp_path, "somebodys")
    after = node_in(run(everything(platform(tmp_path)))).size
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before >= 50_000


def test_above_may_count_everything_that_lies_there(tmp_path: Path) -> None:
    """All of a temporary folder above so much, then remove what is safe."""
    tree(tmp_path, "tmpone")
    tree(tmp_path, "somebodys")
    for counted, more in ((Counted.NAMED, False), (Counted.ALL, True)):
        ray = platform(tmp_path, settings={"above_counts": counted})
        found = run(everything(ray))
        (one,) = [one for one in found if one.shape is Shape.TREE]
        assert isinstance(one.together, int)
        assert isinstance(one.size, int)
        assert (one.together > one.size) is more
        assert not more or one.together == node_in(found).size


def test_a_second_disk_that_the_policy_names_is_reported(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpukeeper-test-") as made:
        other = Path(made)
        tree(other, "tmptwo")
        ray = platform(tmp_path, settings={"roots": (str(tmp_path), str(other))})
        found = run(everything(ray))
        (disk,) = [one for one in found if one.ref.kind == "disk"]
        assert disk.disk is not None
        assert (disk.ref.namespace, disk.ref.name, disk.disk.name) == ("here", "/dev/shm", "/dev/shm")
        assert disk.shape is Shape.NODE
        again = run(ray.read(disk.ref))
        assert isinstance(again, Subject)
        assert again.ref == disk.ref

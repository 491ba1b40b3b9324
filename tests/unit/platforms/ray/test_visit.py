"""Whose files count in a folder of a node, and what can be seen of it: real namespaces, links and owners."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.process_files import ONLY_HERE
from gpukeeper.model.decision import Accepted
from gpukeeper.model.policy import PlaceScope, Temporary
from gpukeeper.model.subject import Disk, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.nodes import raylet_of
from gpukeeper.platforms.ray.settings import NodeContainer
from gpukeeper.platforms.ray.visit import NodeDirectory, seen_from_here, whose
from tests.unit.platforms.ray.nodes_here import (
    SESSION,
    child,
    everything_seen,
    observed,
    one_of,
    platform,
    real,
    run,
    session,
    step,
    tree,
    until,
)

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and owners need root")
BOB, NOBODY = 54321, 65534
OTHER = SESSION.replace("_7", "_8")
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "unshare", "-Urm")
A_RAYLET = 'mount --bind "$1" "$2" && echo ready && exec -a raylet tail -f /dev/null'
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Which others may enter, too."""
    folder = Path(tempfile.mkdtemp(prefix="gpukeeper-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def given(path: Path, uid: int) -> Path:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid, follow_symlinks=False)
    return path


def bobs(scratch: Path) -> Path:
    """Trees and sessions of bob, and of nobody beside them."""
    folder = scratch / "bob"
    given(session(folder).parent, BOB)
    given(session(folder, OTHER), NOBODY)
    given(tree(folder, "tmpbob"), BOB)
    given(tree(folder, "tmpnobody"), NOBODY)
    return folder


def trees(found: list[Subject]) -> set[str]:
    return {Path(one.ref.name).name for one in found if one.shape is Shape.TREE}


@ROOT
def test_a_raylet_that_was_not_listed_brings_only_its_own_files(scratch: Path) -> None:
    """Anybody may call a program so, in a namespace where a stranger's folder lies below Ray's usual one."""
    bob, named_by_policy = bobs(scratch), scratch / "named_by_policy"
    named_by_policy.mkdir()
    with child("", before=(*AS_NOBODY, "bash", "-c", A_RAYLET, "bash", str(bob), str(named_by_policy))) as pid:
        until(lambda: [one for one in real(pid)() if raylet_of(one)])  # it becomes one after it is ready
        ray = platform(named_by_policy, here=real(pid))
        found = run(observed(ray, named_by_policy))
        assert trees(found) == {OTHER, "tmpnobody"}
        # Not by its identity either: as somebody else may have found it.
        node = next(one.ref.name for one in found if one.ref.name.startswith("mnt:"))
        for stolen in (one_of(platform(bob), bob, name) for name in (SESSION, "tmpbob")):
            ref = msgspec.structs.replace(stolen.ref, namespace=node)
            forged = msgspec.structs.replace(stolen, seen=msgspec.structs.replace(stolen.seen, ref=ref))
            assert not isinstance(run(ray.read(ref)), Subject)
            assert not isinstance(run(ray.act(step(forged), forged)), Accepted)
        mine = next(one for one in found if one.ref.name.endswith(OTHER))
        assert isinstance(run(ray.act(step(mine), mine)), Accepted)
    assert (bob / "ray" / SESSION).is_dir()
    assert (bob / "tmpbob").is_dir()
    assert not (bob / "ray" / OTHER).exists()


@ROOT
def test_a_strangers_link_leads_only_to_what_is_the_strangers(scratch: Path) -> None:
    bob, named_by_policy = bobs(scratch), scratch / "named_by_policy"
    named_by_policy.mkdir()
    (named_by_policy / "ray").symlink_to(bob / "ray")
    (scratch / "link").symlink_to(bob)
    as_root = platform(named_by_policy, settings={"roots": (str(named_by_policy), str(scratch / "link"))})
    assert trees(run(observed(as_root, scratch))) >= {SESSION, OTHER, "tmpbob", "tmpnobody"}
    for link in (named_by_policy / "ray", scratch / "link"):
        os.lchown(link, NOBODY, NOBODY)
    ray = platform(named_by_policy, settings={"roots": (str(named_by_policy), str(scratch / "link"))})
    found = run(observed(ray, scratch))
    assert trees(found) == {OTHER, "tmpnobody"}
    assert any("through a link of nobody" in words for one in found for words in one.findings)
    for one in run(observed(as_root, scratch)):
        if one.shape is Shape.TREE:
            run(ray.act(step(one), one))
    assert (bob / "ray" / SESSION).is_dir()
    assert (bob / "tmpbob").is_dir()
    assert not (bob / "tmpnobody").exists()


def test_links_of_two_strangers_lead_to_nobodys_files() -> None:
    assert whose(None, frozenset()) is None
    assert whose(None, frozenset({0, os.geteuid()})) is None
    assert whose(None, frozenset({0, BOB})) == frozenset({BOB})
    assert whose(None, frozenset({NOBODY, BOB})) == frozenset()
    assert whose(frozenset({NOBODY}), frozenset({BOB})) == frozenset()


@ROOT
@pytest.mark.parametrize("covered", [True, False])
def test_a_root_of_this_machine_is_left_to_it_under_whatever_name_a_node_has_it(scratch: Path, covered: bool) -> None:
    mine, theirs = scratch / "mine", scratch / "theirs"
    tree(mine, "tmpone")
    theirs.mkdir()
    mount = ("unshare", "--mount", "sh", "-c", f'mount --bind "{mine}" "{theirs}" && exec "$@"', "sh")
    with child(WAIT, before=mount) as pid:

        async def containers(patterns: object) -> object:
            return [NodeContainer("worker", pid, "abc")]

        nodes = Temporary(root=str(theirs), names=("tmp*",), above=0, platform="ray")
        host = Temporary(root=str(mine), names=("tmp*",), above=0)
        scope = {"ray": PlaceScope()} | ({"host": PlaceScope()} if covered else {})
        policy = {"scope": scope, "temporary": (nodes, host)}
        ray = platform(theirs, here=real(pid), containers=containers, policy=policy)
        assert trees(run(observed(ray, theirs))) == (set() if covered else {"tmpone"})
        about = (mine / "tmpone").stat()
        node = next(one for one in run(observed(ray, theirs)) if one.ref.name == "worker")
        uid = f"{about.st_dev}:{about.st_ino}"
        ref = msgspec.structs.replace(node.ref, kind="tree", name="x", uid=uid, namespace="worker")
        assert isinstance(run(ray.read(ref)), Unknown if covered else Subject)


@ROOT
def test_a_directory_that_we_need_stays_under_whatever_name_a_node_has_it(scratch: Path) -> None:
    mine, theirs = scratch / "mine", scratch / "theirs"
    needed = tree(mine, "tmpone") / "ledger"
    theirs.mkdir()
    mount = ("unshare", "--mount", "sh", "-c", f'mount --bind "{mine}" "{theirs}" && exec "$@"', "sh")
    with child(WAIT, before=mount) as pid:

        async def containers(patterns: object) -> object:
            return [NodeContainer("worker", pid, "abc")]

        ray = platform(theirs, here=real(pid), containers=containers, directories=(str(needed),))
        assert one_of(ray, theirs, "tmpone").kept is not None


def folder(*, private: bool) -> NodeDirectory:
    return NodeDirectory(-1, "/tmp", "/tmp", Disk("/", 0.5, None), 1, 1, private)


def test_inside_a_container_its_own_layer_is_seen_whole_and_a_volume_is_not() -> None:
    used = msgspec.structs.replace(everything_seen(), hidden=ONLY_HERE)
    assert seen_from_here(folder(private=True), used).hidden is None
    assert seen_from_here(folder(private=False), used).hidden == ONLY_HERE


def test_whoever_else_is_hidden_stays_so() -> None:
    used: OpenFiles = msgspec.structs.replace(everything_seen(), hidden="the open files of 3 processes")
    assert seen_from_here(folder(private=True), used) == used

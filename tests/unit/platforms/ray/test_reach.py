"""The way to a folder of a node: its links are its own, and lead nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.platforms.ray.nodes import NodeAccess, identity_of_entry, on_the_way, opened_directory, opened_node, read
from tests.unit.platforms.ray.nodes_here import child


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The root folder of a pretended node, open."""
    home = tmp_path / "node"
    (home / "disk" / "deep").mkdir(parents=True)
    fd = os.open(home, os.O_PATH | os.O_DIRECTORY)
    yield fd, home
    os.close(fd)


def where(root: int, path: str) -> str:
    with opened_directory(root, path) as (fd, real, _):
        assert os.fstat(fd).st_ino
        return real


@pytest.mark.parametrize(
    ("target", "path", "real"),
    [
        ("/disk", "/tmp", "/disk"),
        ("/disk", "/tmp/deep", "/disk/deep"),
        ("disk/deep", "/tmp", "/disk/deep"),
        ("../../../../disk", "/tmp", "/disk"),
        ("/disk/deep/../../..", "/tmp/disk", "/disk"),
        ("//disk/./deep/", "/tmp/", "/disk/deep"),
    ],
)
def test_a_link_is_resolved_inside_the_node(node: tuple[int, Path], target: str, path: str, real: str) -> None:
    root, home = node
    (home / "tmp").symlink_to(target)
    assert where(root, path) == real


def test_an_absolute_link_further_down_begins_at_the_nodes_root(node: tuple[int, Path]) -> None:
    root, home = node
    (home / "disk/deep/back").symlink_to("/disk")
    assert where(root, "/disk/deep/back/deep") == "/disk/deep"


def test_a_link_to_the_machines_own_directory_finds_nothing(node: tuple[int, Path], tmp_path: Path) -> None:
    root, home = node
    (tmp_path / "mine").mkdir()
    (home / "scratch").symlink_to(tmp_path / "mine")
    with pytest.raises(FileNotFoundError):
        where(root, "/scratch")


def test_links_in_a_circle_end(node: tuple[int, Path]) -> None:
    root, home = node
    (home / "a").symlink_to("b")
    (home / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic"):
        where(root, "/a")


def test_a_file_is_no_directory(node: tuple[int, Path]) -> None:
    root, home = node
    (home / "file").write_text("x")
    for path in ("/file", "/file/below"):
        with pytest.raises(NotADirectoryError):
            where(root, path)


def test_the_owners_of_links_are_reported(node: tuple[int, Path]) -> None:
    root, home = node
    (home / "a").symlink_to("b")
    (home / "b").symlink_to("disk")
    with opened_directory(root, "/a/deep") as (_, _, owners):
        assert owners == {os.geteuid()}
    with opened_directory(root, "/disk/deep") as (_, _, owners):
        assert owners == frozenset()


def test_everything_on_the_way_is_told_as_far_as_it_goes(node: tuple[int, Path]) -> None:
    root, home = node
    (home / "a").symlink_to("disk")
    passed = [path.lstat() for path in (home / "a", home / "disk", home / "disk/deep")]
    assert on_the_way(root, "/a/deep/nothing/here") == {(one.st_dev, one.st_ino) for one in passed}


def test_nothing_stays_open(node: tuple[int, Path]) -> None:
    root, home = node
    (home / "tmp").symlink_to("/disk")
    before = len(list(Path("/proc/self/fd").iterdir()))
    where(root, "/tmp/deep")
    identity_of_entry(root, "/tmp/deep")
    on_the_way(root, "/tmp/deep/nothing")
    for path in ("/nothing", "/tmp/deep/nothing"):
        with pytest.raises(FileNotFoundError):
            where(root, path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_root_of_whoever_ended_is_not_another_users(tmp_path: Path) -> None:
    with child("import sys; print('ready', flush=True); sys.stdin.read()") as pid:
        one = read(pid)
        assert one is not None
        with opened_node(NodeAccess(pid, one.starttime)) as root:
            assert os.fstat(root).st_ino == Path("/").stat().st_ino
        with pytest.raises(FileNotFoundError), opened_node(NodeAccess(pid, one.starttime + 1)):
            pass
    with pytest.raises(OSError), opened_node(NodeAccess(pid, one.starttime)):  # noqa: PT011 - any: it is gone
        pass

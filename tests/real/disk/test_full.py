"""On a disk that is full to the last byte trees are still removed, or kept with a reason; nothing is half done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.model.decision import Refused
from tests.real.disk.filesystems import as_nobody, ext4, fill, mounted, need_root
from tests.unit.disk.trees import expected, removed, trash_in, tree

REMOVE_HERE = """
answer = removed(here / "tree")
print(type(answer).__name__, answer.why if hasattr(answer, "why") else answer.entries)
"""


@pytest.fixture(autouse=True)
def _root() -> None:
    need_root()


@pytest.mark.smoke
def test_on_a_full_tmpfs_a_tree_is_removed(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        path = tree(disk)
        fill(disk)
        assert os.statvfs(disk).f_bfree == 0
        answer = removed(path)
        assert isinstance(answer, TreeRemoval), answer
        assert answer.bytes_back == 12 * 8192
        assert [one.name for one in disk.iterdir()] == ["ballast"]


def test_on_a_tmpfs_without_inodes_a_tree_is_kept_with_a_reason(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs") as disk:
        path = tree(disk)
        for number in range(os.statvfs(disk).f_ffree):
            (disk / f"ballast{number}").touch()
        answer = removed(path)
        assert isinstance(answer, Refused)
        assert "no space" in answer.why
        assert len(list(path.rglob("f*"))) == 12
        assert trash_in(disk) == []


def test_on_a_full_ext4_root_removes_a_tree_with_what_is_reserved_for_it(tmp_path: Path) -> None:
    with ext4(tmp_path, "16M", "-m", "5") as disk:
        path = tree(disk)
        disk.chmod(0o777)
        as_nobody(disk, "fill(here)")
        assert os.statvfs(disk).f_bavail == 0
        assert isinstance(removed(path), TreeRemoval)
        assert trash_in(disk) == []


def test_on_an_ext4_without_a_free_block_a_tree_is_kept_with_a_reason(tmp_path: Path) -> None:
    with ext4(tmp_path, "16M", "-m", "0") as disk:
        path = tree(disk)
        fill(disk)
        assert os.statvfs(disk).f_bavail == 0
        answer = removed(path)
        assert isinstance(answer, Refused)
        assert "no space" in answer.why
        assert len(list(path.rglob("f*"))) == 12
        assert trash_in(disk) == []


def test_on_a_full_ext4_an_ordinary_user_is_told_what_to_do(tmp_path: Path) -> None:
    with ext4(tmp_path, "16M", "-m", "5") as disk:
        disk.chmod(0o777)
        as_nobody(disk, "tree(here); fill(here)")
        kind, _, why = as_nobody(disk, REMOVE_HERE).partition(" ")
        assert kind == "Refused"
        assert "run as root" in why
        assert len(list((disk / "tree").rglob("f*"))) == 12
        assert isinstance(removed(disk / "tree", expected(disk / "tree")), TreeRemoval)

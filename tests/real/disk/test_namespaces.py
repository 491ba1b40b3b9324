"""Mounts in a namespace without processes keep a tree: nothing of it is open, and no list of a process shows them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpukeeper.disk import mounts, open_files
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.model.decision import Changed
from tests.real.disk.filesystems import mounted, need_root
from tests.unit.disk.trees import READY, child, expected, removed, trash_in, tree

IN_USE = Changed("it is in use: mounted somewhere, or by the kernel itself")
# A child mounts it in a namespace of its own and ends; only our descriptor keeps that namespace.
KEEP_BY_DESCRIPTOR = f"""
import os, subprocess, sys
made = subprocess.Popen(["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1"; echo; read line', *sys.argv[1:]],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
made.stdout.readline()
kept = os.open(f"/proc/{{made.pid}}/ns/mnt", os.O_RDONLY)
made.communicate(b"\\n")
sys.argv = []
{READY}
"""


@pytest.fixture(autouse=True)
def _root() -> None:
    need_root()


def test_a_mount_in_a_namespace_that_only_a_descriptor_keeps_is_seen(tmp_path: Path) -> None:
    path, point = tree(tmp_path), tmp_path / "point"
    point.mkdir()
    wanted = expected(path)
    with child(KEEP_BY_DESCRIPTOR, path / "d0", point):
        assert removed(path, wanted) == IN_USE
        assert trash_in(tmp_path) == []
    assert isinstance(removed(path), TreeRemoval)


def test_a_mount_in_a_namespace_that_only_a_mount_keeps_is_seen(tmp_path: Path) -> None:
    path, point = tree(tmp_path), tmp_path / "point"
    point.mkdir()
    wanted = expected(path)
    with mounted(tmp_path / "names", "-t", "tmpfs", "none") as names:
        subprocess.run(["mount", "--make-private", names], check=True)
        (names / "one").touch()
        subprocess.run(["unshare", f"--mount={names}/one", "mount", "--bind", path / "d0", point], check=True)
        try:
            assert removed(path, wanted) == IN_USE
            assert trash_in(tmp_path) == []
        finally:
            subprocess.run(["umount", names / "one"], check=True)
    assert isinstance(removed(path), TreeRemoval)


def test_a_namespace_that_cannot_be_entered_is_not_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, point = tree(tmp_path), tmp_path / "point"
    point.mkdir()
    monkeypatch.setattr(mounts, "mountinfo_of", lambda *_: None)
    with child(KEEP_BY_DESCRIPTOR, path / "d0", point):
        scan = open_files.scan()
    assert scan.hidden is not None
    # What else may be hidden on this machine comes first.
    assert "could not be" in scan.hidden

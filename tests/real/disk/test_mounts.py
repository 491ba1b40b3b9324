"""What is mounted inside a tree, or out of it, is never touched: on the kernel's real mounts, in any namespace."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.unknown import Unknown
from tests.real.disk.filesystems import mounted, need_root, picture
from tests.unit.disk.trees import READY, child, everything_seen, expected, read, removed, trash_in, tree

IN_USE = Changed("it is in use: mounted somewhere, or by the kernel itself")


@pytest.fixture(autouse=True)
def _root() -> None:
    need_root()


def blind() -> OpenFiles:
    """A look that misses everything: what is left are the walk and the kernel."""
    return OpenFiles({}, {}, (), frozenset(), None)


@pytest.mark.parametrize(("scan", "answer"), [(everything_seen, IN_USE), (blind, Unknown("contains a mount point"))])
def test_a_bind_mount_of_the_same_filesystem_inside_is_untouched(
    tmp_path: Path, scan: Callable[[], OpenFiles], answer: object
) -> None:
    outside, path = tree(tmp_path, "outside"), tree(tmp_path)
    wanted, before = expected(path), picture(outside)
    with mounted(path / "d0", "--bind", outside):
        assert isinstance(read(path).size, Unknown)
        assert removed(path, wanted, scan=scan) == answer
        assert picture(outside) == before
        assert trash_in(tmp_path) == []


@pytest.mark.smoke
def test_a_bind_mount_of_a_single_file_inside_is_untouched(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", tree(tmp_path)
    outside.write_text("precious")
    wanted = expected(path)
    with mounted(path / "d0/f0", "--bind", outside):
        assert removed(path, wanted) == IN_USE
        assert trash_in(tmp_path) == []
        answer = removed(path, wanted, scan=blind)  # the kernel itself refuses then
        assert isinstance(answer, TreeRemoval | Unknown | Changed)
    assert outside.read_text() == "precious"


def test_a_mount_on_the_tree_itself_is_refused(tmp_path: Path) -> None:
    outside, path = tree(tmp_path, "outside"), tree(tmp_path)
    wanted, before = expected(path), picture(outside)
    with mounted(path, "--bind", outside):
        for one in (wanted, expected(outside)):
            assert removed(path, one) == Refused("it was not removed: something is mounted on it")
    assert picture(outside) == before
    assert len(list(path.rglob("f*"))) == 12


def test_the_deleter_itself_enters_no_mount(tmp_path: Path) -> None:
    """Although nothing with a mount in it ever gets that far."""
    outside, path = tree(tmp_path, "outside"), tree(tmp_path)
    before = picture(outside)
    with mounted(path / "d0", "--bind", outside), mounted(path / "d1/f0", "--bind", outside / "d0/f0"):
        eraser, fd = TreeDeleter(time.monotonic() + 60), os.open(path, os.O_RDONLY)
        eraser.empty(fd)
        os.close(fd)
        assert picture(outside) == before
        assert {one.rpartition(": ")[2] for one in eraser.left} == {
            "Invalid cross-device link",
            "Device or resource busy",
        }
    assert len(list(path.rglob("*"))) == 2 + 1 + 4


MOUNT_AND_WAIT = "import subprocess, sys; subprocess.run(['mount', *sys.argv[1:]], check=True); " + READY


@pytest.mark.parametrize("inside", ["d0", "d0/f0", ""], ids=["folder", "file", "tree"])
def test_a_tree_that_another_mount_namespace_has_mounted_is_kept(tmp_path: Path, inside: str) -> None:
    """As a workload that was given a folder of it: nothing is open, and only that namespace knows."""
    path, point = tree(tmp_path), tmp_path / "point"
    point.touch() if inside.endswith("f0") else point.mkdir()
    wanted = expected(path)
    with child(MOUNT_AND_WAIT, "--bind", path / inside, point, before=("unshare", "--mount")):
        assert removed(path, wanted) == IN_USE
        assert trash_in(tmp_path) == []
    assert isinstance(removed(path), TreeRemoval)


def test_a_tree_in_which_another_mount_namespace_mounted_something_is_kept(tmp_path: Path) -> None:
    """Removing the folder would take the mount away there."""
    path = tree(tmp_path)
    wanted = expected(path)
    with child(MOUNT_AND_WAIT, "-t", "tmpfs", "none", path / "d1", before=("unshare", "--mount")):
        assert removed(path, wanted) == IN_USE
        assert trash_in(tmp_path) == []


SIT_IN_A_MOUNT = f"""
import os, subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[2]], check=True)
os.chdir(sys.argv[2] + "/d0")
subprocess.run(["umount", "--lazy", sys.argv[2]], check=True)
{READY}
"""


def test_a_user_in_a_mount_that_is_in_no_list_any_more_keeps_the_tree(tmp_path: Path) -> None:
    """Its path there has no name of ours in it; device and inode have."""
    path, point = tree(tmp_path), tmp_path / "point"
    point.mkdir()
    wanted = expected(path)
    with child(SIT_IN_A_MOUNT, path, point, before=("unshare", "--mount")) as pid:
        assert removed(path, wanted) == Changed(f"it is in use by pid {pid}")
        assert trash_in(tmp_path) == []


def test_a_file_that_the_kernel_uses_as_a_disk_keeps_the_tree(tmp_path: Path) -> None:
    path = tree(tmp_path)
    (path / "d0/image").write_bytes(b"\0" * 2**20)
    wanted = expected(path)
    device = subprocess.check_output(["losetup", "--show", "--find", path / "d0/image"], text=True).strip()
    try:
        answer = removed(path, wanted)
        assert isinstance(answer, Changed), answer
        assert "in use" in answer.why
        assert trash_in(tmp_path) == []
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_directory_of_a_lower_layer_cannot_be_taken_and_one_of_the_upper_can(tmp_path: Path) -> None:
    lower, upper, work = (tmp_path / name for name in ("lower", "upper", "work"))
    for folder in (upper, work):
        folder.mkdir()
    tree(lower, "image")
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    with mounted(tmp_path / "merged", "-t", "overlay", "-o", options, "overlay") as merged:
        answer = removed(merged / "image")
        assert isinstance(answer, Refused)
        assert "layer" in answer.why
        assert isinstance(removed(tree(merged, "own")), TreeRemoval)
        assert sorted(one.name for one in merged.iterdir()) == ["image"]


def test_a_read_is_the_same_by_mount_ids_where_openat2_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, path = tree(tmp_path, "outside"), tree(tmp_path)
    monkeypatch.setattr("gpukeeper.disk.kernel.has_openat2", lambda: False)
    with mounted(path / "d0", "--bind", outside):
        assert read(path).size == Unknown("contains a mount point")
    assert msgspec.structs.replace(read(path), entries=0).problems == ()

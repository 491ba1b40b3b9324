"""An overlay, a memory filesystem, a dead FUSE filesystem below a root: never entered by a deletion, and no wait."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.unknown import Unknown
from tests.engines import require
from tests.real.disk.dead_mount import dead_mount
from tests.real.disk.filesystems import REPOSITORY, mounted, need_root, picture
from tests.unit.disk.trees import READY, child, expected, read, removed, trash_in, tree

IN_USE = Changed("it is in use: mounted somewhere, or by the kernel itself")
KINDS = ["tmpfs", "overlay", "dead FUSE"]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _root() -> None:
    need_root()


def blind() -> OpenFiles:
    """A scan that misses everything, as before a mount that comes just after it: the walk and the kernel decide."""
    return OpenFiles({}, {}, (), frozenset(), None)


@contextmanager
def overlay(point: Path) -> Iterator[None]:
    """Its layers lie beside the root."""
    lower, upper, work = (point.parents[2] / f"layers-{name}" for name in ("lower", "upper", "work"))
    for folder in (upper, work):
        folder.mkdir(exist_ok=True)
    if not lower.exists():
        tree(lower, "image")
    with mounted(point, "-t", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", "overlay"):
        tree(point, "own") if not (point / "own").exists() else None
        yield


@contextmanager
def tmpfs(point: Path) -> Iterator[None]:
    with mounted(point, "-t", "tmpfs", "none"):
        tree(point, "own")
        yield


def another(kind: str, point: Path) -> AbstractContextManager[None]:
    if kind == "dead FUSE":
        require("tmpfs", os.access("/dev/fuse", os.R_OK | os.W_OK))
        return dead_mount(point)
    return tmpfs(point) if kind == "tmpfs" else overlay(point)


def content(kind: str, point: Path) -> object:
    return None if kind == "dead FUSE" else picture(point)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tree(tmp_path / "root")


@pytest.mark.parametrize("openat2", [True, False], ids=["openat2", "old kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_with_another_filesystem_inside_is_kept_even_if_the_scan_missed_it(
    path: Path, kind: str, openat2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not openat2:
        monkeypatch.setattr("gpukeeper.disk.kernel.has_openat2", lambda: False)
    wanted = expected(path)
    with another(kind, path / "d0"):
        before = content(kind, path / "d0")
        assert removed(path, wanted) == IN_USE
        assert read(path).size == Unknown("contains a mount point")
        assert isinstance(removed(path, wanted, scan=blind), Changed | Unknown)  # the time of the move counts, too
        assert trash_in(path.parent) == []
        assert content(kind, path / "d0") == before


@pytest.mark.parametrize("openat2", [True, False], ids=["openat2", "old kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_filesystem_that_is_mounted_while_a_tree_is_deleted_is_not_entered(
    path: Path, kind: str, openat2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not openat2:
        monkeypatch.setattr("gpukeeper.disk.kernel.has_openat2", lambda: False)
    with another(kind, path / "d1"):
        before = content(kind, path / "d1")
        eraser, fd = TreeDeleter(time.monotonic() + 60), os.open(path, os.O_RDONLY)
        eraser.empty(fd)
        os.close(fd)
        assert [one.rpartition(": ")[2] for one in eraser.left] == ["Invalid cross-device link"]
        assert content(kind, path / "d1") == before
    assert [one.name for one in path.iterdir()] == ["d1"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_itself_is_refused_where_it_is_a_mount(path: Path, kind: str) -> None:
    wanted = expected(path)
    with another(kind, path):
        before = content(kind, path)
        assert removed(path, wanted) == Refused("it was not removed: something is mounted on it")
        assert content(kind, path) == before


IN_A_NAMESPACE = f"""
import subprocess, sys
from pathlib import Path
sys.path[:0] = [{str(REPOSITORY)!r}]
from tests.real.disk.test_other_filesystems import another
with another(sys.argv[2], Path(sys.argv[1])):
    {READY}
"""


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_another_mount_namespace_has_inside_keeps_the_tree(path: Path, kind: str) -> None:
    """As in a container; a user namespace gives every user one. Removing the directory would unmount it there."""
    if kind == "dead FUSE":
        require("tmpfs", os.access("/dev/fuse", os.R_OK | os.W_OK))
    wanted = expected(path)
    with child(IN_A_NAMESPACE, path / "d2", kind, before=("unshare", "--mount")):
        assert removed(path, wanted) == IN_USE
        assert trash_in(path.parent) == []
    assert isinstance(removed(path), TreeRemoval)


def test_an_overlay_that_uses_a_tree_as_a_layer_keeps_it_until_it_is_unmounted(path: Path, tmp_path: Path) -> None:
    """Also one that is mounted after the decision: the scan after the move finds the former name of its layer."""
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={path},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    wanted = expected(path)
    with mounted(tmp_path / "merged", "-t", "overlay", "-o", options, "overlay") as merged:
        assert removed(path, wanted) == IN_USE
        assert len(picture(merged)) == len(picture(path)) == 3 + 12
    assert isinstance(removed(path), TreeRemoval)

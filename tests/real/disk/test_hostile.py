"""A neighbour swaps folders for links while we look and remove, 360,000 times: nothing outside is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpukeeper.disk import kernel
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.measure import measure, open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval, remove
from gpukeeper.disk.trash import RETURNED, TRASH
from tests.real.disk.filesystems import REPOSITORY, picture
from tests.unit.disk.trees import everything_seen, tree

FREE = OpenFiles({}, {}, (), frozenset(), None)


@contextmanager
def neighbour(how: str, root: Path, swaps: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.real.disk.hostile", how, root, str(swaps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        try:
            yield running
        finally:
            running.kill()


class Ground:
    """A folder in which everybody may rename, and a canary outside. What is needed in it is moved in, since building
    it there would follow the neighbour's links."""

    def __init__(self, folder: Path) -> None:
        self.root, self.canary, self._site = folder / "root", tree(folder, "canary"), folder / "site"
        self.root.mkdir()
        self.root.chmod(0o777)
        (self.canary / "sub").mkdir()
        (self.canary / "sub/file").write_text("precious")
        self.before = picture(self.canary)
        self._number = 0

    def refill(self) -> None:
        for name in ("tree", "other"):
            if not os.path.lexists(self.root / name):
                self._move_in(name, self._tree())
        with suppress(FileExistsError):
            (self.root / "evil").symlink_to(self.canary)

    def _tree(self) -> Path:
        self._number += 1
        path = tree(self._site, f"t{self._number}", folders=3, files=3)
        (path / "d1/sub").mkdir()
        (path / "d1/sub/file").touch()
        for link in (path / "link", path / "d1/link"):
            link.symlink_to(self.canary)
        for folder in (path, *path.rglob("*")):
            if folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o777)
        return path

    def _move_in(self, name: str, path: Path) -> None:
        with suppress(OSError):  # the neighbour put something there
            path.rename(self.root / name)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def attempt(ground: Ground, scan: Callable[[], OpenFiles]) -> object:
    """As a pass does it: a look, and then the act on what was seen."""
    with open_directory(str(ground.root)) as parent:
        found = measure("tree", parent)
        if found is None or not isinstance(found.ctime_ns, int):
            return found
        wanted = ExpectedTree((found.device, found.inode), found.ctime_ns)
        return remove(parent, "tree", wanted, scan=scan, until=time.monotonic() + 60)


@pytest.mark.parametrize(("how", "swaps"), [("inside", 50_000), ("itself", 150_000), ("trash", 60_000)])
def test_whatever_is_swapped_nothing_outside_is_touched(ground: Ground, how: str, swaps: int) -> None:
    tries = 0
    ground.refill()
    with neighbour(how, ground.root, swaps) as running:
        while running.poll() is None:
            ground.refill()
            attempt(ground, lambda: FREE)
            tries += 1
        assert running.returncode == 0
    assert tries > 20
    assert picture(ground.canary) == ground.before


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_tree_whose_name_a_user_takes_meanwhile_never_stays_in_the_trash(tmp_path: Path, mode: int) -> None:
    """Found in use in the last look, it is back under its name, or beside it under one that says so."""
    root, tries = tmp_path / "root", 40
    root.mkdir()
    root.chmod(mode)
    inodes = []
    with neighbour("takeover", root, 10**9):
        for number in range(tries):
            path = tree(tmp_path, f"made-{number}")
            path.chmod(0o755)
            inodes.append(path.stat().st_ino)
            with suppress(OSError):
                (root / "tree").rename(root / f"old-{number}")  # of the neighbour
            kernel_rename(path, root / "tree")
            with open_directory(str(root)) as parent:
                found = measure("tree", parent)
                if found is not None and found.inode == inodes[-1] and isinstance(found.ctime_ns, int):
                    wanted = ExpectedTree((found.device, found.inode), found.ctime_ns)
                    in_use = OpenFiles({(found.device, found.inode): 1}, {}, (), frozenset(), None)
                    remove(parent, "tree", wanted, scan=lambda: busy(in_use), until=time.monotonic() + 60)  # noqa: B023
    there = {one.stat().st_ino for one in root.iterdir()} | {one.stat().st_ino for one in tmp_path.iterdir()}
    assert set(inodes) <= there
    assert list(root.glob(f"{TRASH}*")) == []
    if mode == 0o1777:  # it guards our file, and so the name; elsewhere the neighbour may or may not be quick enough
        assert list(root.glob(f"tree{RETURNED}*")) == []


def busy(answer: OpenFiles) -> OpenFiles:
    """A look that takes its time, in which the neighbour is awake."""
    time.sleep(0.02)
    return answer


def kernel_rename(path: Path, to: Path) -> None:
    with open_directory(str(path.parent)) as above, open_directory(str(to.parent)) as below, suppress(OSError):
        # The neighbour may have the name; then the tree stays where it was made.
        kernel.rename_inside(above, path.name, below, to.name)


def test_the_deleter_alone_leaves_nothing_outside_touched(ground: Ground) -> None:
    """Without trash, without looking first, on a tree that is swapped around all the time."""
    ground.refill()
    tries = 0
    with neighbour("inside", ground.root, 100_000) as running:
        while running.poll() is None:
            ground.refill()
            with open_directory(str(ground.root)) as root, open_directory("tree", root) as top:
                eraser = TreeDeleter(time.monotonic() + 60)
                if tries % 3:
                    eraser.empty(top)
                else:
                    eraser.remove(root, b"tree/d1", 5)
            if tries % 5 == 0:
                (ground.root / "tree").rename(ground.root / f"old-{tries}")
            tries += 1
        assert running.returncode == 0
    assert tries > 20
    assert picture(ground.canary) == ground.before


@pytest.mark.smoke
def test_after_the_neighbour_is_gone_the_tree_is_removed(ground: Ground) -> None:
    """So that the tests above cannot pass by never removing anything."""
    ground.refill()
    while time.clock_gettime_ns(5) <= (ground.root / "tree").stat().st_ctime_ns:
        pass
    assert isinstance(attempt(ground, everything_seen), TreeRemoval)
    assert picture(ground.canary) == ground.before

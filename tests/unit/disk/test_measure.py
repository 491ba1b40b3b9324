"""Measuring trees: real folders, real links, real holes. What cannot be measured is Unknown, never zero."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.disk.measure import (
    CHANGED,
    MOUNT_POINT,
    MeasureLimits,
    TreeMeasurement,
    instant,
    measure,
    open_directory,
    printable,
)
from gpukeeper.model.unknown import Unknown

MIB = 1024 * 1024


def measured(path: Path, **given: object) -> TreeMeasurement:
    with open_directory(str(path.parent)) as parent:
        found = measure(path.name, parent, **given)  # type: ignore[arg-type]
    assert found is not None
    return found


def filled(path: Path, size: int = MIB) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)  # blocks are given out when the file reaches the disk
    os.close(fd)
    return path


def du(path: Path) -> int:
    return int(subprocess.check_output(["du", "-s", "--block-size=1", path]).split()[0])


def test_a_tree_is_as_large_as_du_says(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e"):
        filled(tmp_path / "tree" / name, 300_000)
    found = measured(tmp_path / "tree")
    assert found.size == du(tmp_path / "tree")
    assert (found.entries, found.problems) == (6, ())


def test_hard_links_count_once(tmp_path: Path) -> None:
    first = filled(tmp_path / "tree/one")
    for name in ("two", "three"):
        os.link(first, tmp_path / "tree" / name)
    found = measured(tmp_path / "tree")
    assert found.size == du(tmp_path / "tree")
    assert isinstance(found.size, int)
    assert found.size < 2 * MIB


def test_holes_do_not_count(tmp_path: Path) -> None:
    sparse = tmp_path / "tree/sparse"
    sparse.parent.mkdir()
    with sparse.open("wb") as file:
        file.truncate(1024 * MIB)
    found = measured(tmp_path / "tree")
    assert found.size == du(tmp_path / "tree")
    assert isinstance(found.size, int)
    assert found.size < MIB


def test_links_are_never_followed(tmp_path: Path) -> None:
    filled(tmp_path / "outside/large")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "tree/file").symlink_to(tmp_path / "outside/large")
    found = measured(tmp_path / "tree")
    assert isinstance(found.size, int)
    assert found.size < MIB
    assert found.entries == 3


def test_an_entry_that_is_itself_a_link_or_a_file_is_measured_as_that(tmp_path: Path) -> None:
    file = filled(tmp_path / "file")
    (tmp_path / "link").symlink_to(file)
    assert measured(file).size == file.stat().st_blocks * 512
    assert measured(tmp_path / "link").inode == (tmp_path / "link").lstat().st_ino


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    with open_directory(str(tmp_path)) as parent:
        assert measure("nothing", parent) is None


@pytest.mark.parametrize("times", [(2_000_000_000, 5), (5, 2_000_000_000)], ids=["access", "modification"])
def test_the_newest_of_all_times_of_all_entries_counts(tmp_path: Path, times: tuple[int, int]) -> None:
    file = filled(tmp_path / "tree/deep/file", 1)
    os.utime(file, times)
    assert measured(tmp_path / "tree").newest == datetime.fromtimestamp(2_000_000_000, UTC)


def test_an_unpacked_old_archive_is_not_old(tmp_path: Path) -> None:
    """Its files say 1970; their change time, which nobody can set, says now."""
    before = datetime.now(UTC) - timedelta(seconds=2)
    os.utime(filled(tmp_path / "tree/file", 1), (5, 5))
    os.utime(tmp_path / "tree", (5, 5))
    found = measured(tmp_path / "tree")
    assert isinstance(found.newest, datetime)
    assert found.newest > before
    assert found.ctime_ns == max((tmp_path / name).stat().st_ctime_ns for name in ("tree", "tree/file"))


def test_looking_does_not_count_as_use(tmp_path: Path) -> None:
    filled(tmp_path / "tree/sub/file", 1)
    for name in ("tree", "tree/sub"):
        os.utime(tmp_path / name, (5, 5))
    measured(tmp_path / "tree")
    assert (tmp_path / "tree").stat().st_atime == 5
    assert (tmp_path / "tree/sub").stat().st_atime == 5


def test_an_entry_that_vanishes_during_the_walk_makes_the_tree_unknown(tmp_path: Path) -> None:
    filled(tmp_path / "tree/file", 1)

    @contextmanager
    def lister(fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(fd) as listing:
            listed = list(listing)
        (tmp_path / "tree/file").unlink()
        yield iter(listed)

    found = measured(tmp_path / "tree", lister=lister)
    assert found.size == found.newest == found.ctime_ns == Unknown(CHANGED)


def test_an_entry_that_appears_during_the_walk_makes_the_tree_unknown(tmp_path: Path) -> None:
    filled(tmp_path / "tree/file", 1)
    os.utime(tmp_path / "tree", (5, 5))

    @contextmanager
    def lister(fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(fd) as listing:
            yield iter(list(listing))
        (tmp_path / "tree/late").touch()

    assert measured(tmp_path / "tree", lister=lister).size == Unknown(CHANGED)


def test_a_directory_swapped_for_a_link_during_the_walk_is_not_entered(tmp_path: Path) -> None:
    filled(tmp_path / "outside/large")
    filled(tmp_path / "tree/sub/file", 1)

    @contextmanager
    def lister(fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(fd) as listing:
            listed = list(listing)
        for entry in listed:
            entry.stat(follow_symlinks=False)  # remembered: it was a folder when it was listed
        shutil.rmtree(tmp_path / "tree/sub")
        (tmp_path / "tree/sub").symlink_to(tmp_path / "outside")
        yield iter(listed)

    found = measured(tmp_path / "tree", lister=lister)
    assert found.size == Unknown(CHANGED)
    assert found.entries == 2


def test_a_tree_beyond_the_limit_of_entries_has_no_known_size(tmp_path: Path) -> None:
    for number in range(5):
        filled(tmp_path / "tree" / str(number), 1)
    assert isinstance(measured(tmp_path / "tree", limits=MeasureLimits(entries=6)).size, int)
    assert measured(tmp_path / "tree", limits=MeasureLimits(entries=5)).size == Unknown("has more than 5 entries")


def test_a_tree_beyond_the_limit_of_depth_has_no_known_size(tmp_path: Path) -> None:
    (tmp_path / "tree/a/b/c").mkdir(parents=True)
    assert isinstance(measured(tmp_path / "tree", limits=MeasureLimits(depth=4)).size, int)
    assert measured(tmp_path / "tree", limits=MeasureLimits(depth=3)).size == Unknown("is deeper than 3 levels")


def test_when_time_is_up_the_walk_ends_and_reports_it(tmp_path: Path) -> None:
    filled(tmp_path / "tree/file", 1)
    found = measured(tmp_path / "tree", is_time_up=lambda: True)
    assert found.size == Unknown("could not be measured in the available time")
    assert found.inode == (tmp_path / "tree").stat().st_ino


def test_open_files_are_recognized_by_identity(tmp_path: Path) -> None:
    found = filled(tmp_path / "tree/sub/file", 1).stat()
    assert measured(tmp_path / "tree", open_files={(found.st_dev, found.st_ino): 77}).held_by == 77
    assert measured(tmp_path / "tree", open_files={(found.st_dev + 1, found.st_ino): 77}).held_by is None


def test_sockets_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "tree/s"))
    assert measured(tmp_path / "tree").sockets == 1


def test_a_directory_that_was_moved_is_young_and_what_is_in_it_is_not(tmp_path: Path) -> None:
    """Moving it changes nothing but the change time of its top. Whoever moved it wants it."""
    (tmp_path / "tree").mkdir()
    os.utime(tmp_path / "tree", (5, 5))
    (tmp_path / "tree").rename(tmp_path / "moved")
    found = measured(tmp_path / "moved")
    changed = (tmp_path / "moved").stat().st_ctime_ns
    assert (found.newest, found.ctime_ns) == (instant(changed), changed)
    assert found.content == datetime.fromtimestamp(5, UTC)
    (tmp_path / "moved/sub").mkdir()
    os.utime(tmp_path / "moved/sub", (6, 6))
    os.utime(tmp_path / "moved", (5, 5))
    inside = measured(tmp_path / "moved").content
    assert isinstance(inside, datetime)
    assert inside.year > 1970  # of what is inside the change counts: nobody moves that by moving the tree


def test_reading_a_file_counts_and_listing_a_directory_does_not(tmp_path: Path) -> None:
    file = filled(tmp_path / "tree/sub/file", 1)
    os.utime(tmp_path / "tree/sub", (2_000_000_000, 5))
    assert measured(tmp_path / "tree").read is None
    os.utime(file, (2_000_000_000, 5))
    found = measured(tmp_path / "tree")
    assert found.read == found.newest == datetime.fromtimestamp(2_000_000_000, UTC)


def test_of_a_single_file_the_change_counts(tmp_path: Path) -> None:
    """All other times are what somebody unpacked it with."""
    filled(tmp_path / "file", 1)
    os.utime(tmp_path / "file", (5, 5))
    newest = measured(tmp_path / "file").newest
    assert isinstance(newest, datetime)
    assert newest.year > 1970


AS_NOBODY = """
import ctypes, os, sys
from gpukeeper.disk.measure import measure, open_directory
root = os.open(sys.argv[1], os.O_RDONLY)  # while we still may: the folders above are private
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # who drops rights may not read its own /proc until it says so
found = measure("tree", root)
print(found.size.why, "|", found.newest.why)
"""


def test_an_unreadable_directory_makes_the_tree_unknown(tmp_path: Path) -> None:
    """Root reads everything, so a child looks as nobody."""
    filled(tmp_path / "tree/open/file", 1)
    (tmp_path / "tree/closed").mkdir(mode=0)
    tmp_path.chmod(0o755)
    printed = subprocess.check_output([sys.executable, "-c", AS_NOBODY, tmp_path], text=True)
    why = "closed could not be read: Permission denied"
    assert printed.strip() == f"{why} | {why}"


BIND = """
import os, subprocess, sys
from gpukeeper.disk.measure import measure, open_directory
root, source, point = sys.argv[1:]
subprocess.run(["mount", "--bind", source, point], check=True)
with open_directory(root) as parent:
    found = measure("tree", parent)
print(found.size.why, found.entries)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root and unshare")
def test_a_bind_mount_of_the_same_filesystem_is_not_entered(tmp_path: Path) -> None:
    filled(tmp_path / "outside/large")
    (tmp_path / "tree/point").mkdir(parents=True)
    child = [sys.executable, "-c", BIND, tmp_path, tmp_path / "outside", tmp_path / "tree/point"]
    printed = subprocess.run(["unshare", "--mount", *child], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [*MOUNT_POINT.split(), "2"]


def test_names_are_made_harmless(tmp_path: Path) -> None:
    hostile = os.fsdecode(b"a\nb\x1b[31m\xff\xc3\xa9")
    assert printable(hostile) == "a\\x0ab\\x1b[31m\\xffé"
    filled(tmp_path / "tree" / hostile, 1)
    assert measured(tmp_path / "tree").entries == 2

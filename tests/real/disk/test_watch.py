"""Watching what is used: on real filesystems, by other processes, through other mounts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.disk.access_times import FileWatcher, WatchRecord
from gpukeeper.model.unknown import Unknown
from tests.engines import require
from tests.real.disk.filesystems import ext4, mounted, need_root
from tests.unit.disk.trees import HOLD_OPEN, child, tree

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def _root() -> None:
    need_root()


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    made = ext4(tmp_path, "16M") if request.param == "ext4" else mounted(tmp_path / "disk", "-t", "tmpfs", "none")
    with made as point:
        yield point


@contextmanager
def watching(folder: Path, clock: Hand) -> Iterator[FileWatcher]:
    watch = FileWatcher(clock)
    require("root", watch.start() is None)
    watch.add(str(folder))
    try:
        yield watch
    finally:
        watch.close()


def seen(watch: FileWatcher, folder: Path, name: str = "tree") -> WatchRecord:
    found = watch.watched(str(folder), name, NOW)
    assert isinstance(found, WatchRecord), found
    return found


def read(path: Path) -> None:
    subprocess.run(["cat", path], check=True, stdout=subprocess.DEVNULL)


def test_a_read_by_another_user_is_seen_and_our_own_is_not(disk: Path) -> None:
    path, clock = tree(disk), Hand()
    tree(disk, "other")
    with watching(disk, clock) as watch:
        assert seen(watch, disk) == WatchRecord(NOW)
        clock.seconds += 60
        (path / "d0/f0").read_bytes()
        assert seen(watch, disk) == WatchRecord(NOW - timedelta(seconds=60))
        read(path / "d0/f0")
        assert seen(watch, disk).last == NOW
        clock.seconds += 30
        ago = NOW - timedelta(seconds=90)
        assert seen(watch, disk) == WatchRecord(ago, NOW - timedelta(seconds=30))
        assert seen(watch, disk, "other") == WatchRecord(ago)


def test_a_file_that_is_an_entry_itself_is_seen(disk: Path) -> None:
    (disk / "tree").write_text("x")
    with watching(disk, Hand()) as watch:
        read(disk / "tree")
        assert seen(watch, disk).last == NOW


def test_a_read_through_a_read_only_mount_of_another_namespace_is_seen(disk: Path, tmp_path: Path) -> None:
    path, point = tree(disk), tmp_path / "elsewhere"
    point.mkdir()
    script = f"mount --bind {path}/d1 {point} && mount -o remount,bind,ro {point} && cat {point}/f2"
    with watching(disk, Hand()) as watch:
        subprocess.run(["unshare", "--mount", "sh", "-c", script], check=True, stdout=subprocess.DEVNULL)
        assert seen(watch, disk).last == NOW


def test_the_end_of_a_long_use_counts(disk: Path) -> None:
    path, clock = tree(disk), Hand()
    with watching(disk, clock) as watch:
        with child(HOLD_OPEN, path / "d0/f0"):
            clock.seconds += 3600
        assert seen(watch, disk) == WatchRecord(NOW - timedelta(hours=1), NOW)


FLOOD = """
import os, sys
for number in range(20_000):
    name = f"{sys.argv[1]}/{number}"
    open(name, "w").close()
    os.unlink(name)
"""


def test_after_too_much_at_once_the_time_begins_again(disk: Path) -> None:
    path, clock = tree(disk), Hand()
    with watching(disk, clock) as watch:
        clock.seconds += 3600
        assert seen(watch, disk).since == NOW - timedelta(hours=1)
        with watch._lock:  # nobody reads the queue meanwhile
            subprocess.run([sys.executable, "-c", FLOOD, path], check=True)
        assert seen(watch, disk).since == NOW


def test_what_is_forgotten_is_not_known_to_be_unused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpukeeper.disk.access_times.REMEMBERED", 2)
    tree(disk)
    clock = Hand()
    with watching(disk, clock) as watch:
        for number in range(4):
            clock.seconds += 60
            (disk / f"f{number}").write_text("x")
            read(disk / f"f{number}")
            seen(watch, disk)
        assert seen(watch, disk).since > NOW - timedelta(minutes=4)
        assert seen(watch, disk, "f3").last == NOW


def test_a_filesystem_that_was_unmounted_is_not_watched_any_more(tmp_path: Path) -> None:
    clock = Hand()
    with ext4(tmp_path, "16M") as disk:
        tree(disk)
        watch = FileWatcher(clock)
        require("root", watch.start() is None)
        watch.add(str(disk))
        assert seen(watch, disk)
    clock.seconds += 3600
    with mounted(tmp_path / "disk", "-o", "loop", tmp_path / "image") as disk:
        assert isinstance(watch.watched(str(disk), "tree", NOW), Unknown)
        watch.add(str(disk))
        assert seen(watch, disk).since == NOW
    watch.close()
    assert watch.watched(str(disk), "tree", NOW) is None

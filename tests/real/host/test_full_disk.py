"""A disk that is too full: ages shrink, the oldest go first, and it ends when there is room again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.disk.mounts import usage
from tests.engines import require
from tests.real.host.machine import Host, can_mount, held_open, sees_everybody, small_disk

MIB = 1024 * 1024
POLICY = """
temporary: [{root: ROOT, names: ["tmp*"], above: 1TB, older_than: 7d, under_pressure: 0s}]
disk: {high: 60%, low: 30%, UNREADABLE}
"""


@pytest.fixture(autouse=True)
def rights() -> None:
    require("tmpfs", can_mount())
    require("root", sees_everybody())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=32m,nr_inodes=200") as point:
        yield point


def fill(host: Host, numbers: range, files: int, size: int) -> None:
    """One after the other, so that the first is the oldest."""
    for number in numbers:
        host.tree(f"tmp-{number}", files, size)


def test_below_the_high_mark_nothing_happens(tmp_path: Path, disk: Path) -> None:
    host = Host(tmp_path, POLICY, disk)
    fill(host, range(4), 1, 4 * MIB)  # half of it
    assert host.apply().outcomes() == {}
    assert len(host.names()) == 4


def test_above_the_high_mark_the_oldest_go_until_it_is_below_the_low_one(tmp_path: Path, disk: Path) -> None:
    """C10.8."""
    host = Host(tmp_path, POLICY, disk)
    fill(host, range(6), 1, 4 * MIB)  # three quarters
    ran = host.apply()
    gone = {name for name, line in ran.outcomes().items() if line["result"] == "reclaimed"}
    assert gone == {"tmp-0", "tmp-1", "tmp-2", "tmp-3"}, ran.out
    assert "while the disk is too full" in ran.outcomes()["tmp-0"]["reason"]
    assert host.names() == ["tmp-4", "tmp-5"]
    assert usage(str(disk)).used < 0.30
    assert host.apply().outcomes() == {}, "below the low mark it is over"


def test_the_marks_of_the_watch_act_above_90_per_cent_and_not_at_85(tmp_path: Path, disk: Path) -> None:
    """C10.8: the marks of the page. The alert above 80 % is tested with the rules."""
    host = Host(tmp_path, POLICY.replace("high: 60%, low: 30%", "high: 90%, low: 80%"), disk)
    fill(host, range(9), 1, 3 * MIB)
    assert 0.84 <= usage(str(disk)).used < 0.90
    assert host.apply().outcomes() == {}, "an alert, and nothing else"
    fill(host, range(9, 10), 1, 2 * MIB)
    assert usage(str(disk)).used >= 0.90
    gone = {name for name, line in host.apply().outcomes().items() if line["result"] == "reclaimed"}
    assert "tmp-0" in gone
    assert {"tmp-8", "tmp-9"} <= set(host.names()), "the newest stay"
    assert 0.65 < usage(str(disk)).used < 0.80, "not more than it takes"


def test_too_few_inodes_are_a_full_disk_too(tmp_path: Path, disk: Path) -> None:
    host = Host(tmp_path, POLICY, disk)
    fill(host, range(6), 23, 1)  # 25 of 200 each
    assert usage(str(disk)).used < 0.10
    ran = host.apply()
    assert {line["result"] for line in ran.outcomes().values()} >= {"reclaimed"}, ran.out
    left = usage(str(disk)).inodes_used
    assert left is not None
    assert left < 0.30
    assert host.names() == ["tmp-4", "tmp-5"]


def test_pressure_takes_nothing_that_is_in_use(tmp_path: Path, disk: Path) -> None:
    host = Host(tmp_path, POLICY, disk)
    fill(host, range(6), 1, 4 * MIB)
    with held_open(disk / "tmp-0" / "below" / "f0"):
        host.apply()
        assert host.names() == ["tmp-0", "tmp-5"]


def test_a_disk_without_a_free_byte_or_inode_is_relieved(tmp_path: Path, disk: Path) -> None:
    """As root, for whom nothing is reserved on such a disk either: the trash needs no data block, but one inode."""
    host = Host(tmp_path, POLICY, disk)
    fill(host, range(6), 1, 4 * MIB)
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, usage(str(disk)).free)
    assert usage(str(disk)).free == 0
    ran = host.apply()
    assert {line["result"] for line in ran.outcomes().values()} >= {"reclaimed"}, ran.out
    assert usage(str(disk)).used < 0.60


def test_reports_go_no_sooner_for_a_full_disk(tmp_path: Path, disk: Path) -> None:
    host = Host(
        tmp_path,
        "reports: {roots: [ROOT], older_than: 7d, keep_last: 0}\ndisk: {high: 60%, low: 30%, UNREADABLE}\n",
        disk,
    )
    fill(host, range(6), 1, 4 * MIB)
    assert host.apply().outcomes() == {}
    assert len(host.names()) == 6

"""Trees that are being read, or were moved here just now, on real mounts: nothing of that shows in their times."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines import require
from tests.real.host.machine import Host, can_mount, sees_everybody, until

TREES = """
temporary: [{root: ROOT, names: ["tmp*"], above: 1B}]
"""
# Told by its input: what a process names in its command line would stay for that alone.
READS = """
import os, sys, time
path, count = sys.stdin.readline()[:-1], 0
print(flush=True)
while os.path.exists(path):
    open(path, "rb").read()
    count += 1
    time.sleep(0.05)
"""
THREE_HOURS = 3 * 3600


@pytest.fixture(autouse=True)
def needed() -> None:
    require("root", sees_everybody() and can_mount() and shutil.which("debugfs") is not None)


class Image:
    """A disk in a file, whose times can be set back while it is not mounted: the change time by nobody else."""

    def __init__(self, folder: Path) -> None:
        self.image, self.point = folder / "image", folder / "disk"
        self.point.mkdir()
        subprocess.run(["truncate", "-s", "16M", self.image], check=True)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)

    @contextmanager
    def mounted(self, options: str = "strictatime") -> Iterator[Path]:
        subprocess.run(["mount", "-o", f"loop,{options}", self.image, self.point], check=True)
        try:
            yield self.point
        finally:
            subprocess.run(["umount", self.point], check=True)

    def age(self, path: str, *, read: int, changed: int = THREE_HOURS) -> None:
        """Everything on the way there, so many seconds ago."""
        parts = [str(one) for one in (Path(path), *Path(path).parents)]
        now = int(time.time())
        times = {"ctime": now - changed, "mtime": now - changed, "crtime": now - changed, "atime": now - read}
        asked = [f"sif /{one} {field} @{at}" for one in parts for field, at in times.items()]
        for line in asked:
            subprocess.run(["debugfs", "-w", "-R", line, self.image], check=True, capture_output=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A process that opens, reads and closes it again and again."""
    with subprocess.Popen([sys.executable, "-c", READS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(bytes(path) + b"\n")
        child.stdin.flush()
        child.stdout.readline()
        try:
            yield
        finally:
            child.kill()


@pytest.fixture
def image(tmp_path: Path) -> Image:
    made = Image(tmp_path)
    with made.mounted() as point:
        (point / "tmp-a").mkdir()
        (point / "tmp-a/file").write_bytes(b"x" * 5000)
    return made


READ_ONCE, NEVER_READ = THREE_HOURS - 60, THREE_HOURS + 60


@pytest.mark.parametrize(
    ("options", "read", "words"),
    [
        ("relatime", READ_ONCE, "reads in the 24h after that are not recorded on"),
        ("noatime", READ_ONCE, "but reads are not recorded on"),
        ("noatime", NEVER_READ, "but reads are not recorded on"),
        ("strictatime", READ_ONCE, "last recorded read"),
        ("relatime", NEVER_READ, "last recorded read"),  # the first read after a change is recorded
    ],
)
def test_a_tree_that_is_being_read_is_kept(image: Image, tmp_path: Path, options: str, read: int, words: str) -> None:
    image.age("tmp-a/file", read=read)
    with image.mounted(options) as point:
        host = Host(tmp_path, TREES, point)
        with reading(point / "tmp-a/file"):
            for _ in range(3):
                ran = host.apply()
                assert ran.code == 0, ran.err
                assert (point / "tmp-a/file").exists(), ran.out
            kept = {one["reason"] for one in host.plan("--kind", "tree")}
        # Where it was open just then, that is what keeps it.
        assert all(words in reason or reason.startswith("in use") for reason in kept), kept


@pytest.mark.parametrize(("options", "read"), [("strictatime", READ_ONCE), ("relatime", NEVER_READ)])
def test_a_tree_that_is_not_read_goes_after_an_hour_where_that_is_recorded(
    image: Image, tmp_path: Path, options: str, read: int
) -> None:
    image.age("tmp-a/file", read=read)
    with image.mounted(options) as point:
        host = Host(tmp_path, TREES, point)
        ran = host.apply()
        assert ran.outcomes()["tmp-a"]["result"] == "reclaimed", ran.out
        assert not (point / "tmp-a").exists()


def test_a_tree_read_more_than_a_day_ago_goes_on_relatime(image: Image, tmp_path: Path) -> None:
    image.age("tmp-a/file", read=26 * 3600, changed=27 * 3600)
    with image.mounted("relatime") as point:
        assert Host(tmp_path, TREES, point).apply().outcomes()["tmp-a"]["result"] == "reclaimed"


def test_a_second_mount_without_access_times_makes_reads_unknown(image: Image, tmp_path: Path) -> None:
    image.age("tmp-a/file", read=READ_ONCE)
    with image.mounted("strictatime") as point:
        host, second = Host(tmp_path, TREES, point), tmp_path / "second"
        second.mkdir()
        subprocess.run(["mount", "--bind", point, second], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", second], check=True)
            with reading(second / "tmp-a/file"):
                (kept,) = host.plan("--kind", "tree")
                assert kept["action"] == "keep"
                assert "(read-only)" in kept["reason"] or kept["reason"].startswith("in use")
                host.apply()
        finally:
            subprocess.run(["umount", second], check=True)
        assert (point / "tmp-a/file").exists()


def test_a_directory_that_was_moved_below_a_root_just_now_is_kept(image: Image, tmp_path: Path) -> None:
    with image.mounted() as point:
        (point / "project").mkdir()
        (point / "tmp-a").rename(point / "project/model")
    image.age("project/model/file", read=300 * 86400, changed=300 * 86400)
    with image.mounted("strictatime") as point:
        host = Host(tmp_path, TREES, point)
        (point / "project/model").rename(point / "tmp-model")
        ran = host.apply()
        assert ran.code == 0, ran.err
        assert (point / "tmp-model/file").exists(), ran.out
        (kept,) = host.plan("--kind", "tree")
        assert kept["verdict"] == "wait"
        assert "last change" in kept["reason"]


WATCHED = """
temporary: [{root: ROOT, names: ["tmp*"], above: 1B, older_than: 5s, under_pressure: 5s}]
schedule: {every: 5s}
"""


def test_serve_watches_and_so_removes_what_is_not_read_and_nothing_else(image: Image, tmp_path: Path) -> None:
    """Without access times, and with the age that the policy says."""
    with image.mounted("noatime") as point:
        host = Host(tmp_path, WATCHED, point)
        host.tree("tmp-quiet")
        with reading(point / "tmp-a/file"), host.start("serve", "--platform", "host") as daemon:
            try:
                until(lambda: not (point / "tmp-quiet").exists(), "what nobody reads goes")
                assert (point / "tmp-a/file").exists()
            finally:
                daemon.terminate()
        assert (point / "tmp-a/file").exists()
        (line,) = host.lines("intent")
        assert "watched for" in line["reason"]

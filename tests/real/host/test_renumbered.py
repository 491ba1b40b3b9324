"""A disk that comes back under another device number: holds on its trees still count."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines import require
from tests.real.host.machine import Host, can_mount, sees_everybody, until

TREES = """
temporary: [{root: ROOT, names: ["tmp*"], above: 1B, older_than: 0s, under_pressure: 0s}]
"""


def _run(*words: str | Path) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout.strip()


def _can_loop() -> bool:
    return (
        can_mount() and Path("/dev/loop-control").exists() and None not in map(shutil.which, ("losetup", "mkfs.ext4"))
    )


@pytest.fixture(autouse=True)
def disks_can_be_mounted() -> None:
    require("root", sees_everybody())
    require("tmpfs", _can_loop())


@contextmanager
def attached(image: Path) -> Iterator[str]:
    device = _run("losetup", "--find", "--show", image)
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def mounted(device: str, point: Path) -> Iterator[int]:
    """Yields its device number. Written to the image before it is unmounted: a mount namespace that another program
    made meanwhile would keep it mounted."""
    _run("mount", device, point)
    try:
        yield point.stat().st_dev
    finally:
        _run("sync", "--file-system", point)
        _run("umount", point)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(16 * 2**20)
    _run("mkfs.ext4", "-q", path)
    return path


def test_a_hold_outlasts_the_device_number(tmp_path: Path, image: Path) -> None:
    point = tmp_path / "disk"
    point.mkdir()
    with attached(image) as first:
        _hold_and_renumber(tmp_path, image, point, first)


def _hold_and_renumber(tmp_path: Path, image: Path, point: Path, first: str) -> None:
    """Each device stays attached, so that the next one surely has another number. None is mounted again: its cache may
    be older than the image."""
    with mounted(first, point) as before:
        host = Host(tmp_path, TREES, point / "scratch")
        path = host.tree("tmp-held")
        host.tree("tmp-loose")
        held = host.run("workload", "hold", str(path), "--for", "1h")
        assert held.code == 0, held.err
        assert len(host.lines("hold")) == 1
    with attached(image) as second:
        with mounted(second, point) as after:
            assert after != before, "the disk has its old number: nothing is tested"
            _release(host, path)
        with attached(image) as third, mounted(third, point) as last:
            assert last not in (before, after), "the disk has an old number: nothing is tested"
            until(lambda: "tmp-held" in _reclaimed(host), "released under any number")


def _release(host: Host, path: Path) -> None:
    """After a pass that removes what is not held, and keeps this."""
    (place,) = host.run("plan", "--json", "--platform", "host", "--kind", "tree").json()["places"]
    planned = {Path(d["seen"]["ref"]["name"]).name: d for d in place["decisions"]}
    assert set(planned) == {"tmp-held", "tmp-loose"}, place
    assert planned["tmp-loose"]["action"] == "remove", "what is not held is due"
    assert planned["tmp-held"]["action"] == "keep", planned["tmp-held"]["reason"]
    until(lambda: "tmp-loose" in _reclaimed(host), "what is not held is removed")
    assert host.names() == ["tmp-held"]
    released = host.run("workload", "release", str(path))
    assert released.code == 0, released.err


def _reclaimed(host: Host) -> list[str]:
    """By one pass, which does nothing while a process on this machine hides what it has open."""
    return [name for name, outcome in host.apply().outcomes().items() if outcome["result"] == "reclaimed"]

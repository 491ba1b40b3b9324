"""Ids of filesystems that outlast a device number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.disk import mounts
from gpukeeper.disk.mounts import MountEntry, lasting_ids, lasting_uid


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """What the kernel would answer, by mount point: device number and f_fsid. Everything else is an error."""
    answers: dict[str, tuple[int, int]] = {}

    def answer(point: str) -> tuple[int, int]:
        if point not in answers:
            raise PermissionError(point)
        return answers[point]

    monkeypatch.setattr(mounts, "_status_of", answer)
    return answers


def mount(point: str, kind: str, device: str = "7:1", source: str = "/") -> MountEntry:
    return MountEntry(device, source, point, kind)


def test_the_id_is_the_same_under_another_number(asked: dict[str, tuple[int, int]]) -> None:
    asked["/data"] = (os.makedev(7, 1), 0xABC)
    assert lasting_ids([mount("/data", "ext4")]) == {os.makedev(7, 1): "fsid-0000000000000abc"}
    asked["/data"] = (os.makedev(7, 2), 0xABC)
    assert lasting_ids([mount("/data", "ext4", "7:2")]) == {os.makedev(7, 2): "fsid-0000000000000abc"}


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "nfs4", "fuse.sshfs", "vfat", ""])
def test_other_filesystems_are_not_even_asked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_status_of", lambda point: pytest.fail(f"{point} was asked"))
    assert lasting_ids([mount("/data", kind)]) == {}


def test_nothing_behind_a_filesystem_that_may_hang_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_status_of", lambda point: pytest.fail(f"{point} was asked"))
    assert lasting_ids([mount("/far", "nfs4", "0:50"), mount("/far/data", "ext4")]) == {}


def test_a_hidden_mount_point_says_nothing_about_its_filesystem(asked: dict[str, tuple[int, int]]) -> None:
    asked["/data"] = (os.makedev(7, 2), 2)
    assert lasting_ids([mount("/data", "ext4"), mount("/data", "ext4", "7:2")]) == {os.makedev(7, 2): f"fsid-{2:016x}"}
    assert lasting_ids([mount("/data", "ext4"), mount("/data", "tmpfs", "0:60")]) == {}
    assert lasting_ids([mount("/data", "ext4", "7:3")]) == {}, "another one was mounted since the list was read"


def test_a_second_mount_helps_where_the_first_cannot_be_queried(asked: dict[str, tuple[int, int]]) -> None:
    asked["/b"] = (os.makedev(7, 1), 5)
    assert lasting_ids([mount("/a", "ext4"), mount("/b", "ext4")]) == {os.makedev(7, 1): f"fsid-{5:016x}"}


def test_an_id_of_zero_is_none(asked: dict[str, tuple[int, int]]) -> None:
    asked["/data"] = (os.makedev(7, 1), 0)
    assert lasting_ids([mount("/data", "ext4")]) == {}


def test_each_subvolume_has_its_own(asked: dict[str, tuple[int, int]]) -> None:
    asked |= {"/a": (71, 1), "/b": (72, 2)}  # what stat tells is not what the mount table names
    found = lasting_ids([mount("/a", "btrfs", "0:40", "/@a"), mount("/b", "btrfs", "0:40", "/@b")])
    assert found == {71: f"fsid-{1:016x}", 72: f"fsid-{2:016x}"}


def test_where_the_kernel_tells_the_device_alone_udev_knows_the_uuid(
    asked: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    device = Path("/dev/null").stat().st_rdev
    (tmp_path / "1b2c").symlink_to("/dev/null")
    (tmp_path / "dead").symlink_to("/dev/no-such-disk")
    asked["/data"] = (device, 77)
    here = f"{os.major(device)}:{os.minor(device)}"
    assert lasting_ids([mount("/data", "xfs", here)], str(tmp_path)) == {device: "uuid-1b2c"}
    assert lasting_ids([mount("/data", "xfs", here)], str(tmp_path / "none")) == {}


def test_a_uid_keeps_all_but_the_device_number() -> None:
    ids = {7: "fsid-a"}
    assert lasting_uid("7:12", ids) == "fsid-a:12"
    assert lasting_uid("7:12:logs", ids) == "fsid-a:12:logs"
    assert [lasting_uid(uid, ids) for uid in ("8:12", "7", "GPU-1", "7@12")] == [None] * 4


def test_the_mounts_of_this_machine_can_be_queried() -> None:
    assert all(name.partition("-")[0] in {"fsid", "uuid"} for name in lasting_ids().values())

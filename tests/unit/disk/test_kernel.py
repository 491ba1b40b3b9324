"""Opening without leaving a folder, with openat2 and without it; renaming without replacing."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpukeeper.disk import kernel

WAYS = [kernel._by_openat2, kernel._by_steps]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "root/a")
    fd = os.open(tmp_path / "root", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_below_a_directory_opens(folder: int, way: Callable[[int, bytes, int], int], tmp_path: Path) -> None:
    fd = way(folder, b"a/b", kernel.FOLDER)
    assert os.fstat(fd).st_ino == (tmp_path / "root/a/b").stat().st_ino
    os.close(fd)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", [b"../outside", b"a/../../outside", b"link", b"link/b"])
def test_no_path_leads_out_or_over_a_link(folder: int, way: Callable[[int, bytes, int], int], path: bytes) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which error depends on the way
        way(folder, path, kernel.FOLDER)
    assert caught.value.errno in {errno.EXDEV, errno.ELOOP, errno.ENOTDIR}
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_mount_is_not_entered(way: Callable[[int, bytes, int], int]) -> None:
    root = os.open("/", os.O_RDONLY)
    with pytest.raises(OSError, match="cross-device"):
        way(root, b"proc", kernel.FOLDER)
    os.close(root)


def test_without_openat2_the_steps_are_taken(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_openat2", lambda: False)
    os.close(kernel.open_inside(folder, "a/b"))
    with pytest.raises(OSError, match=r"symbolic|directory"):
        kernel.open_inside(folder, "link")


def test_a_link_can_be_read_and_is_not_followed(folder: int, tmp_path: Path) -> None:
    assert kernel.stat_inside(folder, "link").st_ino == (tmp_path / "root/link").lstat().st_ino


def test_a_rename_never_replaces(folder: int, tmp_path: Path) -> None:
    (tmp_path / "root/other").mkdir()
    with pytest.raises(FileExistsError):
        kernel.rename_inside(folder, "other", folder, "a")
    kernel.rename_inside(folder, "other", folder, os.fsdecode(b"\xff\n"))
    assert [os.fsencode(one.name) for one in (tmp_path / "root").iterdir()].count(b"\xff\n") == 1


def test_a_lock_of_another_user_is_seen(tmp_path: Path) -> None:
    one, two = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert kernel.lock(one)
    assert not kernel.lock(two)
    os.close(one)
    assert kernel.lock(two)
    os.close(two)


def test_whether_a_file_is_open_anywhere_is_known_to_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    folder = os.open(tmp_path, os.O_RDONLY)
    if kernel.is_open(folder, "file") is None:
        pytest.skip("this filesystem has no leases")
    assert kernel.is_open(folder, "file") is False
    one, other = socket.socketpair()
    with (tmp_path / "file").open() as file:
        assert kernel.is_open(folder, "file") is True
        socket.send_fds(one, [b"x"], [file.fileno()])
    assert kernel.is_open(folder, "file") is True  # on its way, and in no process
    other.close()
    assert kernel.is_open(folder, "file") is False
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert kernel.is_open(folder, "file") is True
    mapped.close()
    assert kernel.is_open(folder, "missing") is None
    os.close(folder)
    one.close()


def test_a_glance_tells_what_stat_tells(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    found, seen = (tmp_path / "file").stat(), kernel.status_of(str(tmp_path / "file"))
    assert (seen.dev, seen.ino, seen.nlink) == (found.st_dev, found.st_ino, found.st_nlink)
    assert (seen.mode, seen.uid, seen.blocks) == (found.st_mode, found.st_uid, found.st_blocks)
    with pytest.raises(FileNotFoundError):
        kernel.status_of(str(tmp_path / "missing"))

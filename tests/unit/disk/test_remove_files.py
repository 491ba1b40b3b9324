"""Removing many files: one read of open files for all, and what is used or changed is put back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.measure import open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import FileRemoval, remove_files, used_by
from gpukeeper.disk.walk import OPEN
from gpukeeper.model.decision import Changed
from gpukeeper.model.unknown import Unknown
from tests.unit.disk.trees import HOLD_OPEN, child, everything_seen, expected, trash_in


def test_many_files_cost_one_read(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"log-{number}").write_bytes(b"x" * 5000)
    os.sync()
    files = [(f"log-{number}", expected(tmp_path / f"log-{number}")) for number in range(300)]
    (tmp_path / "log-7").write_text("written since")
    (tmp_path / "log-8").unlink()
    looks: list[int] = []

    def scan() -> OpenFiles:
        looks.append(1)
        return everything_seen()

    with child(HOLD_OPEN, tmp_path / "log-9") as pid, open_directory(str(tmp_path)) as parent:
        answer = remove_files(parent, files, scan=scan, until=math.inf)
    assert answer.kept == {
        "log-7": Changed("it changed since it was read"),
        "log-8": Changed("it is gone already"),
        "log-9": Changed(f"it is in use by pid {pid}"),
    }
    assert (len(answer.removed), answer.removal.entries, len(looks)) == (297, 297, 1)
    assert answer.removal.bytes_back == 297 * 8192
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log-7", "log-9"]


def test_files_whose_users_cannot_be_seen_are_put_back(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x")
    files = [("log", expected(tmp_path / "log"))]

    def partly() -> OpenFiles:
        return msgspec.structs.replace(everything_seen(), hidden="not everybody was seen")

    with open_directory(str(tmp_path)) as parent:
        answer = remove_files(parent, files, scan=partly, until=math.inf)
    assert isinstance(answer.kept["log"], Unknown)
    assert [one.name for one in tmp_path.iterdir()] == ["log"]


def test_an_error_in_between_puts_the_files_back(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x")
    files = [("log", expected(tmp_path / "log"))]

    def broken() -> OpenFiles:
        raise PermissionError(13, "Permission denied")

    with open_directory(str(tmp_path)) as parent, pytest.raises(PermissionError):
        remove_files(parent, files, scan=broken, until=math.inf)
    assert [one.name for one in tmp_path.iterdir()] == ["log"]


def kept_by(tmp_path: Path, scan: Callable[[], OpenFiles]) -> FileRemoval:
    """Two closed files, of which `scan` may show or do something."""
    for name in ("log", "other"):
        (tmp_path / name).write_text("x")
    files = [(name, expected(tmp_path / name)) for name in ("log", "other")]
    with open_directory(str(tmp_path)) as parent:
        return remove_files(parent, files, scan=scan, until=math.inf)


def in_trash(tmp_path: Path, name: str) -> Path:
    return trash_in(tmp_path)[0] / name


def nobody() -> OpenFiles:
    return OpenFiles({}, {}, (), frozenset(), None)


def test_a_mount_inside_the_trash_keeps_all_files(tmp_path: Path) -> None:
    """In whatever mount namespace: which of them it is of is not known."""

    def scan() -> OpenFiles:
        point = f"/run/rootfs/{in_trash(tmp_path, 'log')}"
        return msgspec.structs.replace(nobody(), points=frozenset({point}))

    answer = kept_by(tmp_path, scan)
    assert answer.kept == dict.fromkeys(("log", "other"), Changed(used_by(KERNEL)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "other"]


def test_a_file_that_is_open_under_another_name_is_put_back(tmp_path: Path) -> None:
    def scan() -> OpenFiles:
        found = in_trash(tmp_path, "log").stat()
        return msgspec.structs.replace(nobody(), files={(found.st_dev, found.st_ino): 77})

    answer = kept_by(tmp_path, scan)
    assert (answer.kept, answer.removed) == ({"log": Changed(used_by(77))}, ("other",))


def test_a_file_that_was_written_while_it_was_taken_is_put_back(tmp_path: Path) -> None:
    """By a process that had it open and closed it before the scan."""

    def scan() -> OpenFiles:
        in_trash(tmp_path, "log").write_text("more")
        return nobody()

    answer = kept_by(tmp_path, scan)
    assert (answer.kept, answer.removed) == ({"log": Changed("it changed since it was read")}, ("other",))
    assert (tmp_path / "log").read_text() == "more"


def test_a_file_that_no_scan_shows_as_open_and_the_kernel_does_is_put_back(tmp_path: Path) -> None:
    """As one whose descriptor is on its way through a socket."""
    (tmp_path / "log").write_text("x")
    with (tmp_path / "log").open():
        files = [("log", expected(tmp_path / "log"))]
        with open_directory(str(tmp_path)) as parent:
            answer = remove_files(parent, files, scan=nobody, until=math.inf)
    assert (answer.kept, answer.removed) == ({"log": Changed(OPEN)}, ())
    assert (tmp_path / "log").exists()


def test_another_kind_of_entry_with_the_identity_of_a_file_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("elsewhere")
    files = [("log", expected(tmp_path / "log"))]
    with open_directory(str(tmp_path)) as parent:
        answer = remove_files(parent, files, scan=nobody, until=math.inf)
    assert (answer.kept, answer.removed) == ({"log": Changed("it is not a regular file")}, ())
    assert (tmp_path / "log").is_symlink()

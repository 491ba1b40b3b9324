"""Removing many files: one read of open files for all, and what is used or changed is put back."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.measure import open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove_files import remove_files
from gpukeeper.model.decision import Changed
from gpukeeper.model.unknown import Unknown
from tests.unit.disk.trees import HOLD_OPEN, child, everything_seen, expected


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

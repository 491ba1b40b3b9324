"""The keep-alive file, with real files; and where it is looked for."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.docker import Engine
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.host_facts import HostInspector, HostSnapshot, has_keepalive
from gpukeeper.platforms.docker.owners import UserDirectory
from gpukeeper.platforms.docker.records import Records
from tests.unit.platforms.docker.examples import ID, StillClock, container, ended

FILE = "/workspace/.keep-alive"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/workspace").mkdir(parents=True)
    return tmp_path / "root"


def there(root: Path, not_before: datetime = LONG_AGO) -> bool:
    return has_keepalive(str(root), FILE, not_before)


def test_a_plain_file_counts(root: Path) -> None:
    (root / "workspace/.keep-alive").touch()
    assert there(root)


def test_no_file_and_no_directory_do_not(root: Path) -> None:
    assert not there(root)
    (root / "workspace").rmdir()
    assert not there(root)


def test_a_link_to_a_file_does_not(root: Path) -> None:
    (root / "real").touch()
    (root / "workspace/.keep-alive").symlink_to("../real")
    assert not there(root)


def test_a_linked_directory_does_not(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/.keep-alive").touch()
    (root / "workspace").rmdir()
    (root / "workspace").symlink_to(tmp_path / "elsewhere")
    assert not there(root)


def test_a_directory_or_a_pipe_of_that_name_does_not(root: Path) -> None:
    (root / "workspace/.keep-alive").mkdir()
    assert not there(root)
    (root / "workspace/.keep-alive").rmdir()
    os.mkfifo(root / "workspace/.keep-alive")
    assert not there(root)


def test_a_file_in_the_place_of_the_directory_does_not(root: Path) -> None:
    (root / "workspace").rmdir()
    (root / "workspace").touch()
    assert not there(root)


def test_a_file_from_before_the_container_does_not_whatever_its_date_says(root: Path) -> None:
    file = root / "workspace/.keep-alive"
    file.touch()
    os.utime(file, (4e9, 4e9))
    changed = datetime.fromtimestamp(file.stat().st_ctime, UTC)
    assert not there(root, changed + timedelta(seconds=1))
    assert there(root, changed - timedelta(seconds=1))


def test_a_root_that_is_gone_cannot_be_told(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        there(root / "gone")


def kept_alive(proc: Path, **parts: Any) -> Any:
    async def gpus() -> tuple[()]:
        return ()

    records = Records(Engine("unix:///nowhere"))
    around = HostInspector(records, gpus, local=True, directory=UserDirectory(StillClock()), proc=str(proc))
    one = container(created="2020-01-01T00:00:00Z", host={"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, **parts)
    return asyncio.run(around.facts(one, HostSnapshot(Unknown("no driver"), {}))).keep_alive


def add_process(proc: Path, pid: int, cgroup: str) -> Path:
    home = proc / str(pid)
    (home / "root/workspace").mkdir(parents=True)
    (home / "cgroup").write_text(cgroup)
    return home / "root"


def test_of_a_running_container_its_own_root_is_read(tmp_path: Path) -> None:
    root = add_process(tmp_path, 4242, f"0::/docker/{ID}\n")
    assert kept_alive(tmp_path) is False
    (root / "workspace/.keep-alive").touch()
    assert kept_alive(tmp_path) is True


def test_a_pid_that_is_another_users_by_now_is_not_looked_into(tmp_path: Path) -> None:
    root = add_process(tmp_path, 4242, "0::/user.slice\n")
    (root / "workspace/.keep-alive").touch()
    assert isinstance(kept_alive(tmp_path), Unknown)


def test_a_running_container_whose_process_is_not_seen_is_unknown_not_without_a_file(tmp_path: Path) -> None:
    assert isinstance(kept_alive(tmp_path), Unknown)


def test_of_an_ended_container_the_mounted_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    mounts = [{"Type": "bind", "Source": str(tmp_path / "work"), "Destination": "/workspace"}]
    assert kept_alive(tmp_path, state=ended(), mounts=mounts) is False
    (tmp_path / "work/.keep-alive").touch()
    assert kept_alive(tmp_path, state=ended(), mounts=mounts) is True


def test_the_file_itself_may_be_mounted(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    mounts = [{"Type": "bind", "Source": str(tmp_path / "mine"), "Destination": FILE}]
    assert kept_alive(tmp_path, state=ended(), mounts=mounts) is True


def test_an_ended_container_without_a_mount_has_no_place_for_one(tmp_path: Path) -> None:
    assert kept_alive(tmp_path, state=ended()) is None

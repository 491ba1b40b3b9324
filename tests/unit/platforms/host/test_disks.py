"""Disks: how full they are, and who holds what was deleted."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import msgspec

from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.process_files import DeletedFile
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.subject import Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.connect import Timeouts
from gpukeeper.platforms.host.roots import disk_of
from tests.unit.platforms.host.machine import Machine, everything_seen


def only_disk(machine: Machine) -> Subject:
    (disk,) = [one for one in machine.all() if one.shape is Shape.NODE]
    return disk


def test_the_disk_of_a_root_is_shown_once_as_df_tells_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, directories=[str(tmp_path / "not" / "there" / "yet")])
    machine.tree()
    disk, tree = only_disk(machine), machine.observe()["tmp-a"]
    assert (disk.ref.kind, disk.ref.uid) == ("disk", str(tmp_path.stat().st_dev))
    assert os.path.ismount(disk.ref.name)
    assert disk.disk is not None
    assert tree.disk is not None
    assert tree.disk.name == disk.disk.name == disk.ref.name
    found = os.statvfs(tmp_path)
    assert int(disk.labels["disk_size"]) == found.f_blocks * found.f_frsize
    assert 0 <= disk.disk.used <= 1
    assert isinstance(disk.size, int)


def test_a_disk_is_read_by_its_number(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    disk = only_disk(machine)
    again = machine.read(disk)
    assert again.ref == disk.ref
    other = msgspec.structs.replace(disk.ref, uid="12345678")
    assert isinstance(machine.run(machine.platform.read(other)), Gone)


def test_who_holds_deleted_files_is_reported_from_a_gigabyte_on(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    held = (
        DeletedFile(os.getpid(), "/a", (device, 1), 700_000_000),
        DeletedFile(os.getpid(), "/b", (device, 2), 700_000_000),
        DeletedFile(1, "/c", (device, 3), 999_999_999),
        DeletedFile(os.getpid(), "/elsewhere", (device + 1, 4), 9_000_000_000),
    )
    disk = only_disk(Machine(tmp_path, scan=lambda: msgspec.structs.replace(everything_seen(), held=held)))
    comm = Path("/proc/self/comm").read_text().strip()
    words = f"1.3 GiB are used by deleted files that pid {os.getpid()} ({comm}) still has open"
    assert disk.findings == (words,)
    assert disk.labels["held_open"] == str(2_399_999_999)


def test_a_deleted_file_that_is_open_counts_as_held(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(b"x" * 1_000_000)
        file.flush()
        disk = only_disk(Machine(tmp_path))
    assert int(disk.labels["held_open"]) >= 1_000_000


def test_what_others_hold_is_unknown_when_they_may_not_be_read(tmp_path: Path) -> None:
    def nobody() -> OpenFiles:
        return msgspec.structs.replace(everything_seen(), held=(), hidden="they are somebody else's")

    def unreadable() -> OpenFiles:
        raise PermissionError(13, "Permission denied")

    for scan in (nobody, unreadable):
        assert "held_open" not in only_disk(Machine(tmp_path, scan=scan)).labels


def test_a_disk_that_cannot_be_queried_is_unseen(tmp_path: Path) -> None:
    machine = Machine(tmp_path, timeouts=Timeouts(disk=timedelta(seconds=-1)))

    async def unseen() -> list[Unseen]:
        return [one async for page in machine.platform.observe(PlaceScope()) for one in page.unseen]

    assert [one for one in machine.run(unseen()) if "the disk of" in one.what]
    ref = msgspec.structs.replace(only_disk(Machine(tmp_path)).ref)
    assert isinstance(machine.run(machine.platform.read(ref)), Unknown)
    assert disk_of(str(tmp_path / ("x" * 300))) is None

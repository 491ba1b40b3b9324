"""How full a disk is, compared with `df`; and what deleted files still hold."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.measure import estimate
from gpukeeper.disk.mounts import usage
from gpukeeper.disk.open_files import held_open
from gpukeeper.model.unknown import Unknown
from tests.own_processes import scan_own
from tests.unit.disk.trees import child, tree

MIB = 1024 * 1024
HOLD_DELETED = """
import os, sys
f, g = open(sys.argv[1], "w+b"), None
f.write(b"x" * 3 * 1024 * 1024); f.flush(); os.fsync(f.fileno())
g = open(sys.argv[1]); os.unlink(sys.argv[1]); print(flush=True); sys.stdin.read()
"""


def test_a_disk_is_as_full_as_df_says(tmp_path: Path) -> None:
    for given in (str(tmp_path), os.open(tmp_path, os.O_RDONLY)):
        found = usage(given)
        columns = "--output=target,size,avail,pcent,itotal"
        target, size, avail, percent, inodes = subprocess.check_output(["df", "-B1", columns, tmp_path]).split()[-5:]
        assert (found.mount_point, found.size) == (target.decode(), int(size))
        assert abs(found.free - int(avail)) < 4096 * MIB  # others write meanwhile
        assert abs(found.used * 100 - int(percent.rstrip(b"%"))) <= 2
        assert found.inodes == (int(inodes) or None)
        assert found.device == tmp_path.stat().st_dev
        if isinstance(given, int):
            os.close(given)


def test_a_filesystem_that_makes_inodes_as_it_needs_them_has_no_share_of_them() -> None:
    found = msgspec.structs.replace(usage("/"), inodes=None, inodes_free=None)
    assert found.inodes_used is None
    assert msgspec.structs.replace(found, inodes=10, inodes_free=4).inodes_used == pytest.approx(0.6)


def test_deleted_files_that_are_open_are_told_with_their_holder_each_once(tmp_path: Path) -> None:
    with child(HOLD_DELETED, tmp_path / "file") as pid:
        held = held_open(scan_own())
        assert not isinstance(held, Unknown)
        assert 3 * MIB <= held[pid] < 4 * MIB
    after = held_open(scan_own())
    assert isinstance(after, Unknown) or pid not in after


def test_an_estimate_is_what_du_says_or_unknown(tmp_path: Path) -> None:
    one, two = tree(tmp_path, "one"), tree(tmp_path, "two")
    os.sync()
    minute = timedelta(minutes=1)
    both = sum(int(subprocess.check_output(["du", "-sB1", path]).split()[0]) for path in (one, two))
    assert estimate([str(one), str(two)], minute) == both
    assert estimate([str(one), str(tmp_path / "gone"), str(two)], minute) == both, "what went away adds nothing"
    assert isinstance(estimate([str(one)], timedelta(0)), Unknown)

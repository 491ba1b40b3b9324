"""Names that hold what other programs take for the end of a line: one mount, one process, one group each. As anybody
may choose them, they must hide nothing and stop nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.disk import open_files, process_files
from gpukeeper.disk.mounts import own_mounts
from gpukeeper.platforms.host.trees import NAMES_MAX, mentioned_below
from gpukeeper.platforms.ray.nodes import read
from tests.real.disk.filesystems import mounted, need_root
from tests.real.host.machine import Host, first_program
from tests.unit.disk.trees import READY, child, tree

# Each ends a line for str.splitlines(), or a field for str.split(), and not for the kernel.
SIGNS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\u3000", "\r", " ", "\n", "\t", "\\040", " - overlay x "]


@pytest.mark.parametrize("sign", SIGNS)
def test_a_mount_of_any_name_is_known_by_that_name(tmp_path: Path, sign: str) -> None:
    need_root()
    path, point = tree(tmp_path), tmp_path / f"a{sign}b / c".replace("/", "")
    with mounted(point, "--bind", path):
        assert str(point) in {mount.point for mount in own_mounts()}
        seen = open_files.scan()
        assert str(point) in seen.points
        assert open_files.is_mounted_elsewhere(str(path), seen)


@pytest.mark.parametrize("sign", SIGNS)
def test_a_process_of_any_name_is_seen(tmp_path: Path, sign: str) -> None:
    name = f"x) R{sign}("[:15]
    call = "ctypes.CDLL(None).prctl(15, sys.argv[1].encode()[:15], 0, 0, 0)"
    program = f"import ctypes, sys; {call}; f = open(sys.argv[2]); {READY}"
    file = tree(tmp_path) / "d0/f0"
    with child(program, name, file) as pid:
        assert open_files.scan().paths.get(str(file)) == pid
        assert read(pid) is not None
        assert "tree" in mentioned_below([str(tmp_path)])


def test_plan_works_beside_a_mount_of_any_name(tmp_path: Path) -> None:
    """The program that ended."""
    need_root()
    host = Host(tmp_path, "temporary:\n  - {root: ROOT, names: ['*'], older_than: 1h}\n")
    tree = host.tree("tree")
    with mounted(tmp_path / "a\u2028b", "--bind", tree):
        ran = host.run("plan", "--json", "--platform", "host")
    assert ran.code == 0, ran.err
    assert "tree" in ran.out


def test_a_process_with_more_words_than_are_read_keeps_everything(tmp_path: Path) -> None:
    """And costs no more than any other: what is read of it, and what is made of that, is bounded."""
    (tmp_path / "tree").mkdir()
    signs = f"{tmp_path}/" + " =" * 120
    with child(f"import sys; {READY}", *([signs * 400] * 10)) as pid:
        named = mentioned_below([str(tmp_path)])
        assert named.who("tree") is not None
        assert f"pid {pid} " in str(named.anything)
        assert len(named) < 2 * NAMES_MAX
        assert getattr(read(pid), "cut", None) is True
    assert mentioned_below([str(tmp_path)]).who("tree") is None


def test_a_process_with_more_descriptors_than_are_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    need_root()
    monkeypatch.setattr(process_files, "DESCRIPTORS", 800)
    with child(f"import os, sys; [os.dup(0) for _ in range(900)]; {READY}") as pid:
        hidden = open_files.scan(unreadable=(first_program(),)).hidden
        assert "has more than 800 descriptors" in str(hidden), pid

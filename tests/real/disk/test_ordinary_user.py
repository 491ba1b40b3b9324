"""Who may not see other people's open files keeps everything that others might use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.disk.filesystems import as_nobody, need_root
from tests.unit.disk.trees import HOLD_OPEN, child, tree

REMOVE = """
from gpukeeper.disk.open_files import scan
answer = removed(here / "tree", scan=scan)
print(type(answer).__name__, getattr(answer, "why", ""))
"""


@pytest.mark.smoke
def test_other_peoples_open_files_cannot_be_seen_so_the_tree_is_kept(tmp_path: Path) -> None:
    need_root()
    tmp_path.chmod(0o777)
    as_nobody(tmp_path, "tree(here)")
    with child(HOLD_OPEN, tmp_path / "tree/d0/f0"):
        printed = as_nobody(tmp_path, REMOVE)
    assert printed.startswith("Unknown whether it is in use is unknown")
    assert [one.name for one in tmp_path.iterdir()] == ["tree"]
    assert len(list((tmp_path / "tree").rglob("f*"))) == 12


def test_another_users_tree_in_a_sticky_directory_is_refused(tmp_path: Path) -> None:
    need_root()
    tmp_path.chmod(0o1777)
    tree(tmp_path)
    assert "sticky" in as_nobody(tmp_path, REMOVE)
    assert [one.name for one in tmp_path.iterdir()] == ["tree"]

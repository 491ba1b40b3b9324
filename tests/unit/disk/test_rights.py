"""Whether a person could remove a tree without root's help."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.disk.remove import others_in, why_not_removable

ANN = 54321


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where everybody can go: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="gpukeeper-rights-", dir="/tmp") as made:
        Path(made).chmod(0o755)
        inner = Path(made) / "inner"
        inner.mkdir()
        yield inner


def why_not(folder: Path, uid: int = ANN, entry_uid: int = ANN) -> str | None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return why_not_removable(fd, entry_uid, uid)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_ones_own_entry_in_a_directory_that_everybody_may_write_to(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert why_not(folder) is None
    assert why_not(folder, entry_uid=0) is not None


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o707, 0o776, 0o772])
def test_a_directory_that_may_not_be_written_to_or_searched_or_only_by_some(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert "may not write to its directory" in (why_not(folder) or "")


def test_ones_own_directory_by_the_owners_rights(folder: Path) -> None:
    me = os.geteuid()
    folder.chmod(0o700)
    assert why_not(folder, me, me) is None
    folder.chmod(0o577)
    assert why_not(folder, me, me) is not None


def test_a_directory_above_that_may_not_be_entered(folder: Path) -> None:
    folder.chmod(0o777)
    folder.parent.chmod(0o700)
    assert "may not enter a directory above it" in (why_not(folder) or "")


def test_entries_of_others_are_named_and_counted() -> None:
    assert others_in({ANN}, ANN) is None
    assert others_in(set(), ANN) is None
    assert "entries of uid 0, 1, 2 and 1 more" in (others_in({0, 1, 2, 3, ANN}, ANN) or "")

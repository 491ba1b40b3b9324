"""200,000 files (a million are in the benchmark `disk-delete`): measured and removed whole, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.disk.remove import TreeRemoval
from tests.unit.disk.trees import read, removed


@pytest.mark.timeout(300)
def test_two_hundred_thousand_files_are_measured_and_removed(tmp_path: Path) -> None:
    for folder in range(400):
        path = tmp_path / "tree" / str(folder % 7) / str(folder)
        path.mkdir(parents=True)
        fd = os.open(path, os.O_RDONLY)
        for file in range(500):
            os.close(os.open(str(file), os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.close(fd)
    found = read(tmp_path / "tree")
    assert (found.entries, found.problems) == (200_000 + 400 + 7 + 1, ())
    answer = removed(tmp_path / "tree", progress=lambda entries: None)
    assert isinstance(answer, TreeRemoval)
    assert (answer.entries, answer.bytes_back, answer.left) == (found.entries, found.size, ())
    assert list(tmp_path.iterdir()) == []

"""Killed at any moment, the next run finishes: a tree is whole under its own name, or not there at all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpukeeper.disk.measure import open_directory
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.disk.trash import sweep
from gpukeeper.model.decision import Changed
from tests.kills import KILLS
from tests.real.disk.filesystems import REPOSITORY
from tests.unit.disk.trees import finished, removed, trash_in, tree

FOLDERS, FILES = 60, 40  # more than are deleted in one program
REMOVE = """
import sys
from pathlib import Path
from tests.unit.disk.trees import expected, removed
path = Path(sys.argv[1])
wanted = expected(path)
print(flush=True)
removed(path, wanted)
"""


def killed_after(seconds: float, path: Path, *, taken: bool) -> None:
    """With everything it started. `taken`: counted from when the tree is in the trash."""
    command = [sys.executable, "-c", REMOVE, path]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        while taken and path.is_dir() and running.poll() is None:
            pass
        time.sleep(seconds)  # the moment is the point: no condition says when
        os.killpg(running.pid, 9)
        running.stderr.read()  # ends with the last who has it: what it started is still dying, with the tree open


@pytest.mark.timeout(600)
def test_a_deletion_that_is_killed_at_any_moment_is_finished_or_undone(tmp_path: Path) -> None:
    seed = int(time.time())
    rng, endings = random.Random(seed), list[str]()
    for number in range(KILLS):
        path = tree(tmp_path, f"tree{number}", folders=FOLDERS, files=FILES)
        killed_after(rng.uniform(0, 0.5 if number % 2 else 0.2), path, taken=number % 4 == 0)
        endings.append(settled(tmp_path, path, f"seed {seed}, kill {number}"))
    assert "finished" in endings, endings
    print(endings)


def settled(root: Path, path: Path, which: str) -> str:
    """Before and after the next run, the name says the truth."""
    whole = FOLDERS * (FILES + 1)
    if path.is_dir():  # a file of ours may have its name
        assert len(list(path.rglob("*"))) == whole, which
    waiting = finished(root)
    assert all(isinstance(answer, TreeRemoval | Changed) for answer in waiting), (which, waiting)
    with open_directory(str(root)) as parent:
        sweep(parent)
    assert trash_in(root) == [], which
    if not path.exists():
        return "finished" if waiting else "done"
    assert len(list(path.rglob("*"))) == whole, which
    assert isinstance(removed(path), TreeRemoval), which
    return "undone" if waiting else "not begun"


def test_when_the_time_is_up_the_rest_waits_and_the_next_run_goes_on(tmp_path: Path) -> None:
    path = tree(tmp_path, folders=200, files=200)
    answer = None
    for budget in (0.1 * step for step in range(1, 1000)):
        answer = removed(path, until=time.monotonic() + budget)
        if isinstance(answer, TreeRemoval):
            break
    assert isinstance(answer, TreeRemoval)
    assert not path.exists()
    if answer.left:
        assert "the next pass continues" in answer.left[-1]
        (rest,) = finished(tmp_path)
        assert isinstance(rest, TreeRemoval)
        assert answer.entries + rest.entries == 200 * 201 + 1
    assert list(tmp_path.iterdir()) == []

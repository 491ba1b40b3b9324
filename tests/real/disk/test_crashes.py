"""Killed at any moment, the next run finishes: a tree is whole under its own name, or not there at all."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpukeeper.disk import erase
from gpukeeper.disk.measure import open_directory
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.disk.trash import sweep
from gpukeeper.disk.worker_pool import WorkerPool
from gpukeeper.model.decision import Changed
from tests import forked
from tests.kills import KILLS
from tests.patience import PATIENCE
from tests.real.disk.filesystems import REPOSITORY
from tests.real.disk.halting import SHARE
from tests.unit.disk.trees import finished, removed, trash_in, tree

SEED = 11
FOLDERS, FILES = 60, 40  # more than are deleted in one program
SMALL = {"folders": 2, "files": 2}
MOST = 100  # changes of the filesystem in the removal of a small tree, at most
ORDER = ("not begun", "undone", "finished", "done")
REMOVE = """
import sys
from pathlib import Path
from tests.unit.disk.trees import expected, removed
path = Path(sys.argv[1])
wanted = expected(path)
print(flush=True)
removed(path, wanted)
"""


def halted(point: int | str, path: Path) -> bool:
    """Whether it got as far as that point, and was killed there."""
    code, out, err = forked.run("tests.real.disk.halting", [str(point), str(path)], forked.environment())
    assert code in (0, -signal.SIGKILL), (code, out, err)
    return code != 0


def test_a_deletion_that_is_killed_before_any_of_its_changes_is_finished_or_undone(tmp_path: Path) -> None:
    """Every change of the filesystem, one after the other: until the tree is marked for deletion it is put back, from
    then on the rest is deleted."""
    endings: list[str] = []
    for number in range(1, MOST):
        path = tree(tmp_path, f"tree{number}", **SMALL)
        if not halted(number, path):
            break
        endings.append(settled(tmp_path, path, f"killed before change {number}", **SMALL))
    assert not path.exists(), "the last one was not killed"
    assert endings == sorted(endings, key=ORDER.index)
    assert set(endings) == set(ORDER)


@pytest.mark.smoke
def test_a_deletion_that_is_killed_while_worker_processes_delete_is_finished(tmp_path: Path) -> None:
    path = tree(tmp_path, folders=FOLDERS, files=FILES)
    assert halted(SHARE, path)
    assert settled(tmp_path, path, "killed after the first share") == "finished"


def killed_after(seconds: float, path: Path) -> None:
    """With everything it started."""
    command = [sys.executable, "-c", REMOVE, path]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        time.sleep(seconds)  # the moment is the point: no condition says when
        os.killpg(running.pid, 9)
        running.stderr.read()  # ends with the last who has it: what it started is still dying, with the tree open


@pytest.mark.timeout(600)
def test_a_deletion_that_is_killed_at_any_moment_is_finished_or_undone(tmp_path: Path) -> None:
    """The moments between the points above. Which of them a delay hits depends on the machine."""
    rng, endings = random.Random(SEED), list[str]()
    for number in range(KILLS):
        path = tree(tmp_path, f"tree{number}", folders=FOLDERS, files=FILES)
        killed_after(rng.uniform(0, 0.5 if number % 2 else 0.2), path)
        endings.append(settled(tmp_path, path, f"kill {number}"))
    print(endings)


def settled(root: Path, path: Path, which: str, folders: int = FOLDERS, files: int = FILES) -> str:
    """Before and after the next run, the name says the truth."""
    whole = folders * (files + 1)
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


def test_when_the_time_is_up_the_rest_waits_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is up after some directories of a tree for which worker processes were started."""
    path = tree(tmp_path, folders=FOLDERS, files=FILES)
    looks = count()
    with monkeypatch.context() as patched:
        patched.setattr(WorkerPool, "is_ready", lambda _: False)  # so that all of it is done here
        ends = lambda: time.monotonic() if next(looks) < FOLDERS // 4 else math.inf  # noqa: E731
        patched.setattr(erase, "time", SimpleNamespace(monotonic=ends))
        answer = removed(path, until=time.monotonic() + PATIENCE)
    assert isinstance(answer, TreeRemoval)
    assert not path.exists()
    assert "the next pass continues" in answer.left[-1]
    (rest,) = finished(tmp_path)
    assert isinstance(rest, TreeRemoval)
    assert min(answer.entries, rest.entries) > FILES
    assert answer.entries + rest.entries == FOLDERS * (FILES + 1) + 1
    assert list(tmp_path.iterdir()) == []

"""Removing trees of 200,000 and of a million files with every check, against `rm -rf`.

Ours takes the tree out of reach, looks who uses it, walks it once more and only then deletes; `rm` only deletes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.disk_trees import DiskTrees, disk_trees
from benchmarks.report import Figure, met, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.measure import measure, open_directory
from gpukeeper.disk.open_files import OpenFiles, scan
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval, remove

ROUNDS = sized({200_000: 4, 1_000_000: 1}, tiny={2_000: 1, 5_000: 1})
TARGET, LEAST = 1.0, 1 / 1.5  # times as fast as rm; in no case slower than that


def run() -> None:
    ratios = {}
    for files, rounds in ROUNDS.items():
        with disk_trees(files) as disk:
            ratios[files] = _compare(disk, files, rounds)
    ours, ratio = ratios[min(ROUNDS)]
    print_figure(Figure("disk-delete", round(ours, 3), "s", round(ratio, 2), "rm -rf"))


def _compare(disk: DiskTrees, files: int, rounds: int) -> tuple[float, float]:
    ways: dict[str, Callable[[Path], float]] = {
        "rm -rf": _rm,
        "remove, every check": _remove,
        "the deletion in it, one program": _erase,
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            best[name] = min(best[name], way(disk.tree("tree", files)))
    rm, ours, _ = best.values()
    rows = [
        (name, f"{took:.3f}", f"{rm / took:.2f}", _target(rm / took) if took == ours else "")
        for name, took in best.items()
    ]
    print_table((f"{files:,} files", "seconds", "times as fast", "target"), rows)
    return ours, rm / ours


def _rm(path: Path) -> float:
    return timed(lambda: subprocess.run(["rm", "-rf", path], check=True))[0]


def _remove(path: Path) -> float:
    with open_directory(str(path.parent)) as parent:
        found = measure(path.name, parent)
        assert found is not None
        assert isinstance(found.ctime_ns, int), found.problems
        wanted = ExpectedTree((found.device, found.inode), found.ctime_ns)
        until = time.monotonic() + 600
        seconds, answer = timed(lambda: remove(parent, path.name, wanted, scan=_everything_seen, until=until))
    assert isinstance(answer, TreeRemoval), answer
    assert not answer.left, answer.left
    return seconds


def _erase(path: Path) -> float:
    with open_directory(str(path.parent)) as parent:
        return timed(lambda: TreeDeleter(time.monotonic() + 600).remove(parent, path.name.encode()))[0]


def _everything_seen() -> OpenFiles:
    """The price of a look, whoever may have been hidden from it on this machine."""
    return msgspec.structs.replace(scan(), hidden=None)


def _target(times: float) -> str:
    return f"at least {TARGET:g}, {met(times, TARGET, least=True)}; never below {LEAST:.2f}"

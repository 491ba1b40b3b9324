"""Measuring a tree of 500,000 files (links, times, open files), against GNU `du`, warm and cold.

On a filesystem of its own where that can be mounted; cold means mounted anew, read past the machine's cache.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.disk_trees import disk_trees
from benchmarks.report import Figure, met, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.disk.measure import measure, open_directory
from gpukeeper.disk.open_files import scan

FILES, RUNS_WARM, RUNS_COLD = sized((500_000, 5, 3), tiny=(5_000, 1, 1))
WARM, COLD = 0.8, 1.0  # targets, times as fast as du
ONE_PROGRAM = 10**9


def run() -> None:
    with disk_trees(FILES) as disk:
        path = disk.tree("tree", FILES)
        ways: dict[str, Callable[[], object]] = {
            "du -s": lambda: _du(path),
            "measure, two programs": lambda: _measure(path),
            "measure, one program": lambda: _measure(path, ONE_PROGRAM),
        }
        warm = _seconds(ways, RUNS_WARM, None)
        cold = _seconds(ways, RUNS_COLD, disk.cool) if disk.cool is not None else None
    _table("warm", warm, WARM)
    if cold is None:
        print("cold: not measured, since no filesystem can be mounted here (it needs root and loop devices)\n")
    else:
        _table("cold", cold, COLD)
    du, ours, _ = warm.values()
    print_figure(Figure("disk-size", round(ours, 3), "s", round(du / ours, 2), "GNU du -s, warm"))


def _seconds(ways: dict[str, Callable[[], object]], runs: int, before: Callable[[], None] | None) -> dict[str, float]:
    """In turn, so that a busy moment of the machine hits all."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(runs):
        for name, way in ways.items():
            if before is not None:
                before()
            best[name] = min(best[name], timed(way)[0])
    return best


def _measure(path: Path, alone: int | None = None) -> None:
    with open_directory(str(path.parent)) as parent:
        found = measure(path.name, parent, scan().files, alone=alone)
    assert found is not None
    assert isinstance(found.size, int), found.problems
    assert found.entries > FILES


def _du(path: Path) -> None:
    subprocess.run(["du", "-s", path], stdout=subprocess.DEVNULL, check=True, env=os.environ)


def _table(state: str, seconds: dict[str, float], limit: float) -> None:
    du = seconds["du -s"]
    rows = [
        (name, f"{took:.3f}", f"{du / took:.2f}", _target(du / took, limit) if "two" in name else "")
        for name, took in seconds.items()
    ]
    print_table((f"{FILES:,} files, {state}", "seconds", "times as fast", "target"), rows)


def _target(times: float, limit: float) -> str:
    return f"at least {limit:g}, {met(times, limit, least=True)}"

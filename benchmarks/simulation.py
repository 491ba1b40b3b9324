"""Simulated hours a second on one core, and seeds a minute on all of them, in the failing world of tests/simulation.

The peer is the same world without faults. Every seed's promises are checked; a broken one is printed, not hidden.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os

from benchmarks.report import Figure, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.platforms.simulated.world import CALM

# By name: the tests are not checked as strictly as what is here, and mypy would follow an import.
HARNESS = importlib.import_module("tests.simulation.harness")
PROMISES = importlib.import_module("tests.simulation.promises")
SEEDS = range(sized(24, tiny=1))
MANY = range(1000, sized(1096, tiny=1002))
HOURS: int = HARNESS.ROUGH_HOURS + HARNESS.CALM_HOURS


def run() -> None:
    rough = timed(lambda: [HARNESS.simulate(seed) for seed in SEEDS])[0]
    calm = timed(lambda: [HARNESS.simulate(seed, CALM) for seed in SEEDS])[0]
    cores = os.cpu_count() or 1
    with multiprocessing.Pool(cores) as pool:
        seconds, broken = timed(lambda: pool.map(_broken, MANY, chunksize=4))
    pace, peer = HOURS * len(SEEDS) / rough, HOURS * len(SEEDS) / calm
    rows = [
        ("failing world, one core", str(len(SEEDS)), f"{rough:.1f}", f"{pace:.0f}", ""),
        ("calm world, one core", str(len(SEEDS)), f"{calm:.1f}", f"{peer:.0f}", ""),
        (
            f"with its checkers, {cores} cores",
            str(len(MANY)),
            f"{seconds:.1f}",
            f"{HOURS * len(MANY) / seconds:.0f}",
            "",
        ),
    ]
    print_table(("simulation", "seeds", "seconds", "hours/s", ""), rows)
    print(f"{60 * len(MANY) / seconds:.0f} seeds a minute on {cores} cores; {sum(map(bool, broken))} broke a promise\n")
    print_figure(Figure("simulation", round(pace, 1), "simulated hours/s", round(pace / peer, 2), "the calm world"))


def _broken(seed: int) -> list[str]:
    found: list[str] = PROMISES.broken_promises(HARNESS.simulate(seed))
    return found

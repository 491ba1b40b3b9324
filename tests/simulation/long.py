"""`make simulate HOURS=8`: 2,000 real removals against racing neighbours, half a year of churn in which nothing may
grow, a million damaged inputs for the parsers, then seed after seed until the time is over or a promise breaks.
`make simulate SEEDS=2000`: only these seeds, from 0, as CI does. `make simulate SEED=n`: repeats one."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.simulation.acceptance import simulate_acceptance
from tests.simulation.harness import CALM_HOURS, ROUGH_HOURS, simulate
from tests.simulation.inputs import read_all
from tests.simulation.promises import broken_in_acceptance, broken_promises
from tests.simulation.racer import race
from tests.simulation.soak import grown, soak

BATCH = 64
SOAK_DAYS = 180


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--seed", type=int)
    wanted = parser.parse_args()
    if wanted.seed is not None:
        return _report(wanted.seed, check(wanted.seed)[1])
    if wanted.seeds is not None:
        return _first(wanted.seeds)
    end = time.monotonic() + wanted.hours * 3600
    problems = race() or _soaked()
    if problems:
        print("\n".join(problems))
        return 1
    return _many(end)


def _soaked() -> list[str]:
    seed = int(time.time()) % 100_000
    with tempfile.TemporaryDirectory() as folder:
        found = grown(soak(Path(folder), SOAK_DAYS, seed).held)
    return [f"soak with seed {seed}: {one}" for one in found]


def check(seed: int) -> tuple[int, list[str]]:
    return seed, [*broken_promises(simulate(seed)), *broken_in_acceptance(simulate_acceptance(seed))]


def _first(seeds: int) -> int:
    """The same ones every time."""
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for seed, broken in pool.imap_unordered(check, range(seeds), chunksize=8):
            if broken:
                return _report(seed, broken)
    print(f"{seeds} seeds, every promise kept", file=sys.stderr)
    return 0


def _many(end: float) -> int:
    begun, first = time.monotonic(), int(time.time())  # other seeds each time; the failing one is printed
    done = 0
    failed = read_all(first=first)
    if failed:
        print(*failed, sep="\n\n")
        return 1
    with multiprocessing.Pool(os.cpu_count()) as pool:
        while time.monotonic() < end:
            for seed, broken in pool.imap_unordered(check, range(first + done, first + done + BATCH)):
                if broken:
                    return _report(seed, broken)
            done += BATCH
            pace = done * (ROUGH_HOURS + CALM_HOURS) / (time.monotonic() - begun)
            print(f"\r{done} seeds, every promise kept; {pace:.0f} simulated hours a second", end="", file=sys.stderr)
    print(file=sys.stderr)
    return 0


def _report(seed: int, broken: list[str]) -> int:
    print(f"\nseed {seed}: " + ("\n  ".join(["", *broken]) if broken else "every promise kept"))
    if broken:
        print(f"Repeat it: make simulate SEED={seed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

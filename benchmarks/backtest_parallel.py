"""For the benchmark `backtest`: what a second core wins, of this machine and of a Ray cluster of two workers.

Beside it a plain loop in two processes: the most that a second core of this machine can win. The cores of a virtual
machine are often two threads of one. Ray is a real one, of two nodes on this machine (`make ray`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

from benchmarks.report import print_table
from benchmarks.size import sized
from gpukeeper.backtest.comparison import Comparison, Where, compare, judged
from gpukeeper.backtest.workers import ray_tasks
from gpukeeper.config.load import load_policy
from gpukeeper.lifecycle.replay import GIVEN, grid
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.model.series import RecordedRun, TraceTime
from gpukeeper.traces.synthetic import SyntheticTrace
from tests.engines import has_ray
from tests.real.ray.clusters import NEWEST
from tests.real.ray.with_gpukeeper import PROJECT, cluster_with, environment

CONTAINERS, DAYS, WINDOWS, TIMES = sized((200, 30, (30, 120, 300), 2), tiny=(4, 3, (30,), 1))
LOOP = sized(20_000_000, tiny=100_000)
VARIANTS = (GIVEN, *grid([timedelta(minutes=minutes) for minutes in WINDOWS], ()))


class HeldTrace(SyntheticTrace):
    """Its runs are computed before anything is timed."""

    def __init__(self, seed: int, workloads: int, days: int) -> None:
        super().__init__(seed, workloads, days)
        self.held = list(super().runs())

    def runs(self) -> Iterator[RecordedRun]:
        return iter(self.held)


def parallel(*, ray: bool) -> None:
    """`ray`: on a Ray cluster as well, where Ray is installed."""
    alone, both = (min(loops(processes) for _ in range(TIMES)) for processes in (1, 2))
    here = _least({"one": Where(1), "two": Where(2)})
    rows = [
        ("two plain loops at once, without gpukeeper", f"{both:.1f} s", f"{2 * alone / both:.2f}"),
        ("one process", f"{here['one']:.1f} s", "1"),
        ("two processes", f"{here['two']:.1f} s", f"{here['one'] / here['two']:.2f}"),
    ]
    if ray and has_ray(NEWEST):
        there = _with_ray()
        rows += [
            ("one process, in Ray's Python", f"{there['one']:.1f} s", "1"),
            ("two processes, in Ray's Python", f"{there['two']:.1f} s", f"{there['one'] / there['two']:.2f}"),
            (f"Ray {NEWEST}, two workers", f"{there['ray']:.1f} s", f"{there['one'] / there['ray']:.2f}"),
            ("  of it: to import Ray and to join the cluster", f"{there['join']:.1f} s", ""),
            ("  of it: until both workers have gpukeeper", f"{there['first']:.1f} s", ""),
            ("  of it: to leave the cluster", f"{there['leave']:.1f} s", ""),
        ]
    else:
        rows.append(("Ray", "not installed: make ray" if ray else "not at tiny size", "not measured"))
    print_table((f"{CONTAINERS} containers, {len(VARIANTS)} policies", "time", "speed-up"), rows)


def loops(processes: int) -> float:
    """Seconds until each of so many processes has done the same plain loop; they have started before."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_loop, [1] * processes))
        begin = time.perf_counter()
        list(pool.map(_loop, [LOOP] * processes))
        return time.perf_counter() - begin


def _loop(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def _seconds(where: Where) -> float:
    trace, policy = HeldTrace(1, CONTAINERS, DAYS), load_policy(None).policy
    return _timed(lambda: compare(trace, policy, VARIANTS, Judging(), where))


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _least(places: Mapping[str, Where]) -> dict[str, float]:
    """By turns, so that a busy moment of the machine does not hit one of them alone."""
    times = [{name: _seconds(where) for name, where in places.items()} for _ in range(TIMES)]
    return {name: min(one[name] for one in times) for name in places}


def _with_ray() -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, cluster_with(Path(folder)) as cluster:
        for part in PARTS:  # each in a new process, which imports Ray itself
            done = subprocess.run(
                [str(cluster.python), "-m", "benchmarks.backtest_parallel", part, cluster.address],
                env=environment(cluster) | {"PYTHONPATH": f"{folder}:{PROJECT}"},
                cwd=cluster.root,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found |= json.loads(done.stdout.splitlines()[-1])
    return found


def _whole(address: str) -> dict[str, float]:
    return _least({"ray": Where(on=address), "one": Where(1), "two": Where(2)})


def _start(address: str) -> dict[str, float]:
    """What Ray takes before and after the work, whatever its size."""
    trace = SyntheticTrace(1, 1, 1)
    given = Comparison(
        policy=load_policy(None).policy,
        variants=VARIANTS,
        judging=Judging(),
        time=TraceTime(trace.begin, trace.end),
        signals=frozenset(trace.signals),
    )
    begin = time.perf_counter()
    with ray_tasks(address, judged, given) as tasks:
        joined = time.perf_counter()
        for wait in [tasks.start([]) for _ in range(tasks.size)]:
            wait()
        ready = time.perf_counter()
    return {"join": joined - begin, "first": ready - joined, "leave": time.perf_counter() - ready}


PARTS = {"whole": _whole, "start": _start}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](sys.argv[2])))

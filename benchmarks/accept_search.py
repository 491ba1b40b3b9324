"""Rounds and jobs to name k bad nodes of n: pairs first, beside bisection and all pairs, in one simulated fabric.

Rounds decide how long a search takes, because the jobs of a round run at the same time. Bisection gets the same terms:
failing parts are halved in parallel, single nodes are padded with a good one, and a node is named after three failed
runs. Mean of several seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from benchmarks.report import Figure, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.acceptance.fleet.search import Search, Trial
from tests.simulation.fabric import Fabric, Fault, certain, fabric, node

_ALL = ((16, 4, 1), (64, 8, 1), (64, 8, 4), (128, 16, 3), (256, 32, 4), (512, 32, 1), (512, 32, 4), (512, 32, 8))
SIZES = sized(_ALL, tiny=((16, 4, 1), (512, 32, 4)))
SEEDS = sized(10, tiny=1)
AGREEING = 3
Cost = tuple[int, int]  # rounds, jobs


def run() -> None:
    rows, ratio, ours = [], 0.0, 0.0
    for nodes, leaf, bad in SIZES:
        worlds = [_world(nodes, leaf, bad, seed) for seed in range(SEEDS)]
        pairs = _mean([_by_pairs(world, seed) for seed, world in enumerate(worlds)])
        halves = _mean([_by_bisection(world) for world in worlds])
        rows.append(
            (
                f"{nodes} nodes, {bad} bad",
                *_cells(pairs),
                *_cells(halves),
                f"{nodes - 1}",
                f"{nodes * (nodes - 1) // 2}",
                "",
            )
        )
        if (nodes, bad) == (512, 4):
            ratio, ours = halves[0] / pairs[0], pairs[0]
    head = ("", "rounds", "jobs", "bisection: rounds", "jobs", "all pairs: rounds", "jobs", "")
    print_table(head, rows)
    print_figure(
        Figure("accept-search", round(ours, 2), "rounds", round(ratio, 3), "rounds of bisection / ours, n=512, k=4")
    )


def _world(nodes: int, leaf: int, bad: int, seed: int) -> Fabric:
    faults = tuple(Fault(node(one)) for one in Random(seed).sample(range(nodes), bad))
    return fabric(nodes, leaf, faults, seed)


def _by_pairs(world: Fabric, seed: int) -> Cost:
    """Until all are named; the rounds after that look for other faults."""
    search = Search(world.nodes, world.leaves, seed)
    wanted = {fault.suspect for fault in world.faults}
    while trials := search.round():
        search.record(world.run(trials))
        found = search.conclusion()
        if certain(found) >= wanted:
            return found.rounds, found.jobs
    raise AssertionError("not all bad nodes were named")


def _by_bisection(world: Fabric) -> Cost:
    rounds, jobs = 0, 0
    numbers = iter(range(1_000_000))
    failing, good = [world.nodes], list[str]()
    failures: dict[str, int] = {}
    while failing:
        parts = [half for part in failing for half in _halves(part)] if rounds else list(failing)
        padding = iter(good)
        trials = [_trial(part, padding, numbers) for part in parts]
        results = world.run(tuple(trials))
        rounds, jobs = rounds + 1, jobs + len(trials)
        failing = []
        for part, result in zip(parts, results, strict=True):
            if result.passed:
                good += [one for one in part if one not in good]
            elif len(part) > 1:
                failing.append(part)
            else:
                failures[part[0]] = failures.get(part[0], 0) + 1
                failing += [part] if failures[part[0]] < AGREEING else []
    if {name for name, count in failures.items() if count == AGREEING} != {
        one.suspect.names[0] for one in world.faults
    }:
        raise AssertionError("bisection did not name the bad nodes")
    return rounds, jobs


def _halves(part: tuple[str, ...]) -> list[tuple[str, ...]]:
    middle = (len(part) + 1) // 2
    return [half for half in (part[:middle], part[middle:]) if half]


def _trial(part: tuple[str, ...], padding: Iterator[str], numbers: Iterator[int]) -> Trial:
    return Trial(next(numbers), part if len(part) > 1 else (*part, next(padding)), "bisection")


def _mean(costs: list[Cost]) -> tuple[float, float]:
    return sum(one[0] for one in costs) / len(costs), sum(one[1] for one in costs) / len(costs)


def _cells(cost: tuple[float, float]) -> tuple[str, str]:
    return f"{cost[0]:.1f}", f"{cost[1]:.0f}"

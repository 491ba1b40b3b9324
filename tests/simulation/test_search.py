"""The bad-node search in a simulated fabric: a certain name is never wrong, persistent faults are found, in few rounds.

Faults are planted at random: nodes, links, switches, persistent and intermittent, also together; trials that cannot be
run. A failure names its seed; to repeat it, call `planted` with it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from gpukeeper.acceptance.fleet.search import ROUNDS, Conclusion
from tests.simulation.fabric import Fabric, Fault, certain, fabric, link, node, searched, suspected, switch
from tests.simulation.seeds import failing_with

pytestmark = pytest.mark.slow

Plant = Callable[[Random, int, int], tuple[Fault, ...]]
SCOPES = ("uplink", "between", "inside", "all")


def bad_nodes(count: int, rate: float = 1.0) -> Plant:
    return lambda random, nodes, _: tuple(Fault(node(index), rate) for index in random.sample(range(nodes), count))


def bad_links(count: int) -> Plant:
    return lambda random, nodes, _: tuple(Fault(link(*random.sample(range(nodes), 2))) for _ in range(count))


def bad_switch(scope: str) -> Plant:
    def plant(random: Random, nodes: int, leaf: int) -> tuple[Fault, ...]:
        leaves = random.sample(range(nodes // leaf), 2 if scope == "between" else 1)
        return (Fault(switch(*leaves, scope=scope)),)

    return plant


def a_mixture(random: Random, nodes: int, leaf: int) -> tuple[Fault, ...]:
    count = random.randrange(max(2, nodes // 12))
    faults = [Fault(node(one), random.choice((1, 1, 0.7, 0.5, 0.3, 0.1))) for one in random.sample(range(nodes), count)]
    faults += [Fault(link(*random.sample(range(nodes), 2)), random.choice((1, 1, 0.5)))] * random.randrange(2)
    if random.random() < 0.4 and nodes // leaf > 2:
        faults += bad_switch(random.choice(SCOPES))(random, nodes, leaf)
    return tuple(faults)


def half_intermittent(random: Random, nodes: int, _: int) -> tuple[Fault, ...]:
    return tuple(Fault(node(one), random.choice((0.3, 0.5, 0.7))) for one in random.sample(range(nodes), nodes // 2))


def planted(plant: Plant, nodes: int, leaf: int, seed: int, not_run: float = 0.0) -> tuple[Fabric, Conclusion]:
    world = fabric(nodes, leaf, plant(Random(seed), nodes, leaf), seed, not_run=not_run)
    return world, searched(world, seed)


def check_never_wrong(world: Fabric, found: Conclusion) -> None:
    assert certain(found) <= {fault.suspect for fault in world.faults}
    assert found.rounds <= ROUNDS
    failed = {number for one in (*found.nodes, *found.links, *found.switches) for number in one.trials}
    assert failed <= {trial.number for trial in world.trials}
    assert all(len(one.trials) >= 3 for one in (*found.nodes, *found.links, *found.switches))


def check_nothing_is_lost(world: Fabric, found: Conclusion) -> None:
    """A persistent fault is named, or among the undecided, or it is said that its nodes were not tested."""
    for fault in world.faults:
        if fault.rate < 1 or fault.suspect in certain(found) | suspected(found):
            continue
        bad = {name for one in certain(found) for name in one.names}
        assert found.limits or not bad.isdisjoint(fault.suspect.names), fault


MIXED = [
    (a_mixture, 16, 4),
    (a_mixture, 9, 3),
    (a_mixture, 48, 8),
    (half_intermittent, 8, 4),
    (half_intermittent, 6, 6),
]


@pytest.mark.parametrize(("plant", "nodes", "leaf"), MIXED)
def test_a_certain_name_is_never_wrong(plant: Plant, nodes: int, leaf: int) -> None:
    for seed in range(60):
        with failing_with(seed):
            world, found = planted(plant, nodes, leaf, seed, not_run=0.1 if seed % 3 == 0 else 0.0)
            check_never_wrong(world, found)
            check_nothing_is_lost(world, found)


PERSISTENT = [
    (bad_nodes(1), 4, 4, 6),
    (bad_nodes(1), 9, 3, 12),
    (bad_nodes(3), 64, 8, 10),
    (bad_links(1), 64, 8, 40),
    (bad_switch("uplink"), 64, 8, 12),
    (bad_switch("between"), 64, 8, 30),
    (bad_switch("inside"), 64, 8, 20),
]


@pytest.mark.parametrize(("plant", "nodes", "leaf", "rounds"), PERSISTENT)
def test_persistent_faults_are_named(plant: Plant, nodes: int, leaf: int, rounds: int) -> None:
    for seed in range(12):
        with failing_with(seed):
            world, found = planted(plant, nodes, leaf, seed)
            assert certain(found) == {fault.suspect for fault in world.faults}
            assert found.rounds <= rounds
            assert found.finished


@pytest.mark.parametrize("bad", [1, 4, 8])
def test_512_nodes_need_few_rounds(bad: int) -> None:
    for seed in range(6):
        with failing_with(seed):
            world, found = planted(bad_nodes(bad), 512, 32, seed)
            assert certain(found) == {fault.suspect for fault in world.faults}
            assert not found.undecided
            assert found.rounds <= 9
            assert found.jobs < 700


def test_512_nodes_with_a_mixture() -> None:
    for seed in range(3):
        with failing_with(seed):
            check_never_wrong(*planted(a_mixture, 512, 32, seed))


def test_a_whole_switch_is_not_told_apart_from_all_its_nodes() -> None:
    _, found = planted(bad_switch("all"), 24, 6, 1)
    assert certain(found) == set()
    assert any(one.kind == "switch" for group in found.undecided for one in group.suspects[:1])


def test_a_fault_that_needs_many_nodes_is_a_group_that_is_undecided() -> None:
    world = fabric(16, 4, (Fault(node(5), 1.0, size=6),), 1)
    found = searched(world, 1)
    assert certain(found) == set()
    assert node(5) in suspected(found)
    assert "fail as a group" in found.undecided[0].reason

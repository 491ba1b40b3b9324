"""A simulated fabric with planted faults, for the bad-node search: which trials fail. Healthy parts never fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from gpukeeper.acceptance.fleet.evidence import Evidence
from gpukeeper.acceptance.fleet.search import Conclusion, Outcome, Search, Suspect, Trial


@dataclass(frozen=True)
class Fault:
    """`rate`: how often it shows. `size`: only in trials of at least so many nodes."""

    suspect: Suspect
    rate: float = 1.0
    size: int = 2


@dataclass
class Fabric:
    nodes: tuple[str, ...]
    leaves: dict[str, str]
    faults: tuple[Fault, ...]
    random: Random
    not_run: float = 0.0  # how often a trial cannot be run
    trials: list[Trial] = field(default_factory=list)

    def run(self, trials: tuple[Trial, ...]) -> list[Outcome]:
        used = [node for trial in trials for node in trial.nodes]
        assert len(used) == len(set(used)), "the trials of a round share a node"
        assert all(len(trial.nodes) > 1 for trial in trials)
        self.trials += trials
        return [Outcome(trial.number, self._result(trial)) for trial in trials]

    def _result(self, trial: Trial) -> bool | None:
        if self.random.random() < self.not_run:
            return None
        return not any(self._shows(fault, trial) for fault in self.faults)

    def _shows(self, fault: Fault, trial: Trial) -> bool:
        if len(trial.nodes) < fault.size or self.random.random() >= fault.rate:
            return False
        if fault.suspect.kind == "switch":
            return fault.suspect in Evidence(self.nodes, self.leaves).switches(trial.nodes)
        return set(fault.suspect.names) <= set(trial.nodes)


def fabric(count: int, leaf: int, faults: tuple[Fault, ...], seed: int, *, not_run: float = 0.0) -> Fabric:
    """`count` nodes, `leaf` of them on each leaf."""
    nodes = tuple(f"n{index:03}" for index in range(count))
    leaves = {node: f"l{index // leaf:02}" for index, node in enumerate(nodes)}
    return Fabric(nodes, leaves, faults, Random(seed), not_run)


def searched(world: Fabric, seed: int, **options: bool | int) -> Conclusion:
    search = Search(world.nodes, world.leaves, seed, **options)  # type: ignore[arg-type]
    while trials := search.round():
        search.record(world.run(trials))
    return search.conclusion()


def node(index: int) -> Suspect:
    return Suspect("node", (f"n{index:03}",))


def link(first: int, second: int) -> Suspect:
    low, high = sorted((first, second))
    return Suspect("link", (f"n{low:03}", f"n{high:03}"))


def switch(*leaves: int, scope: str) -> Suspect:
    return Suspect("switch", tuple(f"l{leaf:02}" for leaf in sorted(leaves)), scope)


def certain(conclusion: Conclusion) -> set[Suspect]:
    return {one.suspect for one in (*conclusion.nodes, *conclusion.links, *conclusion.switches)}


def suspected(conclusion: Conclusion) -> set[Suspect]:
    return {one for group in conclusion.undecided for one in group.suspects}

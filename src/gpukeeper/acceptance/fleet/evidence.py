"""All trials of a search and their outcomes, counted by what each of them used: nodes, links, switches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from gpukeeper.acceptance.fleet.trials import Outcome, Suspect, Trial

Pair = tuple[str, str]


class Evidence:
    """Leaves are optional: a node without a leaf has no switch that could be blamed."""

    def __init__(self, nodes: Sequence[str], leaves: Mapping[str, str]) -> None:
        self.nodes = tuple(nodes)
        self.leaves = {node: leaves.get(node, "") for node in nodes}
        self.trials: dict[int, Trial] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.failed_pairs: list[Trial] = []
        self.passes: Counter[Suspect] = Counter()
        self.passed_groups: list[frozenset[str]] = []
        self.partners: dict[str, Counter[str]] = defaultdict(Counter)  # of pairs that were run
        self.pairs: dict[Pair, list[bool]] = defaultdict(list)
        self.not_run: Counter[str] = Counter()
        self._runs: Counter[str] = Counter()
        self._fails: Counter[str] = Counter()
        self._passed: dict[str, set[str]] = defaultdict(set)
        self._failed: dict[str, set[str]] = defaultdict(set)
        self._bit = {node: 1 << index for index, node in enumerate(self.nodes)}
        self._covered: dict[str, int] = dict(self._bit)

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self.trials[trial.number] = trial
        self.outcomes[trial.number] = outcome
        if outcome.passed is None:
            self.not_run.update(trial.nodes)
            return
        if len(trial.nodes) == 2:
            first, second = pair = pair_of(*trial.nodes)
            self.pairs[pair].append(outcome.passed)
            self._count_pair(first, second, outcome.passed)
            self._count_pair(second, first, outcome.passed)
            if not outcome.passed:
                self.failed_pairs.append(trial)
        if outcome.passed:
            self._count(trial)

    def _count_pair(self, node: str, partner: str, passed: bool) -> None:
        self.partners[node][partner] += 1
        self._runs[node] += 1
        self._fails[node] += not passed
        (self._passed if passed else self._failed)[node].add(partner)

    def _count(self, trial: Trial) -> None:
        for node in trial.nodes:
            self.passes[Suspect("node", (node,))] += 1
        self.passes.update(self.switches(trial.nodes))
        if len(trial.nodes) == 2:
            self.passes[Suspect("link", pair_of(*trial.nodes))] += 1
        else:
            self.passed_groups.append(frozenset(trial.nodes))
        mask = self.mask(trial.nodes)
        for node in trial.nodes:
            self._covered[node] |= mask

    def switches(self, nodes: Iterable[str]) -> list[Suspect]:
        """The switches that traffic between these nodes can use."""
        counts = Counter(self.leaves[node] for node in nodes)
        named = sorted(leaf for leaf in counts if leaf)
        found = [Suspect("switch", (leaf,), "inside") for leaf in named if counts[leaf] > 1]
        found += [Suspect("switch", (leaf,), "all") for leaf in named]
        if len(counts) > 1:
            found += [Suspect("switch", (leaf,), "uplink") for leaf in named]
            found += [Suspect("switch", pair, "between") for pair in combinations(named, 2)]
        return found

    def candidates(self, trial: Trial) -> list[Suspect]:
        """Everything that can be at fault when this pair fails."""
        nodes = [Suspect("node", (node,)) for node in trial.nodes]
        return [*nodes, Suspect("link", pair_of(*trial.nodes)), *self.switches(trial.nodes)]

    def passes_of(self, suspect: Suspect) -> int:
        if suspect.kind != "link":
            return self.passes[suspect]
        first, second = suspect.names
        return self.passes[suspect] + sum(first in group and second in group for group in self.passed_groups)

    def runs(self, node: str) -> int:
        """In pairs."""
        return self._runs[node]

    def fails(self, node: str) -> int:
        return self._fails[node]

    def passed_partners(self, node: str) -> set[str]:
        return self._passed[node]

    def failed_partners(self, node: str) -> set[str]:
        return self._failed[node]

    def results(self, first: str, second: str) -> list[bool]:
        return self.pairs.get(pair_of(first, second), [])

    def mask(self, nodes: Iterable[str]) -> int:
        """A set of nodes as bits."""
        return sum(self._bit[node] for node in nodes)

    def covered(self, node: str) -> int:
        """Itself, and the nodes that were in a passing trial together with it."""
        return self._covered[node]


def pair_of(first: str, second: str) -> Pair:
    return (first, second) if first < second else (second, first)

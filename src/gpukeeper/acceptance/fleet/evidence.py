"""Trials of a bad-node search: which fault explains the failed ones, and which pairs to run next. Pure.

A pair fails because of one of its nodes, of the link between them, or of a switch on the way. A fault can be
intermittent: then it also passes. A fault is certain if every explanation that is about as good has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import inf, log

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """A test that runs on these nodes together. The trials of one round share no node."""

    number: int
    nodes: tuple[str, ...]
    why: str


class Outcome(msgspec.Struct, frozen=True):
    """`passed` is None when the trial could not be run: this says nothing about its nodes."""

    number: int
    passed: bool | None
    evidence: str = ""


class Suspect(msgspec.Struct, frozen=True, order=True):
    """What can be at fault. `kind`: node, link (between two nodes), or switch; `names` has the node, both ends of the
    link, or for a switch the leaf, or the two leaves between which it fails. A node includes its cable and its port."""

    kind: str
    names: tuple[str, ...]
    scope: str = ""  # of a switch: all, uplink, inside, between

    def __str__(self) -> str:
        if self.kind == "node":
            return f"node {self.names[0]}"
        if self.kind == "link":
            return f"the link between {self.names[0]} and {self.names[1]}"
        words = {
            "all": "the switch of leaf {}",
            "uplink": "the uplink of leaf {}",
            "inside": "the switch of leaf {}, between its own nodes",
        }
        if self.scope == "between":
            return f"the switches between leaf {self.names[0]} and leaf {self.names[1]}"
        return words[self.scope].replace("{}", self.names[0])


class Named(msgspec.Struct, frozen=True):
    """A fault that is certain, with the numbers of the failed trials that show it."""

    suspect: Suspect
    reason: str
    trials: tuple[int, ...]


class Undecided(msgspec.Struct, frozen=True):
    """Failures that have several explanations, the most likely first; or nodes that nothing is known about."""

    suspects: tuple[Suspect, ...]
    reason: str
    trials: tuple[int, ...] = ()


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[Named, ...] = ()
    links: tuple[Named, ...] = ()
    switches: tuple[Named, ...] = ()
    undecided: tuple[Undecided, ...] = ()
    jobs: int = 0  # trials that were run
    rounds: int = 0
    finished: bool = False  # False: there are more rounds to run, or the limit of rounds was reached
    limits: tuple[str, ...] = ()  # what was not tested, as sentences


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


CERTAIN = log(1e5)
CLOSE = log(1e5)  # suspects within this of the best explanation are not excluded
RARE_LINK = 0.005
RARE_SWITCH = 0.01
RARE_NODE = 0.02  # at least; more when more pairs fail
INTERMITTENT = 0.2  # of the faults
AGREEING = 3  # runs that must have failed before a fault is certain


# An explanation is a set of faults that together account for every failed pair. Its cost is the negative logarithm of
# its likelihood: how rare such faults are, and how well the passes of each fit. A fault is certain when every
# explanation without it is at least 100,000 times less likely; and, for links and switches, when their own pairs were
# repeated and nodes on both sides passed with other partners.
@dataclass(frozen=True)
class Problem:
    """The failed pairs that nothing certain explains yet: masks have one bit for each of them."""

    trials: tuple[Trial, ...]
    masks: Mapping[Suspect, int]
    evidence: Evidence
    share: float  # of nodes that are expected to be bad

    @property
    def everything(self) -> int:
        return (1 << len(self.trials)) - 1

    def cost(self, suspect: Suspect, fails: int) -> float:
        passes = self.evidence.passes_of(suspect)
        rare = {"node": self.share, "link": RARE_LINK}.get(suspect.kind, RARE_SWITCH)
        return -log(rare) - log(_fit(fails, passes)) - (log(INTERMITTENT) if passes else 0.0)


@lru_cache(maxsize=65536)
def _fit(fails: int, passes: int) -> float:
    """The likelihood of these counts at the rate of failure that fits best."""
    if not passes or not fails:
        return 1.0
    rate = fails / (fails + passes)
    return max(float(rate**fails * (1 - rate) ** passes), 1e-300)


def problem_of(evidence: Evidence, certain: Iterable[Suspect], ignored: Set[int] = frozenset()) -> Problem:
    known = set(certain)
    open_trials = tuple(
        trial
        for trial in evidence.failed_pairs
        if trial.number not in ignored and known.isdisjoint(evidence.candidates(trial))
    )
    masks: dict[Suspect, int] = {}
    for index, trial in enumerate(open_trials):
        for suspect in evidence.candidates(trial):
            masks[suspect] = masks.get(suspect, 0) | 1 << index
    share = _matching(evidence.failed_pairs) / max(len(evidence.nodes), 1)
    return Problem(open_trials, masks, evidence, min(max(RARE_NODE, share), 0.5))


def _matching(trials: Sequence[Trial]) -> int:
    """Failed pairs without a common node: so many faults there can be."""
    used: set[str] = set()
    for trial in trials:
        if used.isdisjoint(trial.nodes):
            used |= set(trial.nodes)
    return len(used) // 2


def explanation(problem: Problem) -> list[Suspect]:
    """A likely one, greedy: the suspect that costs least for each failed pair it accounts for, again and again."""
    left, found = problem.everything, list[Suspect]()
    while left:
        best = min(
            (suspect for suspect, mask in problem.masks.items() if mask & left),
            key=lambda suspect: (_price(problem, suspect, left), suspect),
        )
        found.append(best)
        left &= ~problem.masks[best]
    return found


def _price(problem: Problem, suspect: Suspect, left: int) -> float:
    fails = (problem.masks[suspect] & left).bit_count()
    return problem.cost(suspect, fails) / fails


def certain_in(problem: Problem) -> list[Suspect]:
    """The suspects without which the failures have no likely explanation, and whose own evidence is sufficient."""
    best = explanation(problem)
    return [one for one in best if sufficient(problem, one) and without(problem, best, one) >= CERTAIN]


def without(problem: Problem, best: Sequence[Suspect], excluded: Suspect) -> float:
    """How much less likely the failures of `excluded` are when it is not at fault, as a logarithm: the cheapest
    replacement, less its own cost, less what other suspects cost that the replacement makes unnecessary."""
    own = problem.masks[excluded]
    free = 0
    for one in best:
        if one != excluded:
            free |= problem.masks[one]
    others = _distinct({one: mask for one, mask in problem.masks.items() if mask & own and one != excluded}, problem)
    saved = {one: _saving(problem, best, excluded, one) for one in others}
    paid = problem.cost(excluded, own.bit_count())
    limit = paid + CERTAIN
    # What others already explain is free, unless the pair was also run with the excluded one alone.
    return _cheapest(problem, own & ~free, others, saved, limit) - paid


def _distinct(masks: Mapping[Suspect, int], problem: Problem) -> dict[Suspect, int]:
    """Of suspects that account for the same failures only the cheapest."""
    cheapest: dict[int, tuple[float, Suspect]] = {}
    for suspect, mask in masks.items():
        price = problem.cost(suspect, mask.bit_count())
        if mask not in cheapest or (price, suspect) < cheapest[mask]:
            cheapest[mask] = (price, suspect)
    return {suspect: mask for mask, (_, suspect) in cheapest.items()}


def _saving(problem: Problem, best: Sequence[Suspect], excluded: Suspect, added: Suspect) -> float:
    saved = 0.0
    for one in best:
        if one not in (excluded, added) and not problem.masks[one] & ~problem.masks[added]:
            saved += problem.cost(one, problem.masks[one].bit_count())
    return saved


def _cheapest(
    problem: Problem, left: int, masks: Mapping[Suspect, int], saved: Mapping[Suspect, float], limit: float
) -> float:
    """The cost of the cheapest set that accounts for `left`; above `limit` it is only known to be above."""
    if not left:
        return 0.0
    if limit <= 0:
        return inf
    lowest = left & -left
    found = inf
    for suspect, mask in masks.items():
        if mask & lowest:
            price = max(problem.cost(suspect, (mask & left).bit_count()) - saved[suspect], 0.0)
            if price < min(limit, found):
                rest = _cheapest(problem, left & ~mask, masks, saved, min(limit, found) - price)
                found = min(found, price + rest)
    return found


def sufficient(problem: Problem, suspect: Suspect) -> bool:
    """At least three failed runs that agree; for a link or a switch, repeated, with proven nodes on both sides."""
    evidence = problem.evidence
    trials = [trial for index, trial in enumerate(problem.trials) if problem.masks[suspect] >> index & 1]
    if suspect.kind == "node":
        return len({partner_in(trial, suspect.names[0]) for trial in trials}) >= AGREEING
    repeated = [trial for trial in trials if evidence.results(trial.nodes[0], trial.nodes[1]).count(False) > 1]
    if suspect.kind == "link":
        return len(trials) >= AGREEING and all(_proven(evidence, node, suspect) for node in suspect.names)
    proven = [trial for trial in repeated if all(_proven(evidence, node, suspect) for node in trial.nodes)]
    return len(trials) >= AGREEING and len({node for trial in proven for node in trial.nodes}) >= 4


def _proven(evidence: Evidence, node: str, suspect: Suspect) -> bool:
    """It passed with at least two partners without using the suspect."""
    partners = evidence.passed_partners(node)
    if suspect.kind == "link":
        return len(partners - set(suspect.names)) > 1
    return len([one for one in partners if suspect not in evidence.switches((node, one))]) > 1


def partner_in(trial: Trial, node: str) -> str:
    return trial.nodes[1] if trial.nodes[0] == node else trial.nodes[0]


def not_excluded(problem: Problem) -> list[tuple[tuple[Suspect, ...], tuple[Trial, ...]]]:
    """For the failed pairs that remain: sets of suspects of which at least one is at fault, the most likely first."""
    groups: list[tuple[tuple[Suspect, ...], tuple[Trial, ...]]] = []
    left = problem.everything
    for chosen in explanation(problem):
        mask = problem.masks[chosen] & left
        left &= ~mask
        trials = tuple(trial for index, trial in enumerate(problem.trials) if mask >> index & 1)
        prices = {
            one: problem.cost(one, (other & mask).bit_count()) / (other & mask).bit_count() * mask.bit_count()
            for one, other in problem.masks.items()
            if other & mask
        }
        limit = min(prices.values()) + CLOSE
        ordered = sorted((price, one) for one, price in prices.items() if price <= limit)
        groups.append((tuple(one for _, one in ordered), trials))
    return groups


Wish = tuple[tuple[str, ...], str]

BOUNDARY = 8  # runs of other pairs across the same two leaves
HOPELESS = 8  # runs of a node that never passed
RUNS_MIN = 2  # of every node
TRIES = 3  # of a node whose trials could not be run


class Retests:
    def __init__(self, evidence: Evidence, repeats: int) -> None:
        self._evidence = evidence
        self._repeats = repeats

    def wishes(self, problem: Problem, bad: Set[str]) -> list[Wish]:
        """Empty: no further pair can add anything."""
        round_ = _Round()
        suspects = self._suspects(problem)
        self._other_leaves(problem, bad, round_)
        self._repeat_pairs(problem, round_)
        self._other_partners(suspects, bad, round_)
        self._boundaries(problem, suspects, bad, round_)
        self._too_few(bad, round_)
        return round_.wishes

    def _suspects(self, problem: Problem) -> list[str]:
        names = {node for trial in problem.trials for node in trial.nodes}
        return sorted(names, key=lambda node: (-self._evidence.fails(node), node))

    def _repeat_pairs(self, problem: Problem, round_: _Round) -> None:
        """A pair whose members pass with others: is it the pair? As often as its members were run with others."""
        for pair in sorted({_pair(trial) for trial in problem.trials}):
            runs = len(self._evidence.results(*pair))
            others = [self._evidence.runs(node) - runs for node in pair]
            alone = len(self._evidence.nodes) == 2
            enough = runs >= (3 if alone else self._repeats)
            if not enough and (
                alone or (runs <= min(others) and all(self._passes_with_others(one, pair) for one in pair))
            ):
                round_.add(pair, "again: both pass with others")

    def _passes_with_others(self, node: str, pair: Pair) -> bool:
        results = [
            result
            for partner in self._evidence.partners[node]
            if partner not in pair
            for result in self._evidence.results(node, partner)
        ]
        return True in results

    def _other_partners(self, suspects: Iterable[str], bad: Set[str], round_: _Round) -> None:
        chosen = list(suspects)
        for node in chosen:
            if round_.has(node) or not self._may_run(node) or self._is_enough(node):
                continue
            partner = self._partner(node, bad, round_)
            if partner is not None:
                round_.add((node, partner), "suspect with another partner")

    def _is_enough(self, node: str) -> bool:
        runs = self._evidence.runs(node)
        return runs >= 2 * self._repeats or (runs >= HOPELESS and not self._evidence.passed_partners(node))

    def _partner(self, node: str, bad: Set[str], round_: _Round) -> str | None:
        """Good ones first. A node that fails only across leaves is tested inside its own."""
        evidence = self._evidence
        leaf = evidence.leaves[node]
        near = [one for one in evidence.passed_partners(node) if evidence.leaves[one] == leaf]
        inside = bool(near) and all(evidence.leaves[one] != leaf for one in evidence.failed_partners(node))

        def order(other: str) -> tuple[bool, int, int, bool, int, str]:
            away = evidence.leaves[other] != leaf
            return (
                inside and away,
                self._tier(other),
                evidence.partners[node][other],
                away,
                evidence.runs(other),
                other,
            )

        free = (
            one
            for one in evidence.nodes
            if one != node and one not in bad and not round_.has(one) and self._may_run(one)
        )
        return min(free, key=order, default=None)

    def _tier(self, node: str) -> int:
        """0: never failed. 1: passed more often than not. 2: the rest."""
        fails, runs = self._evidence.fails(node), self._evidence.runs(node)
        if not runs:
            return 2
        return 0 if not fails else 1 if 2 * fails <= runs else 2

    def _boundaries(self, problem: Problem, suspects: Iterable[str], bad: Set[str], round_: _Round) -> None:
        """A pair failed across two leaves: do other nodes of these leaves pass with each other?"""
        excluded = bad | set(suspects)
        asked: set[Pair] = set()
        for trial in problem.trials:
            pair = _pair(trial)
            leaves = pair_of(self._evidence.leaves[pair[0]], self._evidence.leaves[pair[1]])
            if "" in leaves or leaves in asked or not all(self._passes_with_others(one, pair) for one in pair):
                continue
            asked.add(leaves)
            for _ in range(BOUNDARY - self._across(leaves)):
                self._across_pair(leaves, excluded, round_)

    def _across(self, leaves: Pair) -> int:
        """Runs across these leaves of pairs that did not fail."""
        of = self._evidence.leaves
        pairs = self._evidence.pairs.items()
        return sum(
            len(results) for (one, other), results in pairs if _is_across(of, one, other, leaves) and all(results)
        )

    def _across_pair(self, leaves: Pair, excluded: Set[str], round_: _Round) -> None:
        evidence = self._evidence
        free = [one for one in evidence.nodes if one not in excluded and not round_.has(one) and self._may_run(one)]
        first = [one for one in free if evidence.leaves[one] == leaves[0]]
        second = [one for one in free if evidence.leaves[one] == leaves[1]]
        pairs = ((one, other) for one in first for other in second if one != other)
        pair = min(pairs, key=lambda pair: (len(evidence.results(*pair)), pair), default=None)
        if pair is not None:
            round_.add(pair, f"other nodes across {leaves[0]} and {leaves[1]}")

    def _other_leaves(self, problem: Problem, bad: Set[str], round_: _Round) -> None:
        """An uplink is the likely fault: do its nodes fail with the leaves they were not tested with, too?"""
        evidence = self._evidence
        for uplink in (one for one in explanation(problem) if one.scope == "uplink"):
            (leaf,) = uplink.names
            inside = [one for one in evidence.nodes if evidence.leaves[one] == leaf and one not in bad]
            good = [one for one in evidence.nodes if self._tier(one) == 0 and one not in bad]
            for other in sorted(set(evidence.leaves.values()) - {leaf, ""}):
                of = evidence.leaves
                if not any(_is_across(of, *pair, pair_of(leaf, other)) for pair in evidence.pairs):
                    first = next((one for one in inside if not round_.has(one)), None)
                    second = next((one for one in good if of[one] == other and not round_.has(one)), None)
                    if first is not None and second is not None:
                        round_.add((first, second), f"leaf {leaf} with a leaf it was not tested with")

    def _too_few(self, bad: Set[str], round_: _Round) -> None:
        if len(self._evidence.nodes) < 3:
            return
        for node in self._evidence.nodes:
            if (
                self._evidence.runs(node) < RUNS_MIN
                and not round_.has(node)
                and node not in bad
                and self._may_run(node)
            ):
                partner = self._partner(node, bad, round_)
                if partner is not None:
                    round_.add((node, partner), "it has not run often enough")

    def _may_run(self, node: str) -> bool:
        return self._evidence.not_run[node] < TRIES or self._evidence.runs(node) > self._evidence.not_run[node]


class _Round:
    def __init__(self) -> None:
        self.wishes: list[Wish] = []
        self._used: set[str] = set()

    def has(self, node: str) -> bool:
        return node in self._used

    def add(self, pair: Pair, why: str) -> None:
        if self._used.isdisjoint(pair):
            self._used |= set(pair)
            self.wishes.append((pair, why))


def _is_across(leaves: Mapping[str, str], one: str, other: str, wanted: Pair) -> bool:
    return pair_of(leaves[one], leaves[other]) == wanted


def _pair(trial: Trial) -> Pair:
    return pair_of(trial.nodes[0], trial.nodes[1])

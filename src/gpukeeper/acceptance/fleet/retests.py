"""Which pairs to run next, so that the failures so far get one explanation. Each node at most once in a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from gpukeeper.acceptance.fleet.blame import Problem, explanation
from gpukeeper.acceptance.fleet.evidence import Evidence, Pair, pair_of
from gpukeeper.acceptance.fleet.trials import Trial

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

"""The bad-node search: which node, link or switch fails, from trials on pairs and groups of nodes. Pure.

First pairs, disjoint and in parallel: inside leaves, then across leaves. Every node of a failed pair is a suspect and
is tested with other partners until the failures have one explanation (`blame`). Then groups: each leaf, then all nodes
without a known fault. A group that fails although its pairs passed is bisected (`bisection`).

    search = Search(nodes, leaves, seed)
    while trials := search.round():
        search.record(run(trials))
    search.conclusion()
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

from gpukeeper.acceptance.fleet import bisection, blame, grouping, pairing
from gpukeeper.acceptance.fleet.evidence import Evidence, Pair, pair_of
from gpukeeper.acceptance.fleet.retests import Retests
from gpukeeper.acceptance.fleet.trials import Conclusion, Named, Outcome, Suspect, Trial, Undecided

__all__ = ["Conclusion", "Named", "Outcome", "Search", "Suspect", "Trial", "Undecided"]

ROUNDS = 96
REPEATS = 12  # of one pair, and of one node with others
TRIES = 3  # of a trial that could not be run, or of a group that does not fail again

Wish: TypeAlias = tuple[tuple[str, ...], str]
Steps: TypeAlias = Generator[list[Wish], list[bool | None], None]


class Search:
    """Nodes without an entry in `leaves` have an unknown leaf: no switch is blamed for them."""

    def __init__(
        self,
        nodes: Iterable[str],
        leaves: Mapping[str, str],
        seed: int,
        *,
        groups: bool = True,
        rounds_max: int = ROUNDS,
        repeats: int = REPEATS,
    ) -> None:
        self.evidence = Evidence(sorted(set(nodes)), leaves)
        self._seed = seed
        self._groups = groups
        self._rounds_max = rounds_max
        self._retests = Retests(self.evidence, repeats)
        self._certain: dict[Suspect, Named] = {}
        self._undecided: list[Undecided] = []
        self._limits: list[str] = []
        self._rounds = 0
        self._finished = False
        self._next = 0
        self._steps = self._all()
        self._trials: tuple[Trial, ...] = ()
        self._advance(None)

    def round(self) -> tuple[Trial, ...]:
        """The next trials, to be run in parallel. Empty: done. The same ones until their outcomes are recorded."""
        return self._trials

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """A trial without an outcome counts as one that could not be run."""
        given = {one.number: one for one in outcomes}
        unknown = set(given) - {trial.number for trial in self._trials}
        if unknown:
            raise ValueError(f"no trial of this round has the number {min(unknown)}")
        results: list[bool | None] = []
        for trial in self._trials:
            outcome = given.get(trial.number, Outcome(trial.number, None, "no outcome was reported"))
            self.evidence.add(trial, outcome)
            results.append(outcome.passed)
        self._rounds += 1
        self._advance(results)

    def conclusion(self) -> Conclusion:
        by_kind = {kind: tuple(self._named(kind)) for kind in ("node", "link", "switch")}
        return Conclusion(
            nodes=by_kind["node"],
            links=by_kind["link"],
            switches=by_kind["switch"],
            undecided=(*self._open(), *self._undecided, *self._untested()),
            jobs=sum(one.passed is not None for one in self.evidence.outcomes.values()),
            rounds=self._rounds,
            finished=self._finished,
            limits=tuple(self._limits),
        )

    def _advance(self, results: list[bool | None] | None) -> None:
        if self._rounds >= self._rounds_max:
            self._limits.append(f"the limit of {self._rounds_max} rounds was reached")
            self._trials = ()
            return
        try:
            wishes = next(self._steps) if results is None else self._steps.send(results)
        except StopIteration:
            self._trials, self._finished = (), True
            return
        self._trials = tuple(Trial(self._next + index, nodes, why) for index, (nodes, why) in enumerate(wishes))
        self._next += len(wishes)

    # The steps. Each yields the trials of a round and receives their results.

    def _all(self) -> Steps:
        nodes = self.evidence.nodes
        if len(nodes) < 2:
            return
        pairs = pairing.same_leaf(nodes, self.evidence.leaves, self._seed)
        yield [(pair, "first pairing: inside the leaf") for pair in pairs]
        if len(nodes) > 2:
            pairs = pairing.across_leaves(nodes, self.evidence, self._seed)
            yield [(pair, "second pairing: across leaves") for pair in pairs]
        yield from self._confirm()
        if self._groups:
            yield from self._in_groups()

    def _confirm(self) -> Steps:
        """Test suspects with other partners until every failed pair is explained, or no trial can add anything."""
        while True:
            problem = self._name_certain()
            wishes = self._retests.wishes(problem, self._bad())
            if not wishes:
                return
            yield wishes

    def _name_certain(self) -> blame.Problem:
        while True:
            problem = blame.problem_of(self.evidence, self._certain)
            found = blame.certain_in(problem)
            if not found:
                return problem
            for suspect in found:
                self._certain[suspect] = self._as_named(problem, suspect)

    def _in_groups(self) -> Steps:
        """Leaves, then everything that has no known fault, until all nodes have passed together with all others."""
        seen: set[tuple[str, ...]] = set()
        while True:
            suspects = self._suspected()
            groups = [
                one
                for one in grouping.groups(self.evidence, self._certain, suspects, racks=not seen)
                if one not in seen
            ]
            if not groups:
                break
            seen |= set(groups)
            results = yield [(one, grouping.why(one, self.evidence)) for one in groups]
            for group, passed in zip(groups, results, strict=True):
                if passed is not True:
                    yield from self._in_group(group, passed)

        left_out = sorted(self._suspected() - self._bad())
        if left_out:
            names = ", ".join(left_out[:8]) + (", …" if len(left_out) > 8 else "")
            self._limits.append(f"{len(left_out)} suspects were not tested in groups: {names}")

    def _in_group(self, group: tuple[str, ...], passed: bool | None) -> Steps:
        again = bisection.repeated(group, passed, TRIES)
        failed = yield from again
        if failed is None:
            self._limits.append(f"a group of {len(group)} nodes could not be run")
            return
        if not failed:
            return
        found = yield from bisection.bisect(group, self.evidence, self._good(group))
        before = len(self._certain)
        yield from self._confirm()
        if len(self._certain) == before and not (found.pair and self._is_open(found.pair)):
            self._undecided.append(found.undecided(self.evidence))

    # What is known

    def _bad(self) -> set[str]:
        return {one.names[0] for one in self._certain if one.kind == "node"}

    def _suspected(self) -> set[str]:
        """Nodes that a group must not contain: bad ones, and those of failures that are not explained."""
        problem = blame.problem_of(self.evidence, self._certain)
        found = self._bad() | {node for trial in problem.trials for node in trial.nodes}
        return found | {one.names[0] for group in self._undecided for one in group.suspects if one.kind == "node"}

    def _good(self, group: Sequence[str]) -> list[str]:
        """Nodes outside the group that never failed: padding."""
        suspects = self._suspected() | set(group)
        return [node for node in self.evidence.nodes if node not in suspects and self.evidence.passed_partners(node)]

    def _is_open(self, pair: Pair) -> bool:
        problem = blame.problem_of(self.evidence, self._certain)
        return any(pair_of(trial.nodes[0], trial.nodes[1]) == pair for trial in problem.trials)

    def _named(self, kind: str) -> list[Named]:
        return sorted((one for one in self._certain.values() if one.suspect.kind == kind), key=lambda one: one.suspect)

    def _as_named(self, problem: blame.Problem, suspect: Suspect) -> Named:
        mask = problem.masks[suspect]
        trials = tuple(trial for index, trial in enumerate(problem.trials) if mask >> index & 1)
        passes = self.evidence.passes_of(suspect)
        return Named(suspect, _reason(suspect, trials, passes), tuple(one.number for one in trials))

    def _open(self) -> list[Undecided]:
        problem = blame.problem_of(self.evidence, self._certain)
        found = []
        for suspects, trials in blame.not_excluded(problem):
            found.append(Undecided(suspects, _why_open(suspects, trials), tuple(one.number for one in trials)))
        return found

    def _untested(self) -> list[Undecided]:
        silent = [node for node in self.evidence.nodes if not self.evidence.runs(node)]
        return [
            Undecided((Suspect("node", (node,)),), f"node {node}: no trial with it could be run") for node in silent
        ]


def _reason(suspect: Suspect, trials: Sequence[Trial], passes: int) -> str:
    runs = f"{len(trials)} failed" + (f" and {passes} passed" if passes else ", none passed")
    if suspect.kind == "node":
        partners = {node for trial in trials for node in trial.nodes} - set(suspect.names)
        return f"{suspect} failed with {len(partners)} different partners that passed with others ({runs})"
    pairs = {pair_of(trial.nodes[0], trial.nodes[1]) for trial in trials}
    if suspect.kind == "link":
        return f"{suspect} failed again and again ({runs}); both nodes passed with others"
    return f"{suspect}: {len(pairs)} pairs of nodes failed across it ({runs}); nodes on both sides passed with others"


def _why_open(suspects: Sequence[Suspect], trials: Sequence[Trial]) -> str:
    names = sorted({node for trial in trials for node in trial.nodes})
    if len(names) == 2:
        return f"{names[0]} and {names[1]} failed only with each other: one of them, or what connects them"
    words = ", ".join(str(one) for one in suspects[:4])
    more = f" and {len(suspects) - 4} more" if len(suspects) > 4 else ""
    return f"{len(trials)} failed pairs of {len(names)} nodes have several possible causes: {words}{more}"

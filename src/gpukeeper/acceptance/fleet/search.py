"""The bad-node search: which node, link or switch fails, from trials on pairs and groups of nodes. Pure.

First pairs, disjoint and in parallel: inside leaves, then across leaves. Every node of a failed pair is tested with
other partners until the failures have one explanation (evidence.py). Then groups, and of a failed group the smallest
part that still fails. Seeded: the same nodes, leaves and seed give the same pairs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import TypeAlias

from gpukeeper.acceptance.fleet.evidence import (
    Conclusion,
    Evidence,
    Named,
    Outcome,
    Pair,
    Problem,
    Retests,
    Suspect,
    Trial,
    Undecided,
    certain_in,
    not_excluded,
    pair_of,
    problem_of,
)


def pairs_inside_leaves(nodes: Sequence[str], leaves: Mapping[str, str], seed: int) -> list[Pair]:
    """Disjoint pairs inside leaves. The odd nodes of the leaves are paired with each other; one can remain."""
    odd: list[str] = []
    pairs: list[Pair] = []
    for leaf in sorted({leaves[node] for node in nodes}):
        members = shuffled([node for node in nodes if leaves[node] == leaf], f"{seed} leaf")
        pairs += zip(members[::2], members[1::2], strict=False)
        odd += members[-1:] if len(members) % 2 else []
    return pairs + list(zip(odd[::2], odd[1::2], strict=False))


def pairs_across_leaves(nodes: Sequence[str], evidence: Evidence, seed: int) -> list[Pair]:
    """Disjoint pairs, each across two leaves as far as possible, and none that has been run before."""
    first = [node for node in nodes if not evidence.runs(node)]  # it was odd before: it must not be odd again
    by_leaf: dict[str, list[str]] = {}
    for node in nodes:
        by_leaf.setdefault(evidence.leaves[node], []).append(node)
    order = list(first)
    # One node of each leaf, the leaves in a new order each time: the pairs of a leaf lead to many other leaves.
    for turn in range(max(map(len, by_leaf.values()), default=0)):
        layer = [members[turn] for members in by_leaf.values() if turn < len(members)]
        order += shuffled(layer, f"{seed} {turn}")
    return matched(list(dict.fromkeys(order)), evidence)


def shuffled(nodes: Iterable[str], seed: str) -> list[str]:
    return sorted(nodes, key=lambda node: (blake2b(f"{seed} {node}".encode(), digest_size=8).digest(), node))


def matched(order: Sequence[str], evidence: Evidence) -> list[Pair]:
    """Greedy: each node with the first later one that suits it best: never tried, and in another leaf."""
    free = dict.fromkeys(order)
    pairs: list[Pair] = []
    while len(free) > 1:
        node = next(iter(free))
        del free[node]
        partner = _best_partner(node, free, evidence)
        del free[partner]
        pairs.append((node, partner))
    return pairs


def _best_partner(node: str, free: Iterable[str], evidence: Evidence) -> str:
    best, best_score = "", 4
    for other in free:
        tried = bool(evidence.results(node, other))
        near = evidence.leaves[node] == evidence.leaves[other]
        score = 2 * tried + near
        if score < best_score:
            best, best_score = other, score
        if not score:
            break
    return best


RACK_MIN = 3  # a smaller leaf has had its only pair


def groups_to_try(
    evidence: Evidence, certain: Iterable[Suspect], excluded: Set[str], *, racks: bool
) -> list[tuple[str, ...]]:
    """Disjoint groups for one round. `racks`: one for each leaf, where that is not the same as all nodes."""
    nodes = [node for node in evidence.nodes if node not in excluded]
    apart = _conflicts(evidence, certain)
    leaves = sorted({evidence.leaves[node] for node in nodes} - {""})
    if racks and len(leaves) > 1:
        members = [[node for node in nodes if evidence.leaves[node] == leaf] for leaf in leaves]
        found = [
            tuple(one)
            for one in members
            if len(one) >= RACK_MIN and not any(apart[node] & evidence.mask(one) for node in one)
        ]
        if found:
            return found
    return _covering(nodes, apart, evidence)


def _conflicts(evidence: Evidence, faults: Iterable[Suspect]) -> dict[str, int]:
    """For each node: those that it must not be in a group with, because of a known fault between them."""
    apart = dict.fromkeys(evidence.nodes, 0)
    everything = evidence.mask(evidence.nodes)
    for fault in faults:
        if fault.kind == "link":
            first, second = fault.names
            apart[first] |= evidence.mask([second])
            apart[second] |= evidence.mask([first])
        if fault.kind == "switch":
            sides = [[node for node in evidence.nodes if evidence.leaves[node] == leaf] for leaf in fault.names]
            inside = evidence.mask(sides[0])
            others = {"uplink": everything & ~inside, "inside": inside, "all": everything}
            for here, there in ((sides[0], sides[-1]), (sides[-1], sides[0])):
                for node in here:
                    apart[node] |= others.get(fault.scope, evidence.mask(there))
            if fault.scope in ("uplink", "all"):
                for node in evidence.nodes:
                    apart[node] |= 0 if evidence.leaves[node] == fault.names[0] else inside
    return apart


def _covering(nodes: list[str], apart: dict[str, int], evidence: Evidence) -> list[tuple[str, ...]]:
    """As large as possible, each with at least two nodes that have not been together."""
    found: list[tuple[str, ...]] = []
    left = list(nodes)
    while True:
        free = evidence.mask(left)
        missing = {node: free & ~evidence.covered(node) & ~apart[node] for node in left}
        start = max(left, key=lambda node: (missing[node].bit_count(), node), default=None)
        if start is None or not missing[start]:
            return found
        group, members = evidence.mask([start]), [start]
        new = [node for node in left if evidence.mask([node]) & missing[start]]
        for node in dict.fromkeys((*new, *sorted(left, key=lambda one: (-missing[one].bit_count(), one)))):
            if not apart[node] & group and node != start:
                group |= evidence.mask([node])
                members.append(node)
        found.append(tuple(sorted(members)))
        left = [node for node in left if not evidence.mask([node]) & group]


def why_group(group: tuple[str, ...], evidence: Evidence) -> str:
    leaves = {evidence.leaves[node] for node in group}
    return f"leaf {min(leaves)} as one group" if len(leaves) == 1 else f"{len(leaves)} leaves as one group"


Part: TypeAlias = tuple[str, ...]
PartWish: TypeAlias = tuple[Part, str]
Asked: TypeAlias = Generator[list[PartWish], list[bool | None], bool | None]


@dataclass(frozen=True)
class FailingPart:
    """`pair`: two nodes that fail together. Otherwise `part`, which could not be made smaller, and why."""

    part: Part
    pair: Pair | None = None
    sides: tuple[Part, Part] | None = None
    reason: str = ""

    def undecided(self, evidence: Evidence) -> Undecided:
        nodes = tuple(Suspect("node", (node,)) for node in self.part)
        return Undecided((*nodes, *evidence.switches(self.part)), self.reason)


BisectionSteps: TypeAlias = Generator[list[PartWish], list[bool | None], FailingPart]


def repeated(group: Part, passed: bool | None, tries: int) -> Asked:
    """Does it fail again? At most `tries` runs. None: it could not be run."""
    results = [passed]
    while len(results) < tries and False not in results[1:]:
        (again,) = yield [(group, "group: again")]
        results.append(again)
    if False in results:
        return True
    return None if True not in results else False


# A failed part holds a fault. A passed part proves less, because a fault can be intermittent, or need more nodes or
# the other part to show; so parts that pass are repeated, then mixed across the boundary, then padded to the full
# size.
def bisect(group: Part, evidence: Evidence, padding: Sequence[str]) -> BisectionSteps:
    """Leaves stay together as long as possible, so that the parts follow the wiring."""
    part = tuple(sorted(group, key=lambda node: (evidence.leaves[node], node)))
    while len(part) > 2:
        first, second = part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]
        smaller = yield from _halves(first, second, padding)
        if smaller is not None:
            part = smaller
            if len(part) == 1:
                return FailingPart(part, _with_padding(part[0], padding), reason=_only_as_group(group))
            continue
        sides = yield from _mixed(first, second)
        if sides is not None:
            return (yield from _boundary(*sides))
        padded = yield from _padded(first, second, padding)
        if padded is None:
            return FailingPart(part, reason=_only_as_group(part))
        return FailingPart(padded, reason=f"{_only_as_group(group)}; the failing half is {len(padded)} nodes")
    failed = yield from repeated(part, None, 3)
    return FailingPart(part, pair_of(*part) if failed else None, reason=_only_as_group(group))


def _with_padding(node: str, padding: Sequence[str]) -> Pair | None:
    return pair_of(node, padding[0]) if padding else None


def _halves(
    first: Part, second: Part, padding: Sequence[str]
) -> Generator[list[PartWish], list[bool | None], Part | None]:
    """The half that fails; None: both pass, also the second time. A single node is padded with a good one."""
    halves = [half if len(half) > 1 else (*half, *padding[:1]) for half in (first, second)]
    for _ in range(2):
        runnable = [half for half in halves if len(half) > 1]
        results = yield [(half, "group: one half of it") for half in runnable]
        for half, passed in zip(runnable, results, strict=True):
            if passed is False:
                return first if half is halves[0] else second
    return None


def _mixed(first: Part, second: Part) -> Generator[list[PartWish], list[bool | None], tuple[Part, Part] | None]:
    """A quarter of one half with a quarter of the other. Both halves pass: the fault is between two of these."""
    if len(first) == 1:
        return first, second
    halves = [(half[: len(half) // 2], half[len(half) // 2 :]) for half in (first, second)]
    quarters = [tuple(part for part in half if part) for half in halves]
    if min(len(half) for half in quarters) < 2:
        return first, second
    for turn in (0, 1):
        mixes = [(quarters[0][0], quarters[1][turn]), (quarters[0][1], quarters[1][1 - turn])]
        results = yield [((*one, *other), "group: mixed across the boundary") for one, other in mixes]
        for mix, passed in zip(mixes, results, strict=True):
            if passed is False:
                return mix
    return None


def _boundary(first: Part, second: Part) -> BisectionSteps:
    """Each side passes alone, together they fail: which node of the one with which of the other?"""
    while len(first) + len(second) > 2:
        longer, other = (first, second) if len(first) >= len(second) else (second, first)
        half = (len(longer) + 1) // 2
        for part in (longer[:half], longer[half:]):
            (passed,) = yield [((*part, *other), "group: one side smaller")]
            if passed is False:
                first, second = part, other
                break
        else:
            reason = (
                f"{_names(first)} and {_names(second)} fail together; each side passes alone, and so do smaller parts"
            )
            return FailingPart((*first, *second), sides=(first, second), reason=reason)
    pair = pair_of(first[0], second[0])
    return FailingPart(pair, pair, (first, second), f"{pair[0]} and {pair[1]} fail together")


def _padded(
    first: Part, second: Part, padding: Sequence[str]
) -> Generator[list[PartWish], list[bool | None], Part | None]:
    """Does a half fail when good nodes fill it up to the full size? Then it needs the size, not the other half."""
    for half, other in product((first, second), repeat=2):
        if half is other or len(padding) < len(other):
            continue
        (passed,) = yield [((*half, *padding[: len(other)]), "group: one half, padded with good nodes")]
        if passed is False:
            return half
    return None


def _only_as_group(part: Part) -> str:
    return f"{_names(part)} fail as a group of {len(part)}; smaller parts of it pass"


def _names(part: Sequence[str]) -> str:
    return ", ".join(part) if len(part) < 5 else f"{part[0]}, {part[1]} and {len(part) - 2} more"


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
        pairs = pairs_inside_leaves(nodes, self.evidence.leaves, self._seed)
        yield [(pair, "first pairing: inside the leaf") for pair in pairs]
        if len(nodes) > 2:
            pairs = pairs_across_leaves(nodes, self.evidence, self._seed)
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

    def _name_certain(self) -> Problem:
        while True:
            problem = problem_of(self.evidence, self._certain)
            found = certain_in(problem)
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
                one for one in groups_to_try(self.evidence, self._certain, suspects, racks=not seen) if one not in seen
            ]
            if not groups:
                break
            seen |= set(groups)
            results = yield [(one, why_group(one, self.evidence)) for one in groups]
            for group, passed in zip(groups, results, strict=True):
                if passed is not True:
                    yield from self._in_group(group, passed)

        left_out = sorted(self._suspected() - self._bad())
        if left_out:
            names = ", ".join(left_out[:8]) + (", …" if len(left_out) > 8 else "")
            self._limits.append(f"{len(left_out)} suspects were not tested in groups: {names}")

    def _in_group(self, group: tuple[str, ...], passed: bool | None) -> Steps:
        again = repeated(group, passed, TRIES)
        failed = yield from again
        if failed is None:
            self._limits.append(f"a group of {len(group)} nodes could not be run")
            return
        if not failed:
            return
        found = yield from bisect(group, self.evidence, self._good(group))
        before = len(self._certain)
        yield from self._confirm()
        if len(self._certain) == before and not (found.pair and self._is_open(found.pair)):
            self._undecided.append(found.undecided(self.evidence))

    # What is known

    def _bad(self) -> set[str]:
        return {one.names[0] for one in self._certain if one.kind == "node"}

    def _suspected(self) -> set[str]:
        """Nodes that a group must not contain: bad ones, and those of failures that are not explained."""
        problem = problem_of(self.evidence, self._certain)
        found = self._bad() | {node for trial in problem.trials for node in trial.nodes}
        return found | {one.names[0] for group in self._undecided for one in group.suspects if one.kind == "node"}

    def _good(self, group: Sequence[str]) -> list[str]:
        """Nodes outside the group that never failed: padding."""
        suspects = self._suspected() | set(group)
        return [node for node in self.evidence.nodes if node not in suspects and self.evidence.passed_partners(node)]

    def _is_open(self, pair: Pair) -> bool:
        problem = problem_of(self.evidence, self._certain)
        return any(pair_of(trial.nodes[0], trial.nodes[1]) == pair for trial in problem.trials)

    def _named(self, kind: str) -> list[Named]:
        return sorted((one for one in self._certain.values() if one.suspect.kind == kind), key=lambda one: one.suspect)

    def _as_named(self, problem: Problem, suspect: Suspect) -> Named:
        mask = problem.masks[suspect]
        trials = tuple(trial for index, trial in enumerate(problem.trials) if mask >> index & 1)
        passes = self.evidence.passes_of(suspect)
        return Named(suspect, _reason(suspect, trials, passes), tuple(one.number for one in trials))

    def _open(self) -> list[Undecided]:
        problem = problem_of(self.evidence, self._certain)
        found = []
        for suspects, trials in not_excluded(problem):
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

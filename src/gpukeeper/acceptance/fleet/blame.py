"""Which fault explains the failed pairs, and whether anything else could. Pure.

A pair fails because of one of its nodes, of the link between them, or of a switch on the way. A fault can be
intermittent: then it also passes. An explanation is a set of faults that together account for every failed pair. Its
cost is the negative logarithm of its likelihood: how rare such faults are, and how well the passes of each fit. A fault
is certain when every explanation without it is at least 100,000 times less likely; and, for links and switches, when
their own pairs were repeated and nodes on both sides passed with other partners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log

from gpukeeper.acceptance.fleet.evidence import Evidence
from gpukeeper.acceptance.fleet.trials import Suspect, Trial

CERTAIN = log(1e5)
CLOSE = log(1e5)  # suspects within this of the best explanation are not excluded
RARE_LINK = 0.005
RARE_SWITCH = 0.01
RARE_NODE = 0.02  # at least; more when more pairs fail
INTERMITTENT = 0.2  # of the faults
AGREEING = 3  # runs that must have failed before a fault is certain


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

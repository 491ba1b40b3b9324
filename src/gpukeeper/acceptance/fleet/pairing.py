"""Which nodes are paired. Seeded: the same nodes, leaves and seed give the same pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from gpukeeper.acceptance.fleet.evidence import Evidence, Pair


def same_leaf(nodes: Sequence[str], leaves: Mapping[str, str], seed: int) -> list[Pair]:
    """Disjoint pairs inside leaves. The odd nodes of the leaves are paired with each other; one can remain."""
    odd: list[str] = []
    pairs: list[Pair] = []
    for leaf in sorted({leaves[node] for node in nodes}):
        members = shuffled([node for node in nodes if leaves[node] == leaf], f"{seed} leaf")
        pairs += zip(members[::2], members[1::2], strict=False)
        odd += members[-1:] if len(members) % 2 else []
    return pairs + list(zip(odd[::2], odd[1::2], strict=False))


def across_leaves(nodes: Sequence[str], evidence: Evidence, seed: int) -> list[Pair]:
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
        partner = _first(node, free, evidence)
        del free[partner]
        pairs.append((node, partner))
    return pairs


def _first(node: str, free: Iterable[str], evidence: Evidence) -> str:
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

"""Groups of nodes in which nothing is known to fail, until every two nodes were in a passing trial together.

Sets of nodes are bit masks here: 512 nodes have 130,816 pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from gpukeeper.acceptance.fleet.evidence import Evidence
from gpukeeper.acceptance.fleet.trials import Suspect

RACK_MIN = 3  # a smaller leaf has had its only pair


def groups(evidence: Evidence, certain: Iterable[Suspect], excluded: Set[str], *, racks: bool) -> list[tuple[str, ...]]:
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


def why(group: tuple[str, ...], evidence: Evidence) -> str:
    leaves = {evidence.leaves[node] for node in group}
    return f"leaf {min(leaves)} as one group" if len(leaves) == 1 else f"{len(leaves)} leaves as one group"

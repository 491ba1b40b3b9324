"""A group fails although its pairs passed: the smallest part of it that still fails.

A failed part holds a fault. A passed part proves less, because a fault can be intermittent, or need more nodes or the
other part to show; so parts that pass are repeated, then mixed across the boundary, then padded to the full size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from gpukeeper.acceptance.fleet.evidence import Evidence, Pair, pair_of
from gpukeeper.acceptance.fleet.trials import Suspect, Undecided

Part: TypeAlias = tuple[str, ...]
Wish: TypeAlias = tuple[Part, str]
Asked: TypeAlias = Generator[list[Wish], list[bool | None], bool | None]


@dataclass(frozen=True)
class Found:
    """`pair`: two nodes that fail together. Otherwise `part`, which could not be made smaller, and why."""

    part: Part
    pair: Pair | None = None
    sides: tuple[Part, Part] | None = None
    reason: str = ""

    def undecided(self, evidence: Evidence) -> Undecided:
        nodes = tuple(Suspect("node", (node,)) for node in self.part)
        return Undecided((*nodes, *evidence.switches(self.part)), self.reason)


Steps: TypeAlias = Generator[list[Wish], list[bool | None], Found]


def repeated(group: Part, passed: bool | None, tries: int) -> Asked:
    """Does it fail again? At most `tries` runs. None: it could not be run."""
    results = [passed]
    while len(results) < tries and False not in results[1:]:
        (again,) = yield [(group, "group: again")]
        results.append(again)
    if False in results:
        return True
    return None if True not in results else False


def bisect(group: Part, evidence: Evidence, padding: Sequence[str]) -> Steps:
    """Leaves stay together as long as possible, so that the parts follow the wiring."""
    part = tuple(sorted(group, key=lambda node: (evidence.leaves[node], node)))
    while len(part) > 2:
        first, second = part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]
        smaller = yield from _halves(first, second, padding)
        if smaller is not None:
            part = smaller
            if len(part) == 1:
                return Found(part, _with(part[0], padding), reason=_only_as_group(group))
            continue
        sides = yield from _mixed(first, second)
        if sides is not None:
            return (yield from _boundary(*sides))
        padded = yield from _padded(first, second, padding)
        if padded is None:
            return Found(part, reason=_only_as_group(part))
        return Found(padded, reason=f"{_only_as_group(group)}; the failing half is {len(padded)} nodes")
    failed = yield from repeated(part, None, 3)
    return Found(part, pair_of(*part) if failed else None, reason=_only_as_group(group))


def _with(node: str, padding: Sequence[str]) -> Pair | None:
    return pair_of(node, padding[0]) if padding else None


def _halves(first: Part, second: Part, padding: Sequence[str]) -> Generator[list[Wish], list[bool | None], Part | None]:
    """The half that fails; None: both pass, also the second time. A single node is padded with a good one."""
    halves = [half if len(half) > 1 else (*half, *padding[:1]) for half in (first, second)]
    for _ in range(2):
        runnable = [half for half in halves if len(half) > 1]
        results = yield [(half, "group: one half of it") for half in runnable]
        for half, passed in zip(runnable, results, strict=True):
            if passed is False:
                return first if half is halves[0] else second
    return None


def _mixed(first: Part, second: Part) -> Generator[list[Wish], list[bool | None], tuple[Part, Part] | None]:
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


def _boundary(first: Part, second: Part) -> Steps:
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
                f"{_list(first)} and {_list(second)} fail together; each side passes alone, and so do smaller parts"
            )
            return Found((*first, *second), sides=(first, second), reason=reason)
    pair = pair_of(first[0], second[0])
    return Found(pair, pair, (first, second), f"{pair[0]} and {pair[1]} fail together")


def _padded(first: Part, second: Part, padding: Sequence[str]) -> Generator[list[Wish], list[bool | None], Part | None]:
    """Does a half fail when good nodes fill it up to the full size? Then it needs the size, not the other half."""
    for half, other in product((first, second), repeat=2):
        if half is other or len(padding) < len(other):
            continue
        (passed,) = yield [((*half, *padding[: len(other)]), "group: one half, padded with good nodes")]
        if passed is False:
            return half
    return None


def _only_as_group(part: Part) -> str:
    return f"{_list(part)} fail as a group of {len(part)}; smaller parts of it pass"


def _list(part: Sequence[str]) -> str:
    return ", ".join(part) if len(part) < 5 else f"{part[0]}, {part[1]} and {len(part) - 2} more"

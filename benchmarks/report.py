"""How a benchmark reports: a table for people and, last, one JSON line for programs. Minima of several runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
Clock = Callable[[], float]


class Figure(msgspec.Struct, frozen=True):
    """The last line. `ratio`: value over the same measure of `against`, a peer in the same run."""

    name: str
    value: float
    unit: str
    ratio: float
    against: str


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is words, the others are figures; the last is never padded."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells, line[-1]]).rstrip())
    print()


def print_figure(figure: Figure) -> None:
    print(msgspec.json.encode(figure).decode(), flush=True)


def fastest(work: Callable[[], object], runs: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of the fastest of several runs; the others were disturbed by something else on the machine."""
    return min(timed(work, clock)[0] for _ in range(runs))


def timed(work: Callable[[], T], clock: Clock = time.perf_counter) -> tuple[float, T]:
    begun = clock()
    result = work()
    return clock() - begun, result


def met(value: float, limit: float, *, least: bool) -> str:
    return "met" if (value >= limit if least else value < limit) else "not met"

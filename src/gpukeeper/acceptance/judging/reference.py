"""What a good GPU of a model shows, with where each figure comes from, and a linter for such tables.

Tables of others were wrong by units and digits (a floor of 2,333 MB/s for an H200 cannot fail), so no row is used
that the linter complains about. A floor is worth nothing without the method it was measured by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

import msgspec

from gpukeeper.acceptance.judging.reference_rows import MAY_FAIL, ROWS, Origin, ReferenceRow
from gpukeeper.acceptance.record import Thresholds
from gpukeeper.model.gpu import Gpu

__all__ = ["ROWS", "Origin", "ReferenceRow", "limits", "lint", "read", "speaks_of"]

UNITS = frozenset({"TFLOP/s", "GB/s", "us", "ms", "samples/s", "steps/s", "share", "W", "C"})
LEAST_OF_CEILING = 0.5  # a floor below half of what is possible finds nothing; a waiver has the reason


def limits(gpu: Gpu, check: str, metric: str, method: str, own: Sequence[ReferenceRow] = ()) -> Thresholds:
    """The user's own rows first. Rows for other methods are marked as such: the judge distinguishes them.

    A slice has no floors of its GPU. What the driver does not name has none either.
    """
    if gpu.part_of is not None or not isinstance(gpu.name, str):
        return Thresholds()
    for table in (own, ROWS):
        rows = [row for row in table if _is_about(row, gpu.name, check, metric)]
        if rows:
            return next((row for row in rows if speaks_of(row, method)), rows[0]).limits()
    return Thresholds()


def read(document: object) -> tuple[ReferenceRow, ...]:
    """A person's own table: a list of rows, as JSON or YAML gives it. Raises msgspec.ValidationError with the place."""
    return msgspec.convert(document, tuple[ReferenceRow, ...])


def lint(rows: Iterable[ReferenceRow], names: Sequence[str] = ()) -> list[str]:
    """What is wrong with a table, a sentence each; `names`: GPUs that at most one row may be about."""
    table = list(rows)
    return [*(f"{_place(row)}: {wrong}" for row in table for wrong in _wrong(row)), *_ambiguous(table, names)]


def speaks_of(row: ReferenceRow, method: str) -> bool:
    return not row.method or fnmatchcase(method, row.method)


def _is_about(row: ReferenceRow, name: str, check: str, metric: str) -> bool:
    return (row.check, row.metric) == (check, metric) and not row.superseded and re.fullmatch(row.gpu, name) is not None


def _wrong(row: ReferenceRow) -> list[str]:
    figures = {"floor": row.floor, "warn": row.warn, "reference": row.reference, "ceiling": row.ceiling}
    found = [
        f"{name} is {value}, which is not a number"
        for name, value in figures.items()
        if value is not None and not value > 0
    ]
    if found:
        return found
    return [*_wrong_words(row), *_wrong_order(row), *_wrong_reach(row)]


def _wrong_words(row: ReferenceRow) -> list[str]:
    found = []
    try:
        re.compile(row.gpu)
    except (re.error, OverflowError, RecursionError) as error:
        found.append(f"gpu {row.gpu!r} is not a valid regular expression: {error}")
    if row.unit not in UNITS:
        found.append(f"unit {row.unit!r} is unknown; valid values: {', '.join(sorted(UNITS))}")
    if not row.source.strip():
        found.append("it has no source; state where the values come from")
    if all(value is None for value in (row.floor, row.warn, row.reference, row.ceiling)):
        found.append("it has no value")
    if row.may_fail and row.floor is not None and row.origin not in MAY_FAIL and not row.superseded:
        found.append(f"a value of origin {row.origin} may only warn: set may_fail to false")
    return found


def _wrong_order(row: ReferenceRow) -> list[str]:
    """From worse to better, whichever way the metric counts: floor, warn, reference, ceiling."""
    names = ("floor", "warn", "reference", "ceiling")
    known = [(name, value) for name in names if (value := getattr(row, name)) is not None]
    turn = -1 if row.lower_is_better else 1
    return [
        f"{worse} {low:g} is better than {better} {high:g}; check units and digits"
        for (worse, low), (better, high) in pairwise(known)
        if turn * low > turn * high
    ]


def _wrong_reach(row: ReferenceRow) -> list[str]:
    """Only for what a person can check against physics: a time has no such ceiling."""
    if row.floor is None or row.lower_is_better or row.waiver:
        return []
    if row.ceiling is None:
        return [
            "a floor without a ceiling cannot be checked; set the ceiling, or a waiver that explains why there is none"
        ]
    if row.floor < LEAST_OF_CEILING * row.ceiling:
        share = 100 * row.floor / row.ceiling
        return [
            f"floor {row.floor:g} is {share:.2g} % of the ceiling {row.ceiling:g} and detects nothing; fix it, or"
            " write a waiver"
        ]
    return []


def _ambiguous(rows: Sequence[ReferenceRow], names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        seen: set[tuple[str, str, str]] = set()
        for row in rows:
            about = (row.check, row.metric, row.method)
            if not _is_about(row, name, row.check, row.metric):
                continue
            if about in seen:
                found.append(f"{_place(row)}: duplicate of another row for {name}; keep one row")
            seen.add(about)
    return found


def _place(row: ReferenceRow) -> str:
    return " ".join(part for part in (row.gpu, row.check, row.metric, row.method) if part)

"""The verdict of an acceptance test, and what the ledger remembers of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from gpukeeper.model.direct import direct


@direct
class Grade(StrEnum):
    """The verdict on a measurement, a GPU, a node or a run."""

    PASS = "PASS"  # noqa: S105 - no secret
    WARN = "WARN"  # degraded, usable
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"  # could not test, too noisy, or too good to be true
    SKIPPED = "SKIPPED"  # does not apply here, by rule; counts for nothing


_RANK = {Grade.SKIPPED: 0, Grade.PASS: 1, Grade.WARN: 2, Grade.INCONCLUSIVE: 3, Grade.FAIL: 4}


def worst(grades: Iterable[Grade]) -> Grade:
    """Of nothing, or of nothing but what was skipped: inconclusive, since nothing was tested."""
    found = max(grades, key=_RANK.__getitem__, default=Grade.SKIPPED)
    return Grade.INCONCLUSIVE if found is Grade.SKIPPED else found


def rank(grade: Grade) -> int:
    """Worse is more."""
    return _RANK[grade]


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger remembers of a GPU's figures: one earlier run."""

    at: datetime
    run: str
    identity: str
    verdict: Grade
    values: Mapping[str, float]  # by "check.metric method"

"""Is it as fast as it was? The same GPU, by serial, measured by the same method in runs that accepted it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpukeeper.acceptance.judging.bounds import Bounds, Figure, grade
from gpukeeper.acceptance.record import Measurement
from gpukeeper.model.grade import Grade, Past

NEWEST = 5  # old runs were made with other drivers and libraries
# A healthy GPU repeats itself within half a per cent; driver and library changes move a GEMM by a few. A loss of more
# than five is worth a look, more than ten is none of these.
WARN_DROP = 0.05
FAIL_DROP = 0.10
LEAST_TO_FAIL = 3  # a single earlier run may have been the odd one
ACCEPTED = frozenset({Grade.PASS, Grade.WARN})


@dataclass(frozen=True)
class HistoryComparison:
    grade: Grade
    n: int
    baseline: float  # as measured, not turned
    loss: float


def key(measurement: Measurement) -> str:
    """How the ledger names a figure: another method is another figure."""
    return f"{measurement.check}.{measurement.metric} {measurement.method}"


def earlier(measurement: Measurement, pasts: Sequence[Past]) -> tuple[float, ...]:
    """The newest figures of accepted runs, oldest first."""
    named = key(measurement)
    values = [
        past.values[named]
        for past in sorted(pasts, key=lambda one: one.at)
        if past.verdict in ACCEPTED and past.values.get(named, 0) > 0
    ]
    return tuple(values[-NEWEST:])


def compare(figure: Figure, before: Sequence[float], *, lower_is_better: bool = False) -> HistoryComparison | None:
    """None: it was never measured so, or never accepted."""
    if not before:
        return None
    baseline = statistics.median(before)
    good = 1 / baseline if lower_is_better else baseline
    fail = FAIL_DROP if len(before) >= LEAST_TO_FAIL else 1.0
    bounds = Bounds((1 - WARN_DROP) * good, (1 - fail) * good, FAIL_DROP)
    return HistoryComparison(grade(figure, bounds), len(before), baseline, 1 - figure.good / good)

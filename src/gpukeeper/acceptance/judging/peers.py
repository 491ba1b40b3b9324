"""Is it as fast as its peers in the same run? Their number decides which rule applies.

Three sigma can never fire among eight: the largest z of eight samples is 2.47. So a handful is held against shares of
its median, and many against their own spread. Equals are of one model, power limit, slice profile and method.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpukeeper.acceptance.check import CheckContext
from gpukeeper.acceptance.judging.bounds import Bounds, Figure, grade
from gpukeeper.acceptance.record import Measurement
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown

LEAST = 3  # if two differ, it is unknown which one is wrong
MANY = 16
WARN_DROP = 0.03
FAIL_DROP = 0.05
# Among many a warning costs little: at 3 % and z −3.5, 98.5 % of GPUs that are 5 % slow are found among 64; so 99.3 %,
# and 0.02 % of good ones are warned about. Measured by tests/unit/acceptance/judging/test_statistics.py.
WARN_DROP_MANY = 0.028
WARN_Z = 3.0
FAIL_DROP_WIDE = 0.08
WIDE = 0.012  # a natural spread above this is high; 0.8 % is usual, 1.5 % was seen
FAIL_Z = 3.5
MAD_TO_SIGMA = 1.4826

Stratum = tuple[object, ...]


@dataclass(frozen=True)
class PeerComparison:
    """One value compared with its peers, itself included."""

    grade: Grade
    n: int
    median: float
    z: float | None  # None: they are all equal
    loss: float  # share below the median; negative: above it


def stratum(measurement: Measurement, context: CheckContext) -> Stratum | None:
    """Only GPUs of the same model and settings are compared. None: its peers are unknown."""
    if measurement.gpu is None:
        return None
    gpu = context.gpu(measurement.gpu)
    if isinstance(gpu.name, Unknown):
        return None
    return (gpu.name, gpu.profile, power_limit(measurement.gpu, context), measurement.method, measurement.unit)


def power_limit(uuid: str, context: CheckContext) -> int | None:
    """In watts. None: not known; those are compared among themselves."""
    seen = context.before.get(uuid)
    limit = seen.states.get("power_limit_w") if seen else context.gpu(uuid).facts.get("power_limit_w")
    return round(limit) if isinstance(limit, int | float) and not isinstance(limit, bool) else None


def stand(figure: Figure, group: Sequence[Figure]) -> PeerComparison | None:
    """`group` includes the value itself. None: too few to compare."""
    median = statistics.median(one.good for one in group) if group else 0.0
    if len(group) < LEAST or median <= 0:
        return None
    spread = spread_of(group)
    z = (figure.good - median) / (spread * median) if spread else None
    return PeerComparison(grade(figure, bounds(group)), len(group), median, z, 1 - figure.good / median)


def bounds(group: Sequence[Figure]) -> Bounds:
    warn, fail = drops(len(group), spread_of(group))
    median = statistics.median(one.good for one in group)
    return Bounds((1 - warn) * median, (1 - fail) * median, fail)


def drops(n: int, spread: float) -> tuple[float, float]:
    """The shares below the median at which a figure warns and fails."""
    if n < MANY:
        return WARN_DROP, FAIL_DROP
    fail = FAIL_DROP_WIDE if spread > WIDE else FAIL_DROP
    return max(WARN_DROP_MANY, WARN_Z * spread), max(fail, FAIL_Z * spread)


def spread_of(group: Sequence[Figure]) -> float:
    """As a share of the median, by the median deviation, which one slow GPU does not move. Never below what repeating
    the measurement alone scatters: eight figures may agree by luck."""
    goods = [one.good for one in group]
    median = statistics.median(goods)
    deviation = MAD_TO_SIGMA * statistics.median(abs(good - median) for good in goods) / median if median > 0 else 0.0
    noises = [one.noise for one in group if one.noise is not None]
    return max(deviation, statistics.median(noises) if noises else 0.0)

"""A value against its peers in the same run and against its own history: bounds, and the effect of noise.

Higher is better here. Three sigma can never fire among eight: a handful is held against shares of its median, many
against their own spread. Equals are of one model, power limit, slice profile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpukeeper.acceptance.check import CheckContext
from gpukeeper.acceptance.record import Measurement
from gpukeeper.model.gpu import Grade, Past
from gpukeeper.model.unknown import Unknown

NOISE_SHARE = 0.25  # of the margin: a value that scatters more does not separate a good GPU from a bad one


@dataclass(frozen=True)
class Bounds:
    """`margin`: from what a healthy GPU shows down to where it fails, as a share. The noise is compared with it."""

    warn: float
    fail: float
    margin: float


@dataclass(frozen=True)
class Figure:
    """The samples of one measurement, inverted where lower is better."""

    goods: tuple[float, ...]

    @cached_property
    def good(self) -> float:
        return statistics.median(self.goods)

    @cached_property
    def noise(self) -> float | None:
        return repeatability(self.goods)


def repeatability(samples: Sequence[float]) -> float | None:
    """Standard deviation ÷ mean. None: there is only one sample."""
    if len(samples) < 2:
        return None
    mean = statistics.fmean(samples)
    # statistics.stdev is exact, in fractions, and a hundred times slower.
    deviation = math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1))
    return deviation / abs(mean) if mean else math.inf


def grade(figure: Figure, bounds: Bounds) -> Grade:
    """By the median. A noisy value is judged only if no sample contradicts: all below `fail`, or all above `warn`.

    Slower by a common factor is never better: PASS, WARN, FAIL in this order; when noisy PASS, INCONCLUSIVE, FAIL.
    """
    if is_noisy(figure, bounds):
        if max(figure.goods) < bounds.fail:
            return Grade.FAIL
        return Grade.PASS if min(figure.goods) >= bounds.warn else Grade.INCONCLUSIVE
    if figure.good < bounds.fail:
        return Grade.FAIL
    return Grade.WARN if figure.good < bounds.warn else Grade.PASS


def is_noisy(figure: Figure, bounds: Bounds) -> bool:
    return figure.noise is not None and figure.noise > NOISE_SHARE * bounds.margin


LEAST_PEERS = 3  # if two differ, it is unknown which one is wrong
MANY_PEERS = 16
PEERS_WARN_DROP = 0.03
PEERS_FAIL_DROP = 0.05
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


def against_peers(figure: Figure, group: Sequence[Figure]) -> PeerComparison | None:
    """`group` includes the value itself. None: too few to compare."""
    median = statistics.median(one.good for one in group) if group else 0.0
    if len(group) < LEAST_PEERS or median <= 0:
        return None
    spread = spread_of(group)
    z = (figure.good - median) / (spread * median) if spread else None
    return PeerComparison(grade(figure, bounds_of_peers(group)), len(group), median, z, 1 - figure.good / median)


# Three sigma can never fire among eight: the largest z of eight samples is 2.47. So a handful is held against shares
# of its median, and many against their own spread.
def bounds_of_peers(group: Sequence[Figure]) -> Bounds:
    warn, fail = drops_among_peers(len(group), spread_of(group))
    median = statistics.median(one.good for one in group)
    return Bounds((1 - warn) * median, (1 - fail) * median, fail)


def drops_among_peers(n: int, spread: float) -> tuple[float, float]:
    """The shares below the median at which a figure warns and fails."""
    if n < MANY_PEERS:
        return PEERS_WARN_DROP, PEERS_FAIL_DROP
    fail = FAIL_DROP_WIDE if spread > WIDE else PEERS_FAIL_DROP
    return max(WARN_DROP_MANY, WARN_Z * spread), max(fail, FAIL_Z * spread)


def spread_of(group: Sequence[Figure]) -> float:
    """As a share of the median, by the median deviation, which one slow GPU does not move. Never below what repeating
    the measurement alone scatters: eight figures may agree by luck."""
    goods = [one.good for one in group]
    median = statistics.median(goods)
    deviation = MAD_TO_SIGMA * statistics.median(abs(good - median) for good in goods) / median if median > 0 else 0.0
    noises = [one.noise for one in group if one.noise is not None]
    return max(deviation, statistics.median(noises) if noises else 0.0)


NEWEST = 5  # old runs were made with other drivers and libraries
# A healthy GPU repeats itself within half a per cent; driver and library changes move a GEMM by a few. A loss of more
# than five is worth a look, more than ten is none of these.
HISTORY_WARN_DROP = 0.05
HISTORY_FAIL_DROP = 0.10
LEAST_TO_FAIL = 3  # a single earlier run may have been the odd one
ACCEPTED = frozenset({Grade.PASS, Grade.WARN})


@dataclass(frozen=True)
class HistoryComparison:
    grade: Grade
    n: int
    baseline: float  # as measured, not turned
    loss: float


def name_of_figure(measurement: Measurement) -> str:
    """How the ledger names a figure: another method is another figure."""
    return f"{measurement.check}.{measurement.metric} {measurement.method}"


def earlier_figures(measurement: Measurement, pasts: Sequence[Past]) -> tuple[float, ...]:
    """The newest figures of accepted runs, oldest first."""
    named = name_of_figure(measurement)
    values = [
        past.values[named]
        for past in sorted(pasts, key=lambda one: one.at)
        if past.verdict in ACCEPTED and past.values.get(named, 0) > 0
    ]
    return tuple(values[-NEWEST:])


def against_history(
    figure: Figure, before: Sequence[float], *, lower_is_better: bool = False
) -> HistoryComparison | None:
    """None: it was never measured so, or never accepted."""
    if not before:
        return None
    baseline = statistics.median(before)
    good = 1 / baseline if lower_is_better else baseline
    fail = HISTORY_FAIL_DROP if len(before) >= LEAST_TO_FAIL else 1.0
    bounds = Bounds((1 - HISTORY_WARN_DROP) * good, (1 - fail) * good, HISTORY_FAIL_DROP)
    return HistoryComparison(grade(figure, bounds), len(before), baseline, 1 - figure.good / good)

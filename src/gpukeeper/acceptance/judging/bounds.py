"""Warning and failure bounds of a value, and the effect of noise. Higher is better here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpukeeper.model.grade import Grade

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

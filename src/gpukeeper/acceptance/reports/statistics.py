"""Is a difference more than noise? Welch's t, the exact rank test, and Holm's correction, in plain Python. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, variance

FEWEST = 3  # samples on each side; with two a spread is a guess
MANY = 8  # from here on ranks suffice, even after a correction for many metrics, and outliers do no harm
_EXACT_LIMIT = 60  # samples together; beyond it the normal approximation is as good
_TINY = 1e-300


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided: how likely noise alone makes such a difference. None: too few samples."""
    if min(len(a), len(b)) < FEWEST:
        return None
    return mann_whitney(a, b) if min(len(a), len(b)) >= MANY else welch(a, b)


def welch(a: Sequence[float], b: Sequence[float]) -> float:
    va, vb = variance(a) / len(a), variance(b) / len(b)
    apart = fmean(a) - fmean(b)
    if va + vb == 0:
        return 1.0 if apart == 0 else 0.0
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    t = apart / math.sqrt(va + vb)
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact for small samples, ties included: all ways to deal out the ranks are counted."""
    doubled = _doubled_ranks([*a, *b])
    observed = sum(doubled[: len(a)])
    middle = len(a) * sum(doubled) / len(doubled)
    if len(doubled) > _EXACT_LIMIT:
        return _by_normal(doubled, len(a), observed - middle)
    ways = _ways(doubled, len(a))
    apart = abs(observed - middle) - 1e-9
    extreme = sum(count for total, count in ways.items() if abs(total - middle) >= apart)
    return extreme / sum(ways.values())


def holm(found: Sequence[float]) -> list[float]:
    """Each p corrected for the number of tests; never smaller than one that was smaller before."""
    order = sorted(range(len(found)), key=found.__getitem__)
    corrected = [0.0] * len(found)
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, found[index] * (len(found) - place)))
        corrected[index] = highest
    return corrected


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank, so that the middle rank of equal values is whole."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(ordered)}
    count = Counter(ordered)
    return [2 * first[value] + count[value] + 1 for value in values]


def _ways(doubled: Sequence[int], size: int) -> dict[int, int]:
    """Of every sum that `size` of these ranks can have: in how many ways."""
    table: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(size))]
    for rank in doubled:
        for taken in range(size, 0, -1):
            for total, count in table[taken - 1].items():
                table[taken][total + rank] += count
    return table[size]


def _by_normal(doubled: Sequence[int], size: int, apart: float) -> float:
    n, other = len(doubled), len(doubled) - size
    mean = sum(doubled) / n
    spread = size * other / (n * (n - 1)) * sum((rank - mean) ** 2 for rank in doubled)
    return 1.0 if spread == 0 else math.erfc(max(0.0, abs(apart) - 1) / math.sqrt(2 * spread))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised one, by its continued fraction (Lentz); the tail of Student's t is one."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, 300):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + step * d)
            c = _away_from_zero(1 + step / c)
            found *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return found


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY

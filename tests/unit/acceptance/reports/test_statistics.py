"""The tests of significance, against closed forms, against counting by hand, and against chance itself."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, variance

import pytest

from gpukeeper.acceptance.reports import compare


def around(middle: float, half: float, count: int) -> list[float]:
    return [middle + (half if place % 2 else -half) for place in range(count)]


def test_welch_is_students_t_where_there_is_a_closed_form() -> None:
    # Two and two with equal spread: 2 degrees of freedom, whose tail is 1 - t / √(2 + t²).
    t = 3 / math.sqrt(2)
    assert compare.welch([0, 2], [3, 5]) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-12)


@pytest.mark.parametrize(("count", "critical"), [(3, 2.776445), (6, 2.228139), (11, 2.085963)])
def test_welch_has_five_percent_where_the_tables_do(count: int, critical: float) -> None:
    a = [float(place) for place in range(count)]
    apart = critical * math.sqrt(2 * variance(a) / count)
    assert compare.welch(a, [value + apart for value in a]) == pytest.approx(0.05, abs=1e-6)


def test_welch_agrees_with_the_integral_of_the_density() -> None:
    a, b = [10.1, 10.4, 9.8, 10.0, 10.2], [10.9, 9.1, 12.2, 11.8]
    va, vb = variance(a) / len(a), variance(b) / len(b)
    freedom = (va + vb) ** 2 / (va**2 / 4 + vb**2 / 3)
    t = abs(fmean(a) - fmean(b)) / math.sqrt(va + vb)
    assert compare.welch(a, b) == pytest.approx(_two_tails(t, freedom), rel=1e-6)


def test_without_any_spread_equal_is_equal_and_different_is_different() -> None:
    assert compare.welch([1, 1, 1], [1, 1, 1]) == 1
    assert compare.welch([1, 1, 1], [2, 2, 2]) == 0


def test_ranks_that_do_not_overlap_have_the_smallest_p() -> None:
    assert compare.mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert compare.mann_whitney([1, 2, 3, 5], [4, 6, 7, 8]) == pytest.approx(4 / 70)


@pytest.mark.parametrize(
    ("a", "b"),
    [([1, 2, 2, 7], [2, 3, 4, 4, 9]), ([5, 5, 5], [5, 5, 6]), ([3.0, 1.0, 4.0], [1.5, 9.0, 2.6, 5.3])],
)
def test_ranks_are_exact_with_ties_too(a: list[float], b: list[float]) -> None:
    assert compare.mann_whitney(a, b) == pytest.approx(_counted(a, b))


def test_many_ranks_are_near_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    a, b = [rng.gauss(0, 1) for _ in range(30)], [rng.gauss(0.6, 1) for _ in range(30)]
    exact = compare.mann_whitney(a, b)
    monkeypatch.setattr(compare, "_EXACT_LIMIT", 0)
    assert compare.mann_whitney(a, b) == pytest.approx(exact, rel=0.02)


def test_holm_is_the_textbook_example() -> None:
    assert compare.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert compare.holm([]) == []


def test_two_samples_are_too_few_to_say() -> None:
    assert compare.p_value([1, 2], [1, 2, 3]) is None
    assert compare.p_value([1, 2, 3], [1, 2, 3]) is not None


@pytest.mark.parametrize("count", [5, 10])
def test_noise_alone_is_called_significant_as_rarely_as_promised(count: int) -> None:
    rng = random.Random(20260314)
    alarms = 0
    for _ in range(1000):
        a, b = ([rng.gauss(700, 3) for _ in range(count)] for _ in range(2))
        alarms += (compare.p_value(a, b) or 0.0) < 0.05
    assert 20 <= alarms <= 75


def test_a_loss_of_two_percent_is_found() -> None:
    rng = random.Random(11)
    found = 0
    for _ in range(200):
        a = [rng.gauss(700, 2.8) for _ in range(5)]
        b = [rng.gauss(686, 2.8) for _ in range(5)]
        found += (compare.p_value(a, b) or 1.0) < 0.05
    assert found >= 198


def _two_tails(t: float, freedom: float) -> float:
    """By Simpson's rule, from 0 to t."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    steps = 2000
    heights = [(1 + (t * place / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for place in range(steps + 1)]
    whole = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return 1 - 2 * scale * whole * t / steps / 3


def _counted(a: Sequence[float], b: Sequence[float]) -> float:
    """U of every way to deal the values out, by comparing every pair."""
    both = [*a, *b]
    middle = len(a) * len(b) / 2

    def u(chosen: Sequence[int]) -> float:
        others = [both[place] for place in range(len(both)) if place not in chosen]
        return sum((both[x] > y) + 0.5 * (both[x] == y) for x in chosen for y in others)

    seen = abs(u(range(len(a))) - middle)
    ways = [abs(u(chosen) - middle) >= seen - 1e-9 for chosen in combinations(range(len(both)), len(a))]
    return sum(ways) / len(ways)

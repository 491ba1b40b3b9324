"""Equals in the same run: which rule can tell depends on how many they are."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.judging import comparisons
from gpukeeper.acceptance.judging.comparisons import Figure
from gpukeeper.model.gpu import Grade


def group(*values: float, repeats: int = 5) -> list[Figure]:
    return [Figure((value,) * repeats) for value in values]


@pytest.mark.parametrize(("value", "verdict"), [(97.0, "PASS"), (96.9, "WARN"), (95.0, "WARN"), (94.9, "FAIL")])
def test_a_handful_is_held_against_shares_of_its_median(value: float, verdict: str) -> None:
    among = group(*[100.0] * 7, value)
    found = comparisons.against_peers(among[-1], among)
    assert found is not None
    assert (found.grade, found.n, found.median) == (verdict, 8, 100.0)
    assert found.loss == pytest.approx(1 - value / 100)


def test_three_sigma_could_never_fire_among_eight() -> None:
    """One GPU of eight at half speed: its z by mean and deviation is 2.47 at most. By the median it is plain."""
    among = group(*[100.0] * 7, 50.0)
    found = comparisons.against_peers(among[-1], among)
    assert found is not None
    assert found.grade is Grade.FAIL


def test_a_faster_one_is_no_worse() -> None:
    among = group(*[100.0] * 7, 130.0)
    found = comparisons.against_peers(among[-1], among)
    assert found is not None
    assert found.grade is Grade.PASS


def wide(n: int, share: float) -> list[Figure]:
    """Evenly spread around 100, so that the median deviation is known."""
    return group(*(100 * (1 + share * (2 * i / (n - 1) - 1)) for i in range(n)))


def test_many_are_held_against_their_own_spread() -> None:
    among = wide(64, 0.01)  # a median deviation of half a per cent: sigma is 0.75 %
    assert comparisons.spread_of(among) == pytest.approx(0.0074, abs=2e-4)
    for value, verdict in ((97.3, "PASS"), (97.1, "WARN"), (95.1, "WARN"), (94.9, "FAIL")):
        slow = Figure((value,) * 5)
        found = comparisons.against_peers(slow, [*among, slow])
        assert found is not None
        assert found.grade == verdict, value


@pytest.mark.parametrize(("n", "few"), [(8, True), (15, True), (16, False), (17, False)])
def test_sixteen_are_many(n: int, few: bool) -> None:
    handful = (comparisons.PEERS_WARN_DROP, comparisons.PEERS_FAIL_DROP)
    assert (comparisons.drops_among_peers(n, 0.02) == handful) is few
    assert few or comparisons.drops_among_peers(n, 0.02) == (pytest.approx(0.06), comparisons.FAIL_DROP_WIDE)


def test_where_the_spread_is_high_it_takes_more_to_fail() -> None:
    among = wide(64, 0.02)
    for value, verdict in ((95.7, "PASS"), (95.3, "WARN"), (92.1, "WARN"), (91.9, "FAIL")):
        slow = Figure((value,) * 5)
        found = comparisons.against_peers(slow, [*among, slow])
        assert found is not None
        assert found.grade == verdict, value


def test_the_spread_is_never_below_the_repeatability() -> None:
    """Sixteen figures that agree by luck, each of which scatters by 2 %: 4 % below them is nothing."""
    scattered = [Figure((98.0, 99.0, 100.0, 101.0, 102.0)) for _ in range(20)]
    assert comparisons.spread_of(scattered) == pytest.approx(0.0158, abs=1e-4)
    slow = Figure(tuple(0.96 * good for good in scattered[0].goods))
    found = comparisons.against_peers(slow, [*scattered, slow])
    assert found is not None
    assert found.grade is not Grade.FAIL
    assert found.z == pytest.approx(-2.5, abs=0.1)


@pytest.mark.parametrize("values", [(), (100.0,), (100.0, 50.0), (0.0, 0.0, 0.0)])
def test_too_few_or_all_dead_tells_nothing(values: tuple[float, ...]) -> None:
    among = group(*values)
    assert comparisons.against_peers(Figure((1.0,)), among) is None


def test_all_equal_has_no_z() -> None:
    among = group(*[100.0] * 4)
    found = comparisons.against_peers(among[0], among)
    assert found is not None
    assert (found.grade, found.z) == (Grade.PASS, None)

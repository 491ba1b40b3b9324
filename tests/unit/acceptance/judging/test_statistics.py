"""How often the judge is wrong, on simulated fleets: false FAIL below 0.1 % of clean GPUs; a GPU that is 5 % slow is
found in 95 % among 8 and in 99 % among 64. Seeded; run it (`python -m`) to print the table.

"Found" is WARN or FAIL in one run with five repeats; the table tells them apart. Gaussian silicon ranks rules, it does
not predict the rates of a real fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpukeeper.acceptance.judging import comparisons, judge
from gpukeeper.acceptance.judging.comparisons import Figure
from gpukeeper.acceptance.record import Thresholds
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.machines import context, fleet, gpus, measured

USUAL, HIGH = 0.008, 0.015
SEED = 2026


@dataclass(frozen=True)
class Rates:
    """Shares of GPUs."""

    gpus: int
    fail: float
    warn: float
    open: float

    @property
    def found(self) -> float:
        return self.fail + self.warn


def clean(n: int, spread: float, gpus: int = 16_384) -> Rates:
    """Of GPUs that are all right."""
    return _rates(grade for seed in range(gpus // n) for grade in _grades(n, seed, spread))


def slow(n: int, spread: float, by: float = 0.05, bad: int = 1, trials: int = 600) -> Rates:
    """Of the GPUs that are slow, `bad` in each fleet."""
    return _rates(grade for seed in range(trials) for grade in _grades(n, seed, spread, bad, by)[:bad])


def _grades(n: int, seed: int, spread: float, bad: int = 0, by: float = 0.05) -> list[Grade]:
    group = [Figure(samples) for samples in fleet(n, SEED + seed, spread=spread, slow=bad, by=by)]
    bounds = comparisons.bounds_of_peers(group)
    found = [comparisons.grade(figure, bounds) for figure in group]
    first = comparisons.against_peers(group[0], group)
    assert first is not None
    assert first.grade is found[0], "the short way here is the judge's own"
    return found


def _rates(grades: Iterator[Grade]) -> Rates:
    counted = Counter(grades)
    n = counted.total()
    return Rates(n, counted[Grade.FAIL] / n, counted[Grade.WARN] / n, counted[Grade.INCONCLUSIVE] / n)


@pytest.mark.parametrize("spread", [USUAL, HIGH])
@pytest.mark.parametrize("n", [8, 64, 512])
def test_a_good_gpu_fails_in_less_than_one_run_of_a_thousand(n: int, spread: float) -> None:
    found = clean(n, spread)
    assert found.fail < 0.001, found
    assert found.open < 0.001, found


def test_five_per_cent_among_eight_are_found() -> None:
    found = slow(8, USUAL)
    assert found.found >= 0.95, found
    assert found.fail >= 0.25, "part of them fail at once; the rest warn"


def test_five_per_cent_among_sixty_four_are_found() -> None:
    assert slow(64, USUAL, trials=1000).found >= 0.99


def test_eight_per_cent_fail() -> None:
    assert slow(8, USUAL, by=0.08).fail >= 0.95
    assert slow(64, USUAL, by=0.08, trials=200).fail >= 0.99


def test_three_slow_ones_among_eight_are_found() -> None:
    """The median deviation alone finds few of them: it rises with every slow one. Shares of the median do not."""
    assert slow(8, USUAL, bad=3, trials=300).found >= 0.85


@pytest.mark.parametrize("n", [8, 32])
def test_the_judge_says_the_same(n: int) -> None:
    """What is counted above is what the judge says, from measurements to verdicts."""
    for seed in range(20):
        samples = fleet(n, SEED + seed, spread=HIGH, slow=2, by=0.06)
        found = judge.assess(measured(*samples), context(gpus(n), limits=Thresholds()))
        assert [one.verdict for one in found] == _grades(n, seed, HIGH, 2, 0.06)


def table() -> str:
    """For the docs: what the judge finds and what it does not."""
    lines = [
        "| GPUs | spread | clean: FAIL | clean: WARN | 5 % slow: FAIL | WARN | 8 % slow: FAIL | WARN |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n in (8, 64, 512):
        for spread in (USUAL, HIGH):
            good = clean(n, spread, gpus=120_000)
            five, eight = (slow(n, spread, by=by, trials=2000 if n < 512 else 300) for by in (0.05, 0.08))
            cells = [good.fail, good.warn, five.fail, five.warn, eight.fail, eight.warn]
            lines.append(
                f"| {n} | {100 * spread:.1f} % | " + " | ".join(f"{100 * cell:.2f} %" for cell in cells) + " |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

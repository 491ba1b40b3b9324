"""The same GPU before (C2.5): accepted runs, the newest, measured alike."""

from __future__ import annotations

import random

import pytest

from gpukeeper.acceptance.judging.comparisons import Figure, against_history, earlier_figures
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.machines import measured, past

ASKED = measured(780)[0]


def test_only_accepted_runs_count() -> None:
    pasts = [past(800, 5), past(400, 4, Grade.FAIL), past(500, 3, Grade.INCONCLUSIVE), past(790, 2, Grade.WARN)]
    assert earlier_figures(ASKED, pasts) == (800, 790)


def test_the_newest_five_count_whatever_order_they_come_in() -> None:
    pasts = [past(700 + day, day) for day in range(1, 9)]
    random.Random(1).shuffle(pasts)
    assert earlier_figures(ASKED, pasts) == (705, 704, 703, 702, 701)


@pytest.mark.parametrize("key", ["gemm.bf16 gemm/mm/n4096/normal/burst", "gemm.fp16 gemm/mm/n8192/normal/burst"])
def test_another_method_or_metric_is_another_figure(key: str) -> None:
    assert earlier_figures(ASKED, [past(800, key=key)]) == ()


def test_without_a_past_there_is_nothing_to_compare() -> None:
    assert against_history(Figure((1.0,)), ()) is None


@pytest.mark.parametrize(("value", "verdict"), [(95.0, "PASS"), (94.9, "WARN"), (90.0, "WARN"), (89.9, "FAIL")])
def test_five_per_cent_warn_ten_fail(value: float, verdict: str) -> None:
    found = against_history(Figure((value,) * 3), (100.0, 100.0, 100.0))
    assert found is not None
    assert (found.grade, found.baseline) == (verdict, 100.0)


def test_a_single_earlier_run_never_fails_one() -> None:
    found = against_history(Figure((10.0,) * 3), (100.0, 100.0))
    assert found is not None
    assert found.grade is Grade.WARN


def test_a_latency_gets_worse_by_rising() -> None:
    found = against_history(Figure((1 / 23,) * 3), (20.0, 20.0, 20.0), lower_is_better=True)
    assert found is not None
    assert (found.grade, found.baseline) == (Grade.FAIL, 20.0)
    assert found.loss == pytest.approx(0.13, abs=0.01)

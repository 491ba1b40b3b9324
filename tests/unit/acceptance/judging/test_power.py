"""What a run would have found."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.judging.judge import detection_power
from gpukeeper.acceptance.record import Finding, Power, Thresholds
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.machines import context, gpus, measured, past

FLOOR = Thresholds(floor=702, warn=741, reference=780, ceiling=1009)


def power_of(n: int, limits: Thresholds, value: float = 780, **more: object) -> Power:
    here = context(gpus(n), limits=limits, **more)
    found = detection_power(judge.assess(measured(*[value] * n), here), here)
    assert len(found) == 1
    return found[0]


def test_by_the_floor_alone() -> None:
    found = power_of(1, FLOOR)
    assert (found.check, found.metric, found.by) == ("gemm", "bf16", "floor")
    assert found.fails_at == pytest.approx(0.10)
    assert found.warns_at == pytest.approx(0.05)


def test_peers_notice_less() -> None:
    found = power_of(8, FLOOR)
    assert (found.fails_at, found.warns_at, found.by) == (0.05, 0.03, "peers")


def test_a_gpu_far_above_its_floor_may_lose_much_unseen() -> None:
    assert power_of(1, Thresholds(floor=390, ceiling=1009)).fails_at == pytest.approx(0.5)


def test_an_estimate_cannot_fail() -> None:
    found = power_of(1, Thresholds(floor=702, ceiling=1009, may_fail=False))
    assert (found.fails_at, found.by) == (None, "floor")
    assert found.warns_at == pytest.approx(0.10)


def test_history_notices_five_per_cent() -> None:
    found = power_of(1, Thresholds(), history={"S0": (past(800),)})
    assert (found.fails_at, found.warns_at, found.by) == (None, 0.05, "history")


def test_nothing_to_hold_it_against_finds_nothing() -> None:
    found = power_of(1, Thresholds())
    assert (found.fails_at, found.warns_at, found.by) == (None, None, "nothing")


def test_a_finding_without_a_figure_has_no_power() -> None:
    told = Finding(check="health", verdict=Grade.PASS, code="health-ok", message="Fine.")
    assert detection_power([told], context(gpus(1))) == ()

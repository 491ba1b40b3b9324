"""What is true of any judgement: slower is never better, missing never passes, order does not matter."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.record import Finding, Measurement, Thresholds
from gpukeeper.model.gpu import Grade, rank
from tests.effort import examples
from tests.unit.acceptance.machines import METHOD, context, gpus, past

OFTEN = examples(1)
SAMPLES = st.lists(st.floats(300, 1000), min_size=1, max_size=5)
FLEETS = st.lists(SAMPLES, min_size=1, max_size=20)
LIMITS = st.sampled_from(
    [
        Thresholds(),
        Thresholds(floor=690, warn=740, reference=780, method="gemm/*"),
        Thresholds(floor=690, may_fail=False),
        Thresholds(warn=740),
        Thresholds(floor=690, warn=740, ceiling=900),
    ]
)
PASTS = st.lists(st.floats(500, 900), max_size=6)


def judged(
    fleet: list[list[float]], limits: Thresholds, earlier: list[float], lower: bool = False
) -> tuple[Finding, ...]:
    here = context(
        gpus(len(fleet)), limits=limits, history={"S0": tuple(past(value, i + 1) for i, value in enumerate(earlier))}
    )
    asked = [
        Measurement(
            check="gemm",
            metric="bf16",
            gpu=f"GPU-{i}",
            unit="TFLOP/s",
            method=METHOD,
            samples=tuple(samples),
            lower_is_better=lower,
        )
        for i, samples in enumerate(fleet)
    ]
    return judge.assess(asked, here)


@OFTEN
@given(FLEETS, LIMITS, PASTS, st.floats(0.3, 1.0))
def test_a_slower_gpu_never_gets_a_better_verdict(
    fleet: list[list[float]], limits: Thresholds, earlier: list[float], factor: float
) -> None:
    """Too good to be true is left out: what nobody believes is not better than what is believed."""
    slower = [[factor * sample for sample in fleet[0]], *fleet[1:]]
    before, after = judged(fleet, limits, earlier)[0], judged(slower, limits, earlier)[0]
    if not before.code.endswith("-implausible"):
        assert rank(after.verdict) >= rank(before.verdict), (before.layers, after.layers)


@OFTEN
@given(FLEETS, PASTS, st.floats(1.0, 3.0))
def test_a_longer_latency_never_gets_a_better_verdict(
    fleet: list[list[float]], earlier: list[float], factor: float
) -> None:
    limits = Thresholds(floor=800, warn=600)
    slower = [[factor * sample for sample in fleet[0]], *fleet[1:]]
    before, after = judged(fleet, limits, earlier, lower=True)[0], judged(slower, limits, earlier, lower=True)[0]
    assert rank(after.verdict) >= rank(before.verdict), (before.layers, after.layers)


@OFTEN
@given(FLEETS, LIMITS, st.integers())
def test_the_order_does_not_matter(fleet: list[list[float]], limits: Thresholds, seed: int) -> None:
    here = context(gpus(len(fleet)), limits=limits)
    about: dict[str, Any] = {"check": "gemm", "metric": "bf16", "unit": "TFLOP/s", "method": METHOD}
    asked = [Measurement(gpu=f"GPU-{i}", samples=tuple(samples), **about) for i, samples in enumerate(fleet)]
    shuffled = random.Random(seed).sample(asked, len(asked))
    in_order = {finding.gpu: finding for finding in judge.assess(asked, here)}
    assert {finding.gpu: finding for finding in judge.assess(shuffled, here)} == in_order


@OFTEN
@given(FLEETS, LIMITS, PASTS, st.sampled_from([[], [float("nan")], [float("inf"), 1.0], [-1.0]]))
def test_what_is_missing_never_passes(
    fleet: list[list[float]], limits: Thresholds, earlier: list[float], broken: list[float]
) -> None:
    found = judged([broken, *fleet], limits, earlier)
    assert found[0].verdict is Grade.INCONCLUSIVE
    assert len(found) == len(fleet) + 1


@OFTEN
@given(FLEETS, LIMITS, PASTS)
def test_a_pass_has_something_that_vouches_for_it(
    fleet: list[list[float]], limits: Thresholds, earlier: list[float]
) -> None:
    for finding in judged(fleet, limits, earlier):
        if finding.verdict is Grade.PASS:
            assert finding.floor is not None or limits.warn or finding.peer_n >= 3 or finding.baseline is not None
        assert finding.message.endswith(".")
        assert len(finding.layers) == 3

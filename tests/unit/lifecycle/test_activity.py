"""Active, quiet or unknown, from one-minute buckets, at the edges that cases cannot write down."""

from __future__ import annotations

import msgspec

from gpukeeper.lifecycle.activity import Use, judge
from gpukeeper.model.policy import Activity
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from tests.unit.lifecycle.examples import HOUR, MINUTE, NOW, quiet

THRESHOLDS = Activity(signals=())


def gpu(*minutes: float, ahead: int = 0) -> Series:
    """The last of `minutes` is the present one, or lies `ahead` of now."""
    return Series(Signal.GPU, "GPU-0", NOW - (len(minutes) - 1 - ahead) * MINUTE, minutes)


def test_buckets_of_the_future_are_not_looked_at() -> None:
    """The clock went back: what was written ahead of now says nothing about the past."""
    assert judge([gpu(*[0.0] * 60, 90.0, 90.0, ahead=2)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW).use is Use.QUIET
    assert judge([gpu(0.0, 0.0, ahead=9)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW).use is Use.UNKNOWN


def test_quiet_time_is_claimed_only_as_far_back_as_it_was_measured() -> None:
    found = judge([gpu(*[0.0] * 30)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, 2 * HOUR)
    assert (found.use, found.since, found.used) == (Use.QUIET, NOW - 29 * MINUTE, None)


def test_the_newest_use_is_named_with_its_time() -> None:
    found = judge([gpu(90.0, *[0.0] * 40)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, HOUR)
    assert (found.since, found.used) == (NOW - 39 * MINUTE, NOW - 39 * MINUTE)
    active = judge([gpu(*[0.0] * 40, 90.0, 0.0, 0.0)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW)
    assert (active.use, active.reason) == (Use.ACTIVE, "GPU GPU-0 was in use 2m ago")


def test_a_gpu_that_is_not_its_own_counts_when_it_was_measured() -> None:
    """More was measured than it claims: any active GPU keeps."""
    other = msgspec.structs.replace(gpu(*[90.0] * 60), device="GPU-7")
    assert judge([*quiet(), other], ["GPU-0"], Activity(), HOUR / 2, NOW).use is Use.ACTIVE


def test_a_window_shorter_than_a_minute_is_a_minute() -> None:
    assert judge([gpu(*[0.0] * 9)], ["GPU-0"], THRESHOLDS, MINUTE / 2, NOW, HOUR).use is Use.QUIET
    assert judge([gpu(*[NOT_MEASURED] * 9)], ["GPU-0"], THRESHOLDS, MINUTE / 2, NOW, HOUR).use is Use.UNKNOWN

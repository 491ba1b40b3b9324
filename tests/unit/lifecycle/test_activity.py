"""Active, quiet or unknown, from one-minute buckets, at the edges that cases cannot write down."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from gpukeeper.lifecycle.activity import Use, active_minutes, assess_use
from gpukeeper.model.policy import Activity
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import HOUR, MINUTE, NOW, quiet

THRESHOLDS = Activity(signals=())


def gpu(*minutes: float, ahead: int = 0) -> Series:
    """The last of `minutes` is the present one, or lies `ahead` of now."""
    return Series(Signal.GPU, "GPU-0", NOW - (len(minutes) - 1 - ahead) * MINUTE, minutes)


def test_buckets_of_the_future_are_not_read() -> None:
    """The clock went back: what was written ahead of now says nothing about the past."""
    assert assess_use([gpu(*[0.0] * 60, 90.0, 90.0, ahead=2)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW).use is Use.QUIET
    assert assess_use([gpu(0.0, 0.0, ahead=9)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW).use is Use.UNKNOWN


def test_quiet_time_is_claimed_only_as_far_back_as_it_was_measured() -> None:
    found = assess_use([gpu(*[0.0] * 30)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, 2 * HOUR)
    assert (found.use, found.since, found.used) == (Use.QUIET, NOW - 29 * MINUTE, None)


def test_what_never_worked_is_quiet_since_it_was_first_measured() -> None:
    """Not since the window began: otherwise its limit would end with the present minute for ever."""
    found = assess_use([gpu(*[0.0] * 34)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, 2 * HOUR)
    assert (found.use, found.since, found.used) == (Use.QUIET, NOW - 33 * MINUTE, None)
    gaps = [0.0, *[NOT_MEASURED] * 20, *[0.0] * 30]
    assert assess_use([gpu(*gaps)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, 2 * HOUR).since == NOW - 29 * MINUTE


def test_the_newest_use_is_named_with_its_time() -> None:
    found = assess_use([gpu(90.0, *[0.0] * 40)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, HOUR)
    assert (found.since, found.used) == (NOW - 39 * MINUTE, NOW - 39 * MINUTE)
    active = assess_use([gpu(*[0.0] * 40, 90.0, 0.0, 0.0)], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW)
    assert (active.use, active.reason) == (Use.ACTIVE, "GPU GPU-0 was in use 2m ago")


def test_busy_work_is_never_quiet_however_short_the_settle_time_is() -> None:
    """A GPU at 88 % in the minute that is just over read "idle for 1s"."""
    at = NOW + timedelta(seconds=1)
    for settle in (0 * MINUTE, MINUTE / 2, MINUTE, 2 * MINUTE):
        short = Activity(signals=(), settle=settle)
        until_now = gpu(*[0.0] * 40, 88.0, ahead=-1)
        assert assess_use([until_now], ["GPU-0"], short, HOUR / 2, at).use is Use.ACTIVE
        # What was read last is that it was busy.
        not_since = gpu(*[0.0] * 40, 88.0, ahead=-2)
        assert assess_use([not_since], ["GPU-0"], short, HOUR / 2, at).use is Use.ACTIVE
    over = assess_use([gpu(*[0.0] * 40, 88.0, 0.0, 0.0)], ["GPU-0"], short, HOUR / 2, at)
    assert (over.use, over.since) == (Use.QUIET, NOW - MINUTE)


def test_a_gpu_that_it_no_longer_holds_says_nothing() -> None:
    """A re-partition leaves series of slices that are gone: neither their use nor their failed reads are anybody's."""
    used = msgspec.structs.replace(gpu(*[90.0] * 60), device="MIG-7")
    lost = msgspec.structs.replace(gpu(), device="MIG-8", missing=Unknown("no such slice"))
    assert assess_use([*quiet(), used, lost], ["GPU-0"], Activity(), HOUR / 2, NOW).use is Use.QUIET
    assert assess_use([used, lost], ["MIG-9"], Activity(), HOUR / 2, NOW).use is Use.UNKNOWN


def test_active_minutes_are_measured_minutes_of_its_own_gpus_since_then() -> None:
    ten = [90.0] * 5 + [NOT_MEASURED] * 5
    one, other = gpu(*ten), msgspec.structs.replace(gpu(*[0.0] * 4, *[90.0] * 6), device="GPU-1")
    thresholds = Activity()
    assert active_minutes([one], ["GPU-0"], thresholds, NOW - HOUR) == 5 * MINUTE
    assert active_minutes([one, other], ["GPU-0", "GPU-1"], thresholds, NOW - HOUR) == 10 * MINUTE
    assert active_minutes([one, other], ["GPU-0"], thresholds, NOW - HOUR) == 5 * MINUTE
    assert active_minutes([other], ["GPU-1"], thresholds, NOW - 2 * MINUTE) == 3 * MINUTE
    assert active_minutes((), ["GPU-0"], thresholds, NOW - HOUR) == 0 * MINUTE


def test_a_window_shorter_than_a_minute_is_a_minute() -> None:
    assert assess_use([gpu(*[0.0] * 9)], ["GPU-0"], THRESHOLDS, MINUTE / 2, NOW, HOUR).use is Use.QUIET
    assert assess_use([gpu(*[NOT_MEASURED] * 9)], ["GPU-0"], THRESHOLDS, MINUTE / 2, NOW, HOUR).use is Use.UNKNOWN


def claims(since: int, until: int, *minutes: float) -> Series:
    """Buckets up to now, and a span in minutes ago that the series claims to be without a gap."""
    return msgspec.structs.replace(gpu(*minutes), since=NOW - since * MINUTE, until=NOW - until * MINUTE)


def quiet_since(one: Series) -> object:
    """In minutes ago; else the verdict."""
    found = assess_use([one], ["GPU-0"], THRESHOLDS, HOUR / 2, NOW, 2 * HOUR)
    return found.use if found.since is None else (NOW - found.since) // MINUTE


def test_a_span_without_a_gap_counts_only_as_far_as_the_buckets_bear_it_out() -> None:
    """A store that says "measured for 90 minutes" and has no values for an hour of them is wrong about one of both."""
    gap, bridged = [NOT_MEASURED] * 20, [NOT_MEASURED] * 2
    assert quiet_since(claims(90, 0, *[0.0] * 91)) == 90
    assert quiet_since(claims(90, 0, *[0.0] * 20, *gap, *[0.0] * 51)) == 50
    # One reading speaks for two minutes, and is in the bucket of its end.
    assert quiet_since(claims(90, 0, *[0.0] * 40, *bridged, *[0.0] * 49)) == 90
    # The window may begin after the span did.
    assert quiet_since(claims(500, 0, *[0.0] * 91)) == 90
    assert quiet_since(claims(90, 0, *[NOT_MEASURED] * 40, *[0.0] * 51)) == 50


def test_a_span_that_no_bucket_bears_out_is_not_measured() -> None:
    assert quiet_since(claims(90, 0, *[NOT_MEASURED] * 91)) is Use.UNKNOWN
    assert quiet_since(claims(90, 0)) is Use.UNKNOWN
    # Its newest reading is older than it says.
    assert quiet_since(claims(90, 0, *[0.0] * 80, *[NOT_MEASURED] * 11)) is Use.UNKNOWN

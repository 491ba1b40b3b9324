"""Is it idle? Pure, from one-minute buckets; shared by plan, explain and backtests. And which GPUs running work holds
and does not use: a report from which nothing follows.

GPU first: one bucket over its threshold makes a workload active, however quiet the rest. Every other signal can only
keep. What was not measured is never quiet: a gap in any signal ends the quiet time before it, like use does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from math import isnan

import msgspec

from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.policy import Activity as Thresholds
from gpukeeper.model.series import BRIDGED_MAX, Series, Signal
from gpukeeper.model.subject import LIVE, Ref, Shape
from gpukeeper.model.unknown import Unknown, direct
from gpukeeper.model.words import in_words

MINUTE = timedelta(minutes=1)
NOTHING = timedelta()
TAIL_MAX = 3 * MINUTE  # since the newest reading: a cluster reports a minute after it is over and was scraped
ALL = 10**9  # buckets
_GPU = Signal.GPU  # a global is read faster than a member of an enum
BRIDGED = BRIDGED_MAX // MINUTE  # empty buckets between two readings that cover all the time between them
PAIR = 5  # two busy buckets of a secondary signal within this many count as activity; a lone one is a probe


@direct
class Use(StrEnum):
    ACTIVE = "active"
    QUIET = "quiet"
    UNKNOWN = "unknown"


class UseAssessment(msgspec.Struct, frozen=True, gc=False):
    """`since`: beginning of the quiet time: the newest use or the end of the newest gap. `used`: newest activity; None
    when there was none within the horizon. `skipped`: of what is not active, signals absent by design."""

    use: Use
    reason: str
    since: datetime | None = None
    used: datetime | None = None
    skipped: tuple[str, ...] = ()


def assess_use(
    series: Sequence[Series],
    devices: Sequence[str],
    thresholds: Thresholds,
    window: timedelta,
    now: datetime,
    horizon: timedelta = NOTHING,
) -> UseAssessment:
    """Active, quiet since when, or unknown and why. Searches for activity as far back as `horizon`."""
    minutes = max(1, window // MINUTE)
    reach = max(minutes, horizon // MINUTE)
    newest_bucket = _minute(now)
    gpus, others = _by_signal(series, devices)
    unmeasured = _unmeasured(gpus, devices, window)
    if unmeasured is not None:
        return UseAssessment(Use.UNKNOWN, unmeasured)
    quiet = reach  # buckets since the newest activity
    newest = ""
    for one in gpus:
        if not quiet:
            break  # nothing is newer than now
        back = _last_busy(one, thresholds.gpu_slice if one.slice else thresholds.gpu, quiet, newest_bucket)
        if back < quiet:
            quiet, newest = back, f"GPU {one.device}"
    secondary = _secondary(others, thresholds)
    if isinstance(secondary, str):
        return UseAssessment(Use.UNKNOWN, secondary)
    vetoes = [one for one in secondary if one.missing is None] if quiet else []
    for one in vetoes:
        if not quiet:
            break
        back = _last_pair(one, secondary_threshold(one.signal, thresholds, window), quiet, reach, newest_bucket)
        if back < quiet:
            quiet, newest = back, one.signal
    # Less than a minute without use is no quiet time, however short `settle` is.
    if quiet < thresholds.settle // MINUTE or (newest and quiet < 2):
        return UseAssessment(Use.ACTIVE, f"{newest} was in use {_ago(quiet)}")
    skipped = tuple([f"{one.signal} ({one.missing.why})" for one in secondary if one.missing is not None])
    judged = _assess_quiet(gpus + vetoes, thresholds, quiet, reach, now, skipped)
    return judged or UseAssessment(Use.ACTIVE, f"{newest} was in use {_ago(quiet)}")


def _by_signal(series: Sequence[Series], devices: Sequence[str]) -> tuple[list[Series], dict[str, list[Series]]]:
    """Those of its GPUs, and all others. Only of what it holds now: a slice that was created again leaves a series
    behind that belongs to no workload."""
    gpus: list[Series] = []
    others: dict[str, list[Series]] = {}
    for one in series:
        signal = one.signal
        if signal is not _GPU:
            others.setdefault(signal, []).append(one)
        elif one.device in devices:
            gpus.append(one)
    return gpus, others


def _unmeasured(gpus: Sequence[Series], devices: Sequence[str], window: timedelta) -> str | None:
    """Why the use of its GPUs is unknown; None if every one was measured."""
    if not gpus:
        return f"GPU use was not measured yet: needs `gpukeeper serve` running for {in_words(window)}"
    measured = {one.device for one in gpus}
    if not measured.issuperset(devices):
        return f"use of GPU {min(set(devices) - measured)} was not measured; every GPU must be"
    for one in gpus:
        if one.missing is not None:
            return f"GPU use could not be measured ({one.missing.why}); not measured is not idle"
    return None


def active_minutes(
    series: Sequence[Series], devices: Sequence[str], thresholds: Thresholds, since: datetime
) -> timedelta:
    """Minutes from `since` on in which a GPU of it was measured to be in use."""
    busy: set[datetime] = set()
    for one in series:
        if one.signal is Signal.GPU and one.device in devices:
            threshold = thresholds.gpu_slice if one.slice else thresholds.gpu
            busy.update(one.start + n * MINUTE for n, value in enumerate(one.minutes) if value >= threshold)
    return sum(minute >= since for minute in busy) * MINUTE


def _secondary(others: Mapping[str, list[Series]], thresholds: Thresholds) -> list[Series] | str:
    """The signals that can veto, those absent by design included; a sentence when one should be there and is not."""
    found: list[Series] = []
    for name in thresholds.signals:
        mine = others.get(name)
        if not mine:
            return f"{name} use was not measured, and it can veto"
        for one in mine:
            if one.missing is not None and not one.missing.by_design:
                return f"{name} use could not be read ({one.missing.why}), and it can veto"
        found += mine
    return found


def _assess_quiet(
    measured: Sequence[Series],
    thresholds: Thresholds,
    quiet: int,
    reach: int,
    now: datetime,
    skipped: tuple[str, ...],
) -> UseAssessment | None:
    """Quiet since the newest use, or since the newest gap: what was not measured is never counted. None: nothing was
    measured after the newest use."""
    end = _minute(now) + MINUTE
    since = end - quiet * MINUTE
    used = since if quiet < reach else None
    for one in measured:
        span = measured_span(one, now)
        if span is None:
            return UseAssessment(
                Use.UNKNOWN, f"{_name(one)} was not measured; not measured is not idle", skipped=skipped
            )
        if now - span[1] > TAIL_MAX:
            words = f"{_name(one)} was last measured {in_words(now - span[1])} ago; not measured is not idle"
            return UseAssessment(Use.UNKNOWN, words, skipped=skipped)
        if used is not None and span[1] <= used:
            return None
        if span[0] > since and now - span[0] < thresholds.settle:
            words = (
                f"{_name(one)} has been measured without a gap only for {in_words(max(now - span[0], NOTHING))}, "
                f"{in_words(thresholds.settle)} are needed; not measured is not idle"
            )
            return UseAssessment(Use.UNKNOWN, words, skipped=skipped)
        since = max(since, span[0])
    return UseAssessment(Use.QUIET, f"no use for {in_words(now - since)}", since, used, skipped)


def measured_span(one: Series, now: datetime) -> tuple[datetime, datetime] | None:
    """From when to when it was measured without a gap, up to the newest reading. None: it was not measured."""
    if one.since is not None and one.until is not None:
        return _borne_out(one, one.since, min(one.until, now))
    end = _minute(now) + MINUTE
    if one.minutes and not isnan(sum(one.minutes)):  # by far the fastest question; almost always there is no gap
        until = one.start + len(one.minutes) * MINUTE
        if until <= end:
            return one.start, min(until, now)
    values = _newest_first(one, ALL, _minute(now))
    newest, oldest = 0, len(values)
    while newest < oldest and isnan(values[newest]):
        newest += 1
    if newest == oldest:
        return None
    oldest = next((back for back in range(newest, oldest) if isnan(values[back])), oldest)
    return end - oldest * MINUTE, min(end - newest * MINUTE, now)


def _borne_out(one: Series, since: datetime, until: datetime) -> tuple[datetime, datetime] | None:
    """As much of that span as its buckets confirm. A reading covers BRIDGED_MAX at most and is in the bucket of its
    end, so more empty buckets in a row than that are a gap, whatever the span is."""
    since = max(since, one.start)
    first = (_minute(since) - one.start) // MINUTE
    last = (_minute(until) - one.start) // MINUTE
    claimed = one.minutes[first : last + 1]
    if last < len(one.minutes) and claimed and not isnan(sum(claimed)):
        return since, until
    measured = [first + n for n, value in enumerate(claimed) if not isnan(value)]
    if not measured:
        return None
    until = min(until, one.start + (measured[-1] + 1) * MINUTE)
    pairs = zip(reversed(measured[:-1]), reversed(measured[1:]), strict=True)
    resumed = next((after for before, after in pairs if after - before - 1 > BRIDGED), None)
    if resumed is None and (measured[0] - first > BRIDGED):
        resumed = measured[0]
    return since if resumed is None else max(since, one.start + resumed * MINUTE), until


def _name(one: Series) -> str:
    return f"GPU {one.device}" if one.signal is Signal.GPU else f"{one.signal} use"


def _newest_first(one: Series, minutes: int, newest_bucket: datetime) -> Sequence[float]:
    """The buckets of the last `minutes`, newest first; buckets missing at the newest end are NaN."""
    behind = _behind(one, newest_bucket)
    if behind < 0:
        return one.minutes[behind - 1 :: -1][:minutes]
    if behind:
        return ((float("nan"),) * behind + one.minutes[::-1])[:minutes]
    return one.minutes[: -minutes - 1 : -1]


def _behind(one: Series, newest_bucket: datetime) -> int:
    """How many buckets are missing at its newest end."""
    return (newest_bucket - one.start) // MINUTE + 1 - len(one.minutes)


def _last_busy(one: Series, threshold: float, minutes: int, newest_bucket: datetime) -> int:
    """How many buckets ago it was last at or over the threshold; `minutes` when it was not."""
    if one.minutes and one.minutes[-1] >= threshold and _behind(one, newest_bucket) == 0:
        return 0  # most of what is busy
    if _all_below(one.minutes, threshold):
        return minutes
    for back, value in enumerate(_newest_first(one, minutes, newest_bucket)):
        if value >= threshold:
            return back
    return minutes


def _last_pair(one: Series, threshold: float, minutes: int, reach: int, newest_bucket: datetime) -> int:
    """Terminal input counts alone; of the others a lone busy bucket is forgiven.

    Only what is newer than `minutes` is of interest; the other of a pair may be a little older.
    """
    if _all_below(one.minutes, threshold):
        return minutes
    values = _newest_first(one, min(minutes + PAIR - 1, reach), newest_bucket)
    earlier: int | None = None
    for back, value in enumerate(values):
        if value >= threshold:
            if one.signal is Signal.TERMINAL:
                return back
            if earlier is not None and back - earlier < PAIR:
                return earlier
            earlier = back
    return minutes


def _all_below(values: Sequence[float], threshold: float) -> bool:
    """Quickly, for most. False as well when a NaN comes first, of which max() makes nothing."""
    return not values or (values[0] < threshold and max(values) < threshold)


def secondary_threshold(signal: Signal, thresholds: Thresholds, window: timedelta) -> float:
    match signal:
        case Signal.CPU:
            return thresholds.cpu
        case Signal.NETWORK:
            return thresholds.network / window.total_seconds()
        case Signal.DISK:
            return thresholds.disk
        case _:
            return 1e-9  # any terminal input at all


@lru_cache(maxsize=16)
def _minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)


def _ago(minutes: int) -> str:
    return "just now" if minutes == 0 else f"{minutes}m ago"


WASTED_AFTER = timedelta(minutes=30)
WASTED_SEARCHED = timedelta(hours=4)  # how far back its last use is searched


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """One workload and the GPUs that it does not use. `at_least`: it may be longer; no use was ever seen.

    Unlike the idle rule it is judged by GPU use alone, of every class, held and exempt work included: no one is
    warned or stopped by it. What was not measured is not reported as waste.
    """

    ref: Ref
    owner: str | Unknown | None
    class_: str | Unknown
    devices: tuple[str, ...]
    since: datetime
    at_least: bool


def wasted(view: View, book: Rulebook, now: datetime) -> Waste | None:
    """None: it uses its GPUs, has none, was not measured long enough, or is never touched anyway."""
    subject = view.subject
    if subject.shape is not Shape.WORKLOAD or subject.root is not None or subject.state not in LIVE:
        return None
    if isinstance(subject.devices, Unknown) or not subject.devices or not view.series:
        return None
    untouchable = book.settings(subject).untouchable
    if not isinstance(untouchable, Unknown) and untouchable:
        return None
    # The present minute is not over, so that it takes one more.
    judged = assess_use(view.series, subject.devices, book.gpu_alone, WASTED_AFTER + MINUTE, now, WASTED_SEARCHED)
    if judged.use is not Use.QUIET or judged.since is None or now - judged.since < WASTED_AFTER:
        return None
    return Waste(
        ref=subject.ref,
        owner=subject.owner,
        class_=subject.class_,
        devices=subject.devices,
        since=judged.since,
        at_least=judged.used is None,
    )

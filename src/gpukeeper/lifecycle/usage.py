"""Which GPU was in use by what, minute by minute: from what passes saw and what was measured. Pure.

A minute of a device is active or idle (held, and measured), free, or not measured. Nothing is guessed: a holder that
was not measured has minutes of unknown use, and what lies between two looks that do not fit together stays open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil, isnan
from typing import TypeAlias

import msgspec

from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.direct import direct
from gpukeeper.model.policy import Activity, Policy
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.usage import FREE, OUTSIDE, QUARANTINE, Holder, HourUse, merged, minute_of, moment_of

HALF = timedelta(seconds=30)
_NOT_HELD = (ClaimState.INFRASTRUCTURE,)  # a device with only these is free


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One device that a workload has, as of one look. `since`: start of the run, or of the time for which the device is
    kept after a stop (`kept`): then nothing runs, so it is held and idle without a measurement."""

    place: str
    device: str
    holder: Holder
    since: datetime | None = None
    kept: bool = False
    listed: bool = True
    slice: bool = False

    @property
    def id(self) -> HoldingId:
        return self.holder.key, self.device


HoldingId: TypeAlias = tuple[str, str]  # key of the workload, and device
DeviceId: TypeAlias = tuple[str, str]  # place and device


@direct
class Vacancy(StrEnum):
    """A device by itself, whichever workload claims it."""

    VACANT = "vacant"
    TAKEN = "taken"  # a process has it open
    UNSURE = "unsure"
    QUARANTINE = "quarantine"


class DeviceSeen(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    device: str
    model: str = ""
    share: float | None = 1.0
    vacancy: Vacancy = Vacancy.UNSURE


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at a place found of GPUs. `read`: keys it was about, if not `whole`. `ended`: by key, when what has
    no device any more ended."""

    at: datetime
    whole: bool = True
    complete: bool = True
    holdings: tuple[Holding, ...] = ()
    devices: tuple[DeviceSeen, ...] = ()
    read: frozenset[str] = frozenset()
    ended: Mapping[str, datetime] = {}


class Tenure(msgspec.Struct, frozen=True, kw_only=True):
    """A holding over time: seen from `since` to `until`. `ended`: known end; nothing is counted after it."""

    holding: Holding
    since: datetime
    until: datetime
    ended: datetime | None = None

    def covers(self, middle: datetime, *, measured: bool) -> bool:
        """The minute with this middle. A measurement proves it also before the first and after the last look."""
        if self.ended is not None and middle >= self.ended:
            return False
        if self.since <= middle < self.until:
            return True
        return measured and (self.holding.since is None or middle >= self.holding.since)


class VacantSpan(msgspec.Struct, frozen=True, kw_only=True):
    vacancy: Vacancy
    since: datetime
    until: datetime


# Claims over time.


def advance(
    tenures: Mapping[HoldingId, Tenure], sight: Sight, before: datetime | None
) -> tuple[dict[HoldingId, Tenure], list[Tenure]]:
    """After one more look: those that last, and those that are over. `before`: the whole look before this one; None:
    there was none, or it was too long ago."""
    lasting, over = dict(tenures), list[Tenure]()
    for holding in sight.holdings:
        known = lasting.get(holding.id)
        if known is not None and _is_same_run(known.holding, holding):
            lasting[holding.id] = msgspec.structs.replace(known, holding=holding, until=max(known.until, sight.at))
            continue
        if known is not None:
            over.append(_ended(known, holding.since if holding.kept else None, holding.since or sight.at))
        lasting[holding.id] = Tenure(holding=holding, since=_begin(holding, before, sight.at), until=sight.at)
    seen = {one.id for one in sight.holdings}
    for id_, known in tenures.items():
        if id_ not in seen and (id_[0] in sight.read or (sight.whole and sight.complete)):
            over.append(_ended(known, sight.ended.get(id_[0]), sight.at))
            del lasting[id_]
    return lasting, over


def _is_same_run(before: Holding, now: Holding) -> bool:
    return (before.since, before.kept) == (now.since, now.kept)


def _begin(holding: Holding, before: datetime | None, now: datetime) -> datetime:
    """Its own beginning, as far as somebody looked: what was before the first look is known by measurements only."""
    if holding.since is None or before is None:
        return now
    return min(max(holding.since, before), now)


def _ended(tenure: Tenure, at: datetime | None, now: datetime) -> Tenure:
    """Without a known end it may have had the device until `now`: after the last look only what was measured counts."""
    if at is None:
        return msgspec.structs.replace(tenure, ended=now)
    at = max(tenure.since, at)
    return msgspec.structs.replace(tenure, ended=at, until=at)


def advance_vacancy(
    spans: Mapping[DeviceId, VacantSpan],
    devices: Iterable[DeviceSeen],
    at: datetime,
    bridged: timedelta,
    begun: Mapping[DeviceId, datetime],
) -> tuple[dict[DeviceId, VacantSpan], list[tuple[DeviceId, VacantSpan]]]:
    """The same for the devices by themselves. Two looks that agree speak for the time between them, if that is no
    longer than `bridged`. `begun`: the earliest start of what has a device now; it was vacant until then."""
    lasting, over = dict(spans), list[tuple[DeviceId, VacantSpan]]()
    for one in devices:
        id_ = (one.place, one.device)
        known = lasting.get(id_)
        if known is not None and known.vacancy is one.vacancy and at - known.until <= bridged:
            lasting[id_] = msgspec.structs.replace(known, until=max(known.until, at))
            continue
        if known is not None:
            start = begun.get(id_)
            if known.vacancy is Vacancy.VACANT and start is not None and known.until < start <= at:
                known = msgspec.structs.replace(known, until=start if start - known.until <= bridged else known.until)
            over.append((id_, known))
        lasting[id_] = VacantSpan(vacancy=one.vacancy, since=at, until=at)
    return lasting, over


# Minutes.


def fold(
    tenures: Sequence[Tenure],
    vacancies: Sequence[tuple[DeviceId, VacantSpan]],
    series: Mapping[str, Sequence[Series]],
    thresholds: Activity,
    window: tuple[int, int],
) -> list[HourUse]:
    """The minutes of this window (first and end, in minutes since 1970) as far as they are known."""
    found: dict[tuple[int, str, str, str, str], HourUse] = {}
    for one in tenures:
        states = _minutes_of(one, series.get(one.holding.holder.key, ()), thresholds, window)
        _add(found, one.holding.place, one.holding.device, one.holding.holder, states)
    for (place, device), span in vacancies:
        holder = _NOBODY.get(span.vacancy)
        if holder is not None:
            state = "free" if holder is FREE else "unknown"
            minutes = ((m, state) for m in range(*_within(span.since, span.until, window)))
            _add(found, place, device, holder, minutes)
    return [found[key] for key in sorted(found)]


_NOBODY = {
    Vacancy.VACANT: FREE,
    Vacancy.TAKEN: Holder(class_=OUTSIDE),
    Vacancy.QUARANTINE: Holder(class_=QUARANTINE),
}


def _minutes_of(
    tenure: Tenure, series: Sequence[Series], thresholds: Activity, window: tuple[int, int]
) -> Iterator[tuple[int, str]]:
    use = _use(series, tenure.holding.device)
    threshold = thresholds.gpu_slice if tenure.holding.slice else thresholds.gpu
    for minute in range(*window):
        value = None if tenure.holding.kept else use.get(minute)
        if not tenure.covers(moment_of(minute) + HALF, measured=value is not None):
            continue
        if value is None:
            yield minute, "idle" if tenure.holding.kept else "unknown"
        else:
            yield minute, "active" if value >= threshold else "idle"


def _use(series: Sequence[Series], device: str) -> dict[int, float]:
    """By minute: percent, where it was measured."""
    found: dict[int, float] = {}
    for one in series:
        if one.signal is Signal.GPU and one.device == device:
            first = minute_of(one.start)
            found.update((first + n, value) for n, value in enumerate(one.minutes) if not isnan(value))
    return found


def _within(since: datetime, until: datetime, window: tuple[int, int]) -> tuple[int, int]:
    """The minutes whose middle lies between them."""
    first, end = (ceil((at - HALF).timestamp() / 60) for at in (since, until))
    return max(first, window[0]), min(end, window[1])


def _add(
    found: dict[tuple[int, str, str, str, str], HourUse],
    place: str,
    device: str,
    holder: Holder,
    states: Iterable[tuple[int, str]],
) -> None:
    masks: dict[int, dict[str, int]] = {}
    for minute, state in states:
        here = masks.setdefault(minute // 60, {})
        here[state] = here.get(state, 0) | 1 << minute % 60
    for hour, mask in masks.items():
        added = HourUse(hour=hour, place=place, device=device, holder=holder, **mask)
        key = (hour, place, device, holder.key, holder.class_)
        known = found.get(key)
        found[key] = added if known is None else msgspec.structs.replace(merged(known, added), holder=holder)


# From subjects.


def holdings_of(
    subject: Subject, how: ClaimState | None, book: Rulebook, listed: Collection[DeviceId]
) -> list[Holding]:
    """The devices it has. Where it is not known which they are, none can be counted."""
    if how is None or how in _NOT_HELD or isinstance(subject.devices, Unknown):
        return []
    kept = how is ClaimState.KEPT
    since = subject.ended if kept else subject.started
    place = subject.ref.place
    holder = Holder(
        key=subject.ref.key,
        path=subject.ref.path,
        owner=subject.owner if isinstance(subject.owner, str) else "",
        class_=book.settings(subject).class_name,
        group=group_of(book.policy, subject),
    )
    return [
        Holding(
            place=place,
            device=device,
            holder=holder,
            since=since if isinstance(since, datetime) else None,
            kept=kept,
            listed=(place, device) in listed,
            slice=device in subject.slices,
        )
        for device in subject.devices
    ]


def group_of(policy: Policy, subject: Subject) -> str:
    """The first group of the policy that has its owner, so that each hour is counted in one group only."""
    if not isinstance(subject.owner, str) or not subject.owner_verified:
        return ""
    return next((name for name, group in policy.groups.items() if subject.owner in group.members), "")

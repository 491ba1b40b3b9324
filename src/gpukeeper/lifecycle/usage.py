"""Which GPU was in use by what, minute by minute: from what passes saw and what was measured. Pure.

A minute of a device is active or idle (held, and measured), free, or not measured. Nothing is guessed: a holder that
was not measured has minutes of unknown use, and what lies between two looks that do not fit together stays open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil, isnan
from typing import TypeAlias

import msgspec

from gpukeeper.lifecycle.claims import ClaimState, blocks_use
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import Activity, Policy
from gpukeeper.model.series import (
    FREE,
    OUTSIDE,
    QUARANTINE,
    WHOLE_HOUR,
    Holder,
    HourUse,
    Series,
    Signal,
    merged_uses,
    minute_of,
)
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown, direct

HALF = timedelta(seconds=30)


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One device that a workload has, as of one look. `since`: start of the run, or of the time for which the device is
    kept after a stop (`kept`): then nothing runs, so it is held and idle without a measurement."""

    place: str
    device: str
    holder: Holder
    since: datetime | None = None
    previous_end: datetime | None = None  # of the run before
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
    """A device by itself. Only `held` follows from what workloads claim."""

    VACANT = "vacant"
    HELD = "held"  # a workload has it
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
    """A holding over time: seen from `since` to `until`. `ended`: nothing is counted after it, whether or not it
    was the end."""

    holding: Holding
    since: datetime
    until: datetime
    ended: datetime | None = None
    end_known: bool = False


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
            end = holding.since if holding.kept else holding.previous_end
            over.append(_ended(known, end, holding.since or sight.at))
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
    """Without a known end it may have had the device until `now`: after the last look only what was measured counts.
    An end before the last look was not the end of its hold: children of what ended had the device on."""
    if at is None:
        return msgspec.structs.replace(tenure, ended=now)
    if at < tenure.until:
        return msgspec.structs.replace(tenure, ended=tenure.until)
    at = min(at, now)
    return msgspec.structs.replace(tenure, ended=at, until=at, end_known=True)


class Handover(msgspec.Struct, frozen=True):
    """What is known of the time between two looks at a device. `begun`: the earliest start of what has it now.
    `ended`: the latest end of what had it; Unknown: of one of them it is not known."""

    begun: datetime | None = None
    ended: datetime | Unknown | None = None


def handovers(lasting: Iterable[Tenure], over: Iterable[Tenure]) -> dict[DeviceId, Handover]:
    found: dict[DeviceId, Handover] = {}
    for one in lasting:
        id_ = (one.holding.place, one.holding.device)
        known = found.get(id_, Handover())
        begun = one.since if known.begun is None else min(known.begun, one.since)
        found[id_] = msgspec.structs.replace(known, begun=begun)
    for one in over:
        id_ = (one.holding.place, one.holding.device)
        known = found.get(id_, Handover())
        if not one.end_known or isinstance(known.ended, Unknown):
            found[id_] = msgspec.structs.replace(known, ended=Unknown("its end was not seen"))
        else:
            found[id_] = msgspec.structs.replace(known, ended=max(one.until, known.ended or one.until))
    return found


def advance_vacancy(
    spans: Mapping[DeviceId, VacantSpan],
    devices: Iterable[DeviceSeen],
    at: datetime,
    bridged: timedelta,
    between: Mapping[DeviceId, Handover],
) -> tuple[dict[DeviceId, VacantSpan], list[tuple[DeviceId, VacantSpan]]]:
    """The same for the devices by themselves. Two looks that agree speak for the time between them, if that is no
    longer than `bridged`. A device is vacant until the known start of what took it, and from its known end on."""
    lasting, over = dict(spans), list[tuple[DeviceId, VacantSpan]]()
    for one in devices:
        id_ = (one.place, one.device)
        known, change = lasting.get(id_), between.get(id_, Handover())
        vacancy = Vacancy.HELD if change.begun is not None and one.vacancy is not Vacancy.QUARANTINE else one.vacancy
        begin = at
        if known is not None and at - known.until <= bridged:
            unseen = isinstance(change.ended, Unknown)
            if known.vacancy is vacancy and not (unseen and vacancy is Vacancy.VACANT):
                lasting[id_] = msgspec.structs.replace(known, until=max(known.until, at))
                continue
            if known.vacancy is Vacancy.VACANT and change.begun is not None and known.until < change.begun <= at:
                known = msgspec.structs.replace(known, until=change.begun)
            if known.vacancy is Vacancy.HELD and vacancy is Vacancy.VACANT and isinstance(change.ended, datetime):
                begin = min(max(change.ended, known.until), at)
        if known is not None:
            over.append((id_, known))
        lasting[id_] = VacantSpan(vacancy=vacancy, since=begin, until=at)
    return lasting, over


# Minutes. A mask has one bit for each minute of the window.


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
        states = _states_of(one, series.get(one.holding.holder.key, ()), thresholds, window)
        _add(found, one.holding.place, one.holding.device, one.holding.holder, states, window[0])
    for (place, device), span in vacancies:
        holder = _NOBODY.get(span.vacancy)
        if holder is not None:
            states = {"free" if holder is FREE else "unknown": _between(span.since, span.until, window)}
            _add(found, place, device, holder, states, window[0])
    return [found[key] for key in sorted(found)]


_NOBODY = {
    Vacancy.VACANT: FREE,
    Vacancy.TAKEN: Holder(class_=OUTSIDE),
    Vacancy.QUARANTINE: Holder(class_=QUARANTINE),
}


def _states_of(
    tenure: Tenure, series: Sequence[Series], thresholds: Activity, window: tuple[int, int]
) -> dict[str, int]:
    """By state. A measurement proves that it was held also before the first look, and between the last one and the one
    that found it gone. What was measured after the last look waits for the next: it may have ended."""
    holding, ended = tenure.holding, tenure.ended or tenure.until
    held = _between(tenure.since, min(tenure.until, ended), window)
    if holding.kept:
        return {"idle": held}
    threshold = thresholds.gpu_slice if holding.slice else thresholds.gpu
    active, idle = _measured(series, holding.device, threshold, window)
    run = _between(holding.since, ended, window)
    return {"active": active & run, "idle": idle & run, "unknown": held & ~(active | idle)}


def _measured(series: Sequence[Series], device: str, threshold: float, window: tuple[int, int]) -> tuple[int, int]:
    """The minutes at or above the threshold, and those below it. What was not measured is in neither."""
    active, idle = 0, 0
    for one in series:
        if one.signal is Signal.GPU and one.device == device:
            shift = minute_of(one.start) - window[0]
            for number, value in enumerate(one.minutes, shift):
                if 0 <= number < window[1] - window[0] and not isnan(value):
                    if value >= threshold:
                        active |= 1 << number
                    else:
                        idle |= 1 << number
    return active, idle & ~active


def _between(since: datetime | None, until: datetime | None, window: tuple[int, int]) -> int:
    """The minutes whose middle lies between them. None: without an end."""
    length = window[1] - window[0]
    first = 0 if since is None else max(ceil((since - HALF).timestamp() / 60) - window[0], 0)
    end = length if until is None else min(ceil((until - HALF).timestamp() / 60) - window[0], length)
    return (1 << end) - (1 << first) if first < end else 0


def _add(
    found: dict[tuple[int, str, str, str, str], HourUse],
    place: str,
    device: str,
    holder: Holder,
    states: Mapping[str, int],
    first: int,
) -> None:
    """Cuts the masks into hours."""
    shifted = {state: mask << first % 60 for state, mask in states.items() if mask}
    hour = first // 60
    while shifted:
        masks = {state: mask & WHOLE_HOUR for state, mask in shifted.items()}
        if any(masks.values()):
            added = HourUse(hour=hour, place=place, device=device, holder=holder, **masks)
            key = (hour, place, device, holder.key, holder.class_)
            known = found.get(key)
            found[key] = added if known is None else msgspec.structs.replace(merged_uses(known, added), holder=holder)
        shifted = {state: mask >> 60 for state, mask in shifted.items() if mask >> 60}
        hour += 1


# From subjects.


def holdings_of(
    subject: Subject, how: ClaimState | None, book: Rulebook, listed: Collection[DeviceId]
) -> list[Holding]:
    """The devices it has. Where it is not known which they are, none can be counted."""
    if how is None or not blocks_use(how) or isinstance(subject.devices, Unknown):
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
            previous_end=subject.previous_end if isinstance(subject.previous_end, datetime) else None,
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
    return next((name for name, group in policy.groups.items() if group.has(subject.owner)), "")

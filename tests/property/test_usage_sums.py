"""The sums of usage, for any recorded hours, equal a count minute by minute that follows the definition."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.series import (
    FREE,
    OUTSIDE,
    QUARANTINE,
    WHOLE_HOUR,
    DevicePresence,
    Holder,
    HourUse,
    RecordedHour,
    UsageFold,
    minute_of,
    moment_of,
)
from gpukeeper.views.usage import DAYS, UsageSums
from tests.usage_in_memory import InMemoryUsage

HOUR = minute_of(datetime(2026, 10, 24, 22, tzinfo=UTC)) // 60  # the night in which clocks in Berlin change
ZONES = (UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), ZoneInfo("Australia/Lord_Howe"))
SHARES = {"GPU-0": 1.0, "GPU-1": 1.0, "MIG-2": 1 / 7, "MIG-3": None}
MODELS = {"GPU-0": "H200", "GPU-1": "A100", "MIG-2": "A100", "MIG-3": "A100"}
WORKLOADS = tuple(
    Holder(key=key, path=f"docker/n1/{key}", owner=owner, class_=class_)
    for key, owner, class_ in (
        ("k1", "ann", "docker"),
        ("k1", "ann", "managed"),
        ("k2", "ann", "docker"),
        ("k3", "", ""),
    )
)
OTHERS = (Holder(class_=OUTSIDE), Holder(class_=QUARANTINE))
masks = st.one_of(st.just(0), st.just(WHOLE_HOUR), st.integers(0, WHOLE_HOUR))


@st.composite
def uses(draw: st.DrawFn, holders: tuple[Holder, ...] = (*WORKLOADS, *OTHERS, FREE)) -> HourUse:
    holder, device = draw(st.sampled_from(holders)), draw(st.sampled_from(sorted(SHARES)))
    hour = HOUR + draw(st.integers(0, 5))
    one, two, three = draw(masks), draw(masks), draw(masks)
    if holder == FREE:
        found = {"free": one}
    elif not holder.key:
        found = {"unknown": one}
    else:
        found = {"active": one, "idle": two & ~one, "unknown": three & ~(one | two)}
    return HourUse(hour=hour, place="n1", device=device, holder=holder, **found)


spans = st.tuples(st.integers(0, 400), st.integers(0, 400))
presences = st.lists(st.tuples(st.sampled_from(sorted(SHARES)), spans, st.booleans()), min_size=1, max_size=6)


def stored(hours: list[HourUse], found: list[tuple[str, tuple[int, int], bool]]) -> InMemoryUsage:
    devices = tuple(
        DevicePresence(
            place="n1",
            device=device,
            since=HOUR * 60 + min(span),
            until=HOUR * 60 + max(span),
            model=MODELS[device],
            share=SHARES[device],
            listed=listed,
        )
        for device, span, listed in found
    )
    store = InMemoryUsage()
    asyncio.run(store.record(UsageFold(devices=devices, hours=tuple(hours))))
    return store


class Minute(NamedTuple):
    at: datetime
    holder: Holder | None
    state: str
    hours: float


def minutes(one: RecordedHour) -> Iterator[Minute]:
    """By the definition: see docs/explanation/how-gpu-hours-are-counted.md."""
    whole = (1.0 if one.device.share is None else one.device.share) / 60
    for number in range(60):
        at, bit = moment_of(one.hour * 60 + number), 1 << number
        there = [use for use in one.uses if use.minutes & bit]
        workloads: dict[str, HourUse] = {}
        for use in there:
            if use.holder.key:
                workloads.setdefault(use.holder.key, use)
        outside = [use for use in there if not use.holder.key and use.holder != FREE]
        if workloads:
            for use in workloads.values():
                state = "active" if use.active & bit else "idle" if use.idle & bit else "unknown"
                yield Minute(at, use.holder, state, whole / len(workloads))
        elif outside:
            yield Minute(at, outside[0].holder, "unknown", whole)
        elif any(use.holder == FREE for use in there):
            yield Minute(at, None, "free", whole)
        elif one.device.listed and one.device.since <= one.hour * 60 + number < one.device.until:
            yield Minute(at, None, "unknown", whole)


Found = dict[tuple[object, ...], float]


def counted(
    hours: Iterable[RecordedHour], since: datetime, until: datetime, zone: tzinfo
) -> tuple[Found, Found, float]:
    cells, heat, unweighed = (
        defaultdict[tuple[object, ...], float](float),
        defaultdict[tuple[object, ...], float](float),
        0.0,
    )
    for hour in hours:
        for one in minutes(hour):
            if not since <= one.at < until:
                continue
            if hour.device.share is None:
                unweighed += one.hours
                continue
            local, holder = one.at.astimezone(zone), one.holder or FREE
            names = (holder.owner, holder.class_, holder.group)
            cells[local.date(), hour.device.model, bool(holder.key), *names, one.state] += one.hours
            heat[DAYS[local.weekday()], local.hour, one.state] += one.hours
    return cells, heat, unweighed


def summed(hours: Iterable[RecordedHour], since: datetime, until: datetime, zone: tzinfo) -> tuple[Found, Found, float]:
    sums = UsageSums(since, until, zone)
    for one in hours:
        sums.add(one)
    cells = {
        (one.day, one.model, one.held, one.owner, one.class_, one.group, state): value
        for one in sums.cells()
        for state, value in msgspec.structs.asdict(one.hours).items()
    }
    heat = {
        (row.day, number, state): value
        for row in sums.heat()
        for number, hours_ in enumerate(row.hours)
        for state, value in msgspec.structs.asdict(hours_).items()
    }
    return _nonzero(cells), _nonzero(heat), sums.unweighed


def _nonzero(found: Mapping[Any, float]) -> Found:
    return {key: value for key, value in found.items() if value}


@given(st.lists(uses(), max_size=14), presences, spans, st.sampled_from(ZONES))
def test_sums_are_those_of_a_count_minute_by_minute(
    hours: list[HourUse], found: list[tuple[str, tuple[int, int], bool]], span: tuple[int, int], zone: tzinfo
) -> None:
    since, until = (moment_of(HOUR * 60 + one) for one in (min(span), max(span)))
    recorded = list(stored(hours, found).reader().hours(since, until, until))
    for ours, expected in zip(summed(recorded, since, until, zone), counted(recorded, since, until, zone), strict=True):
        assert ours == pytest.approx(expected)


def facts(one: RecordedHour) -> tuple[object, ...]:
    return one.hour, one.device.device, one.device.in_hour(one.hour), one.uses


@given(st.lists(uses(), max_size=14), presences, spans, st.integers(0, 500))
def test_every_device_is_read_once_in_every_hour_in_which_it_was_there_or_was_counted(
    hours: list[HourUse], found: list[tuple[str, tuple[int, int], bool]], span: tuple[int, int], later: int
) -> None:
    since, until = (moment_of(HOUR * 60 + one) for one in (min(span), max(span)))
    now = moment_of(HOUR * 60 + later)
    reader = stored(hours, found).reader()
    recorded = list(reader.hours(since, until, now))
    names = [(one.hour, one.device.device) for one in recorded]
    assert len(names) == len(set(names))
    whole = list(reader.hours(moment_of(0), until + timedelta(days=9000), now))
    first, end = minute_of(since) // 60, -(-minute_of(until) // 60)
    assert [facts(one) for one in recorded] == [facts(one) for one in whole if first <= one.hour < end]
    for one in whole:
        assert one.uses or one.device.in_hour(one.hour)

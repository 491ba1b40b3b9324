"""How GPUs were used: hours in use, held but idle, free and not measured, by owner, class, group, model, day and hour
of the week. Behind `gpukeeper report`; nothing is ever acted on by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, tzinfo
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from gpukeeper.model.policy import Prices
from gpukeeper.model.series import FREE, WHOLE_HOUR, Holder, HourUse, RecordedHour, minute_of, moment_of

_QUARTER_MASK = (1 << 15) - 1
OTHERS = "others"  # to who may not see whose they are
UNKNOWN = "unknown"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class GpuHours(msgspec.Struct, frozen=True):
    """GPU-hours by state; a slice counts as its part of a GPU."""

    active: float = 0.0
    idle: float = 0.0
    free: float = 0.0
    unknown: float = 0.0  # not measured

    @property
    def held(self) -> float:
        return self.active + self.idle

    @property
    def all(self) -> float:
        return self.active + self.idle + self.free + self.unknown

    def __add__(self, other: GpuHours) -> GpuHours:
        return GpuHours(
            self.active + other.active, self.idle + other.idle, self.free + other.free, self.unknown + other.unknown
        )


class Money(msgspec.Struct, frozen=True):
    """What these hours cost at the prices of the policy. `unpriced`: GPU-hours of models without a price."""

    active: float = 0.0
    idle: float = 0.0
    free: float = 0.0
    unpriced: float = 0.0

    def __add__(self, other: Money) -> Money:
        return Money(
            self.active + other.active, self.idle + other.idle, self.free + other.free, self.unpriced + other.unpriced
        )


class UsageCell(msgspec.Struct, frozen=True, kw_only=True):
    """All hours with the same names. `held`: False for what no workload had."""

    day: date
    model: str
    held: bool
    owner: str = ""
    class_: str = ""
    group: str = ""
    hours: GpuHours = GpuHours()


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hours: GpuHours
    money: Money | None = None  # None: the policy has no prices


class WasteRow(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours held at zero use. `held`: all measured hours of the same owner and class."""

    owner: str
    class_: str
    idle: float
    held: float
    cost: float | None = None


class HeatRow(msgspec.Struct, frozen=True):
    """One day of the week, by hour of the day."""

    day: str
    hours: tuple[GpuHours, ...]


# Minutes.

Sums = list[float]  # in the order of GpuHours; a million additions of values would cost seconds


class Portion(msgspec.Struct, frozen=True, gc=False):
    """Minutes of one hour that count alike. Without a holder no workload had the device."""

    holder: Holder | None
    share: float  # of a whole GPU
    active: int = 0
    idle: int = 0
    free: int = 0
    unknown: int = 0

    def hours(self, mask: int) -> GpuHours:
        part = self.share / 60
        return GpuHours(
            (self.active & mask).bit_count() * part,
            (self.idle & mask).bit_count() * part,
            (self.free & mask).bit_count() * part,
            (self.unknown & mask).bit_count() * part,
        )


def portions(one: RecordedHour) -> list[Portion]:
    """Each minute of a device counts once. Workloads that have it at the same time get equal parts of the minute;
    processes outside workloads count only where no workload has it, and it is free only where nothing has it."""
    share = 1.0 if one.device.share is None else one.device.share
    held = [use for use in one.uses if use.holder.key]
    if len(held) > 1:
        held = _by_workload(held)
    taken, twice = 0, 0
    for use in held:
        minutes = use.minutes
        twice |= taken & minutes
        taken |= minutes
    found = [_portion(use, ~twice, share) for use in held]
    if twice:
        for count, mask in _shared(held, twice):
            found += [_portion(use, mask, share / count) for use in held]
    free = 0
    if len(held) < len(one.uses):
        for use in one.uses:
            if not use.holder.key and use.holder != FREE:
                found.append(Portion(use.holder, share, unknown=use.unknown & ~taken))
                taken |= use.unknown
        for use in one.uses:
            if use.free and use.holder == FREE:
                free |= use.free & ~taken
    missing = WHOLE_HOUR & ~(taken | free)
    if missing:
        missing &= one.device.in_hour(one.hour) if one.device.listed else 0
    if free or missing:
        found.append(Portion(None, share, free=free, unknown=missing))
    return [one for one in found if one.active | one.idle | one.free | one.unknown]


def _by_workload(uses: list[HourUse]) -> list[HourUse]:
    """A workload whose owner or class changed in this hour has two entries; a minute counts for the first of them."""
    if len({use.holder.key for use in uses}) == len(uses):
        return uses
    counted: dict[str, int] = {}
    found = []
    for use in uses:
        mask = ~counted.get(use.holder.key, 0)
        counted[use.holder.key] = counted.get(use.holder.key, 0) | use.minutes
        found.append(
            msgspec.structs.replace(use, active=use.active & mask, idle=use.idle & mask, unknown=use.unknown & mask)
        )
    return found


def _portion(use: HourUse, mask: int, share: float) -> Portion:
    return Portion(use.holder, share, use.active & mask, use.idle & mask, 0, use.unknown & mask)


def _shared(held: list[HourUse], twice: int) -> Iterator[tuple[int, int]]:
    """How many have the device, and in which minutes."""
    masks: dict[int, int] = {}
    for minute in range(60 if twice else 0):
        bit = 1 << minute
        if twice & bit:
            count = sum(1 for use in held if use.minutes & bit)
            masks[count] = masks.get(count, 0) | bit
    yield from masks.items()


# Sums.


class _LocalPart(NamedTuple):
    """Minutes of one hour that lie in the same hour of the zone, and what they are added to."""

    mask: int
    day: date
    cells: dict[tuple[str, Holder | None], Sums]  # of that day: by model and holder
    heat: Sums


class UsageSums:
    """Adds up hours between two moments, by the days and hours of a time zone."""

    def __init__(self, since: datetime, until: datetime, zone: tzinfo) -> None:
        self._zone = zone
        self._first, self._end = minute_of(since), minute_of(until)
        self._parts: dict[int, list[_LocalPart]] = {}
        self._days: dict[date, dict[tuple[str, Holder | None], Sums]] = {}
        self._cells: dict[tuple[date, str, Holder | None], Sums] = {}
        self._heat: dict[tuple[int, int], Sums] = {}
        self.unweighed = 0.0  # hours of slices whose size is not known; in no sum

    def add(self, one: RecordedHour) -> None:
        parts = self._parts.get(one.hour)
        if parts is None:
            parts = self._local(one.hour)
        share, model = one.device.share, one.device.model
        if share is None:
            self.unweighed += sum(portion.hours(part.mask).all for portion in portions(one) for part in parts)
            return
        if len(parts) == 1 and parts[0].mask == WHOLE_HOUR and len(one.uses) == 1:
            use = one.uses[0]
            if use.holder.key and use.active | use.idle | use.unknown == WHOLE_HOUR:
                # One workload has the device all the time, as in most hours: the same as below, without portions.
                self._add(parts[0], model, use.holder, share, (use.active, use.idle, 0, use.unknown))
                return
        for portion in portions(one):
            for part in parts:
                mask = part.mask
                minutes = (portion.active & mask, portion.idle & mask, portion.free & mask, portion.unknown & mask)
                self._add(part, model, portion.holder, portion.share, minutes)

    def _add(
        self, part: _LocalPart, model: str, holder: Holder | None, share: float, minutes: tuple[int, int, int, int]
    ) -> None:
        """`minutes`: masks of those active, idle, free and unknown, in the order of the sums."""
        sums, heat, share = part.cells.get((model, holder)), part.heat, share / 60
        if sums is None:
            sums = self._sums(part, model, holder)
        for number, mask in enumerate(minutes):
            if mask:
                hours = mask.bit_count() * share
                sums[number] += hours
                heat[number] += hours

    def _sums(self, part: _LocalPart, model: str, holder: Holder | None) -> Sums:
        """Holders with the same names have the same sum."""
        named = holder and msgspec.structs.replace(holder, key=holder.key and "workload", path="")
        sums = self._cells.setdefault((part.day, model, named), [0.0] * 4)
        part.cells[model, holder] = sums
        return sums

    def _local(self, hour: int) -> list[_LocalPart]:
        """The quarters of an hour, joined as far as they lie in the same hour of the zone."""
        masks: dict[tuple[date, int], int] = {}
        for quarter in range(4):
            at = moment_of(hour * 60 + quarter * 15).astimezone(self._zone)
            key = (at.date(), at.hour)
            masks[key] = masks.get(key, 0) | _QUARTER_MASK << quarter * 15
        within = self._within(hour)
        found = [
            _LocalPart(
                mask & within,
                day,
                self._days.setdefault(day, {}),
                self._heat.setdefault((day.weekday(), at), [0.0] * 4),
            )
            for (day, at), mask in masks.items()
            if mask & within
        ]
        self._parts[hour] = found
        return found

    def _within(self, hour: int) -> int:
        first, end = max(self._first - hour * 60, 0), min(self._end - hour * 60, 60)
        return ((1 << end) - (1 << first)) & WHOLE_HOUR if first < end else 0

    def cells(self) -> tuple[UsageCell, ...]:
        found = [
            UsageCell(
                day=day,
                model=model,
                held=holder is not None and bool(holder.key),
                owner="" if holder is None else holder.owner,
                class_="" if holder is None else holder.class_,
                group="" if holder is None else holder.group,
                hours=GpuHours(*sums),
            )
            for (day, model, holder), sums in self._cells.items()
            if any(sums)
        ]
        return tuple(sorted(found, key=lambda c: (c.day, c.model, not c.held, c.owner, c.class_, c.group)))

    def heat(self) -> tuple[HeatRow, ...]:
        return tuple(
            HeatRow(name, tuple(GpuHours(*self._heat.get((day, hour), ())) for hour in range(24)))
            for day, name in enumerate(DAYS)
        )


_NOTHING = GpuHours()


def for_reader(cells: Iterable[UsageCell], person: str) -> tuple[UsageCell, ...]:
    """One's own in full; of others only how much it was on a day, by model."""
    joined: dict[UsageCell, GpuHours] = {}
    for one in cells:
        hours = one.hours
        if not one.held or one.owner == person:
            cell = msgspec.structs.replace(one, hours=_NOTHING)
        else:
            cell = UsageCell(day=one.day, model=one.model, held=True, owner=OTHERS, class_=OTHERS, group=OTHERS)
        joined[cell] = joined.get(cell, _NOTHING) + hours
    return tuple(msgspec.structs.replace(cell, hours=hours) for cell, hours in joined.items())


def total(cells: Iterable[UsageCell]) -> GpuHours:
    found = _NOTHING
    for one in cells:
        found += one.hours
    return found


def rows(cells: Iterable[UsageCell], name: Callable[[UsageCell], str | None], prices: Prices) -> tuple[UsageRow, ...]:
    """By name, the most first. None: not counted."""
    sums: dict[str, list[UsageCell]] = {}
    for one in cells:
        if (called := name(one)) is not None:
            sums.setdefault(called, []).append(one)
    found = [UsageRow(name=called, hours=total(some), money=cost(some, prices)) for called, some in sums.items()]
    return tuple(sorted(found, key=lambda row: (-row.hours.held, -row.hours.all, row.name)))


NAMES: Mapping[str, Callable[[UsageCell], str | None]] = {
    "owner": lambda one: (one.owner or UNKNOWN) if one.held else None,
    "class": lambda one: one.class_ or (UNKNOWN if one.held else None),
    "group": lambda one: (one.group or "none") if one.held else None,
    "model": lambda one: one.model or UNKNOWN,
    "day": lambda one: one.day.isoformat(),
}


def waste(cells: Iterable[UsageCell], prices: Prices) -> tuple[WasteRow, ...]:
    """GPU-hours held without use, by owner and class; the most first."""
    sums: dict[tuple[str, str], list[UsageCell]] = {}
    for one in cells:
        if one.held:
            sums.setdefault((one.owner or UNKNOWN, one.class_ or UNKNOWN), []).append(one)
    found = []
    for (owner, class_), some in sums.items():
        hours, money = total(some), cost(some, prices)
        if hours.idle:
            idle = None if money is None else money.idle
            found.append(WasteRow(owner=owner, class_=class_, idle=hours.idle, held=hours.held, cost=idle))
    return tuple(sorted(found, key=lambda row: (-row.idle, row.owner, row.class_)))


def cost(cells: Iterable[UsageCell], prices: Prices) -> Money | None:
    if not prices.per_gpu_hour:
        return None
    found = Money()
    for one in cells:
        hours, price = one.hours, price_of(one.model, prices)
        if price is None:
            found += Money(unpriced=hours.active + hours.idle + hours.free)
        else:
            found += Money(hours.active * price, hours.idle * price, hours.free * price)
    return found


def price_of(model: str, prices: Prices) -> float | None:
    """Of the first pattern that fits."""
    return next((price for pattern, price in prices.per_gpu_hour.items() if fnmatchcase(model, pattern)), None)


def month(text: str, zone: tzinfo) -> tuple[datetime, datetime]:
    """From its first midnight in that zone to that of the next month. ValueError: not like 2026-10."""
    year, dash, number = text.partition("-")
    if not (dash and len(year) == 4 and len(number) == 2 and (year + number).isascii() and (year + number).isdecimal()):
        raise ValueError("is not a month")
    first = date(int(year), int(number), 1)
    after = date(first.year + first.month // 12, first.month % 12 + 1, 1)
    return midnight(first, zone), midnight(after, zone)


def midnight(day: date, zone: tzinfo) -> datetime:
    """Where clocks skip it: the first moment of that day."""
    return datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)

"""GPU-hours by owner, day and hour of the week, calculated by hand; shared GPUs, slices, gaps and clock changes."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from gpukeeper.model.policy import Prices
from gpukeeper.model.series import FREE, OUTSIDE, WHOLE_HOUR, DevicePresence, Holder, HourUse, RecordedHour, minute_of
from gpukeeper.views.usage import (
    NAMES,
    OTHERS,
    GpuHours,
    Money,
    UsageCell,
    UsageSums,
    cost,
    for_reader,
    midnight,
    month,
    portions,
    rows,
    total,
    waste,
)

GREENWICH = ZoneInfo("UTC")
BERLIN, KOLKATA, LORD_HOWE = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), ZoneInfo("Australia/Lord_Howe")
NINE = datetime(2026, 11, 16, 9, tzinfo=UTC)  # a Monday
NO_PRICES = Prices()
ANN = Holder(key="k1", owner="ann", class_="docker", group="lab")
BOB = Holder(key="k2", owner="bob", class_="cluster")


def gpu(hour: int, minutes: int = 60, share: float | None = 1.0, *, listed: bool = True) -> DevicePresence:
    since = hour * 60
    return DevicePresence(
        place="node-1", device="GPU-0", since=since, until=since + minutes, model="H100", share=share, listed=listed
    )


def first(count: int) -> int:
    return (1 << count) - 1


def use(holder: Holder, **masks: int) -> HourUse:
    return HourUse(hour=0, place="node-1", device="GPU-0", holder=holder, **masks)


def recorded(*uses: HourUse, at: datetime = NINE, **more: object) -> RecordedHour:
    hour = minute_of(at) // 60
    return RecordedHour(hour, gpu(hour, **more), uses)  # type: ignore[arg-type]


def summed(
    *hours: RecordedHour, zone: ZoneInfo = GREENWICH, since: datetime | None = None, until: datetime | None = None
) -> UsageSums:
    sums = UsageSums(since or NINE - timedelta(days=400), until or NINE + timedelta(days=400), zone)
    for one in hours:
        sums.add(one)
    return sums


def approx(hours: GpuHours) -> tuple[float, ...]:
    return tuple(round(one * 60, 6) for one in (hours.active, hours.idle, hours.free, hours.unknown))


def test_an_hour_is_split_into_four_parts() -> None:
    mine = use(ANN, active=first(20), idle=first(30) & ~first(20), unknown=first(33) & ~first(30))
    cells = summed(recorded(mine, use(FREE, free=first(50) & ~first(33)))).cells()
    assert approx(total(cells)) == (20, 10, 17, 13), "ten of the last are not recorded, three are held"
    assert approx(total(one for one in cells if one.owner == "ann")) == (20, 10, 0, 3)


def test_two_workloads_on_one_gpu_share_its_minutes() -> None:
    ann, bob = use(ANN, active=first(30)), use(BOB, idle=first(40) & ~first(10))
    cells = summed(recorded(ann, bob)).cells()
    by_owner = {row.name: approx(row.hours) for row in rows(cells, NAMES["owner"], NO_PRICES)}
    assert by_owner == {"ann": (10 + 20 / 2, 0, 0, 0), "bob": (0, 10 + 20 / 2, 0, 0)}
    assert approx(total(cells)) == (20, 20, 0, 20)


def test_three_share_in_thirds() -> None:
    eve = Holder(key="k3", owner="eve")
    cells = summed(recorded(*(use(one, active=first(60)) for one in (ANN, BOB, eve)))).cells()
    assert [approx(one.hours)[0] for one in cells] == [20, 20, 20]


def test_a_slice_counts_as_its_part_of_a_gpu() -> None:
    assert approx(total(summed(recorded(use(ANN, active=first(42)), share=1 / 7)).cells())) == (
        6,
        0,
        0,
        round(18 / 7, 6),
    )


def test_a_slice_of_unknown_size_is_in_no_sum() -> None:
    sums = summed(recorded(use(ANN, active=first(42)), share=None, listed=False))
    assert sums.cells() == ()
    assert sums.unweighed == pytest.approx(42 / 60)


def test_processes_outside_count_only_where_no_workload_has_the_gpu() -> None:
    outside = use(Holder(class_=OUTSIDE), unknown=first(40))
    cells = summed(recorded(use(ANN, active=first(10)), outside, use(FREE, free=WHOLE_HOUR))).cells()
    assert approx(total(cells)) == (10, 0, 20, 30)
    assert [row.name for row in rows(cells, NAMES["class"], NO_PRICES)] == ["docker", "outside"]
    assert [row.name for row in rows(cells, NAMES["owner"], NO_PRICES)] == ["ann"]


def test_a_workload_whose_class_changed_counts_once() -> None:
    other = Holder(key="k1", owner="ann", class_="managed", group="lab")
    cells = summed(recorded(use(ANN, active=first(30)), use(other, active=WHOLE_HOUR))).cells()
    assert {one.class_: approx(one.hours)[0] for one in cells} == {"docker": 30, "managed": 30}


def test_a_gpu_that_came_within_the_hour_counts_from_then() -> None:
    hour = minute_of(NINE) // 60
    device = DevicePresence(place="p", device="d", since=hour * 60 + 45, until=hour * 60 + 90)
    assert approx(total(summed(RecordedHour(hour, device, ())).cells())) == (0, 0, 0, 15)


def test_only_the_span_that_was_asked_for_counts() -> None:
    sums = summed(
        recorded(use(ANN, active=WHOLE_HOUR)),
        since=NINE + timedelta(minutes=10),
        until=NINE + timedelta(minutes=25),
    )
    assert approx(total(sums.cells())) == (15, 0, 0, 0)


def test_the_heat_map_follows_the_time_zone() -> None:
    one = recorded(use(ANN, active=WHOLE_HOUR))
    heat = summed(one, zone=BERLIN).heat()
    assert (heat[0].day, approx(heat[0].hours[10])) == ("Monday", (60, 0, 0, 0))
    split = summed(one, zone=KOLKATA).heat()[0].hours  # 14:30 to 15:30
    assert (approx(split[14]), approx(split[15])) == ((30, 0, 0, 0), (30, 0, 0, 0))


def test_the_hour_that_comes_twice_has_two_hours_and_the_skipped_one_none() -> None:
    """Berlin, 2026-10-25: 02:00 to 03:00 twice. 2026-03-29: no 02:00."""
    autumn = [
        recorded(use(ANN, active=WHOLE_HOUR), at=datetime(2026, 10, 24, 22, tzinfo=UTC) + n * timedelta(hours=1))
        for n in range(25)
    ]
    sums = summed(*autumn, zone=BERLIN)
    assert [approx(one)[0] for one in sums.heat()[6].hours] == [60, 60, 120, *[60] * 21]
    assert [(one.day, approx(one.hours)[0]) for one in sums.cells()] == [(date(2026, 10, 25), 25 * 60)]
    spring = [
        recorded(use(ANN, active=WHOLE_HOUR), at=datetime(2026, 3, 28, 23, tzinfo=UTC) + n * timedelta(hours=1))
        for n in range(23)
    ]
    sums = summed(*spring, zone=BERLIN)
    assert [approx(one)[0] for one in sums.heat()[6].hours] == [60, 60, 0, *[60] * 21]
    assert [one.day for one in sums.cells()] == [date(2026, 3, 29)]


def test_a_zone_that_shifts_by_half_an_hour() -> None:
    """Lord Howe, 2026-04-05 02:00 (+11:00) becomes 01:30 (+10:30): 15:00 UTC."""
    before = datetime(2026, 4, 4, 13, tzinfo=UTC)  # midnight there
    sums = summed(
        *(recorded(use(ANN, active=WHOLE_HOUR), at=before + n * timedelta(hours=1)) for n in range(4)), zone=LORD_HOWE
    )
    assert [approx(one)[0] for one in sums.heat()[6].hours[:4]] == [60, 90, 60, 30]


def test_a_month_begins_and_ends_at_midnight_of_its_zone() -> None:
    begin, end = month("2026-10", BERLIN)
    assert (begin, end) == (datetime(2026, 9, 30, 22, tzinfo=UTC), datetime(2026, 10, 31, 23, tzinfo=UTC))
    assert month("2026-12", BERLIN)[1] == midnight(date(2027, 1, 1), BERLIN)


@pytest.mark.parametrize("words", ["2026", "2026-13", "26-10", "2026-1", "2026-10-01", "²026-10", "0000-01", ""])
def test_what_is_no_month_is_refused(words: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        month(words, BERLIN)


CELLS = (
    UsageCell(day=date(2026, 11, 1), model="H100", held=True, owner="ann", class_="docker", hours=GpuHours(2.0, 6.0)),
    UsageCell(day=date(2026, 11, 1), model="A100", held=True, owner="bob", class_="docker", hours=GpuHours(3.0, 1.0)),
    UsageCell(day=date(2026, 11, 2), model="A100", held=True, owner="eve", class_="bare", hours=GpuHours(5.0)),
    UsageCell(day=date(2026, 11, 2), model="H100", held=False, hours=GpuHours(free=4.0, unknown=1.0)),
)


def test_waste_is_what_was_held_without_use() -> None:
    found = waste(CELLS, Prices(currency="EUR", per_gpu_hour={"H*": 2.5}))
    assert [(one.owner, one.class_, one.idle, one.held, one.cost) for one in found] == [
        ("ann", "docker", 6.0, 8.0, 15.0),
        ("bob", "docker", 1.0, 4.0, 0.0),
    ]


def test_money_is_hours_by_the_price_of_the_model() -> None:
    assert cost(CELLS, NO_PRICES) is None
    assert cost(CELLS, Prices(per_gpu_hour={"H100": 2.0, "*": 1.0})) == Money(12.0, 13.0, 8.0)
    assert cost(CELLS, Prices(per_gpu_hour={"H100": 2.0})) == Money(4.0, 12.0, 8.0, unpriced=9.0)


def test_others_are_summed_up_to_who_may_not_see_them() -> None:
    found = for_reader(CELLS, "ann")
    assert {row.name for row in rows(found, NAMES["owner"], NO_PRICES)} == {"ann", OTHERS}
    assert {row.name for row in rows(found, NAMES["class"], NO_PRICES)} == {"docker", OTHERS}
    assert total(found) == total(CELLS)
    for name in ("model", "day"):
        assert rows(found, NAMES[name], NO_PRICES) == rows(CELLS, NAMES[name], NO_PRICES)


def test_each_minute_of_a_device_counts_once() -> None:
    one = recorded(
        use(ANN, active=first(30)), use(BOB, unknown=first(45) & ~first(15)), use(FREE, free=WHOLE_HOUR & ~first(50))
    )
    assert sum(part.hours(WHOLE_HOUR).all for part in portions(one)) == pytest.approx(1.0)

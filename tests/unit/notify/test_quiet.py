"""Quiet hours: over midnight, over a clock change, and what is not a span of hours."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpukeeper.notify.messages import read_quiet_hours

NIGHT = read_quiet_hours("22:00-07:00 Europe/Berlin")


def utc(day: int, hour: int, minute: int = 0, month: int = 10) -> datetime:
    return datetime(2026, month, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "quiet"),
    [
        (utc(10, 19, 59), False),
        (utc(10, 20), True),  # 22:00 in summer
        (utc(11, 4, 59), True),
        (utc(11, 5), False),  # 07:00
        (utc(30, 20, 30), False),  # 21:30 in winter
        (utc(30, 21), True),
    ],
)
def test_hours_are_those_of_the_zone(at: datetime, quiet: bool) -> None:
    assert NIGHT.contain(at) is quiet


def test_the_end_is_the_next_morning_also_when_clocks_change() -> None:
    assert NIGHT.end_after(utc(10, 21)) == utc(11, 5)
    assert NIGHT.end_after(utc(11, 3)) == utc(11, 5)
    assert NIGHT.end_after(utc(24, 21)) == utc(25, 6)  # clocks go back in that night


@pytest.mark.parametrize(
    ("zone", "at", "end"),
    [
        ("America/Los_Angeles", utc(11, 5), utc(11, 14)),  # 22:00 of the day before
        ("America/Los_Angeles", utc(11, 8), utc(11, 14)),  # 01:00
        ("Asia/Tokyo", utc(10, 13), utc(10, 22)),  # 22:00
        ("Asia/Tokyo", utc(10, 21, 59), utc(10, 22)),  # 06:59 of the next day
    ],
)
def test_the_day_on_which_they_end_is_that_of_the_zone(zone: str, at: datetime, end: datetime) -> None:
    hours = read_quiet_hours(f"22:00-07:00 {zone}")
    assert hours.contain(at)
    assert hours.end_after(at) == end


def test_hours_of_one_day() -> None:
    noon = read_quiet_hours("12:00-13:30 UTC")
    assert noon.contain(utc(10, 13, 29))
    assert not noon.contain(utc(10, 13, 30))
    assert noon.end_after(utc(10, 12)) == utc(10, 13, 30)


@pytest.mark.parametrize(
    "words", ["", "22:00-07:00", "22-7 UTC", "25:00-07:00 UTC", "22:00-22:00 UTC", "1:00-2:00 UTC"]
)
def test_what_is_no_span_of_hours_is_refused_with_an_example(words: str) -> None:
    with pytest.raises(ValueError, match="Write"):
        read_quiet_hours(words)


@pytest.mark.parametrize("zone", ["Nowhere/Town", "../../etc/passwd", "/etc/localtime"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="22:00-07:00 Europe/Berlin"):
        read_quiet_hours(f"22:00-07:00 {zone}")

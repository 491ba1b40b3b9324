"""Cron words in zones whose clocks change."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.engine.schedule import LOCAL, may_act_now, next_moment
from gpukeeper.model.policy import Schedule
from tests.effort import examples

# As POSIX writes them, so that no database of zones is needed: where, and when their clocks change in 2026.
BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"
ZONES = {
    BERLIN: (date(2026, 3, 29), date(2026, 10, 25)),
    "EST5EDT,M3.2.0,M11.1.0": (date(2026, 3, 8), date(2026, 11, 1)),  # New York
    "<+1030>-10:30<+11>-11,M10.1.0,M4.1.0": (date(2026, 10, 4), date(2026, 4, 5)),  # Lord Howe: half an hour
    "CST5CDT,M3.2.0/0,M11.1.0/1": (date(2026, 3, 8), date(2026, 11, 1)),  # Havana: midnight is skipped
    "<+0545>-5:45": (date(2026, 3, 29), date(2026, 10, 25)),  # Kathmandu: never
    "UTC0": (date(2026, 3, 29), date(2026, 10, 25)),
}


@contextmanager
def zone(words: str) -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = words
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


def acts(at: str, first: date, days: int, step: timedelta) -> list[datetime]:
    """The passes that act, of one every `step` from the midnight before `first` on."""
    schedule, found = Schedule(at=at), []
    now = datetime(first.year, first.month, first.day, tzinfo=LOCAL).astimezone(UTC) - timedelta(seconds=30)
    end, last = now + timedelta(days=days), None
    while now < end:
        if may_act_now(schedule, last, now):
            found.append(now.astimezone(LOCAL))
        last, now = now, now + step
    return found


def local(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 3, 10, hour, minute).astimezone()  # cron words are in local time


def test_cron_words_act_only_in_the_pass_after_their_moment() -> None:
    """C6.3: daily at 02:00."""
    nightly = Schedule(at="0 2 * * *")
    assert may_act_now(nightly, local(1, 58), local(2, 3))
    assert not may_act_now(nightly, local(2, 3), local(2, 8))
    assert not may_act_now(nightly, local(0), local(1, 59))
    assert not may_act_now(nightly, None, local(2)), "the first pass cannot know"
    assert may_act_now(Schedule(), None, local(0))


def test_a_weekly_moment_acts_in_one_pass_of_the_week() -> None:
    """C10.8: Sunday at 02:00, of a pass every 15 minutes; also in the weeks in which the clocks change."""
    with zone(BERLIN):
        for first in (date(2026, 3, 16), date(2026, 3, 23), date(2026, 10, 19)):
            found = acts("0 2 * * 0", first, 14, timedelta(minutes=15))
            assert [(one.weekday(), one.date() - first) for one in found] == [
                (6, timedelta(days=6)),
                (6, timedelta(days=13)),
            ]
            assert all(2 <= one.hour <= 3 and one.minute < 15 for one in found), found


@pytest.mark.parametrize("day", [date(2026, 3, 29), date(2026, 10, 25)])
def test_in_berlin_half_past_two_comes_once_on_the_days_of_the_change(day: date) -> None:
    with zone(BERLIN):
        found = acts("30 2 * * *", day - timedelta(days=1), 3, timedelta(minutes=5))
    assert [one.date() - day for one in found] == [timedelta(days=number) for number in (-1, 0, 1)]


def test_a_daemon_that_began_before_the_change_acts_at_the_new_time_after_it() -> None:
    """The offset of the last pass says nothing about the next moment."""
    with zone(BERLIN):
        last = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)  # 01:30
        assert may_act_now(Schedule(at="0 4 * * *"), last, datetime(2026, 3, 29, 2, 0, tzinfo=UTC))
        assert not may_act_now(Schedule(at="0 4 * * *"), last, datetime(2026, 3, 29, 1, 59, tzinfo=UTC))


def test_words_with_a_star_go_on_in_the_hour_that_comes_twice() -> None:
    with zone(BERLIN):
        found = acts("*/30 * * * *", date(2026, 10, 25), 1, timedelta(minutes=10))
    assert len(found) == 48, "every half hour of a day, twice from two to three"


@pytest.mark.slow
@given(st.sampled_from(sorted(ZONES)), st.integers(0, 1), st.integers(0, 23), st.integers(0, 52), st.integers(3, 7))
@examples(0.3)
def test_every_nominal_day_has_one_window(words: str, which: int, hour: int, minute: int, step: int) -> None:
    with zone(words):
        day = ZONES[words][which]
        found = acts(f"{minute} {hour} * * *", day - timedelta(days=1), 3, timedelta(minutes=step))
        days = Counter(one.date() for one in found)
    assert days[day - timedelta(days=1)] == days[day] == 1, found
    assert max(days.values()) == 1


@given(st.sampled_from(sorted(ZONES)), st.integers(0, 366 * 24 * 60))
def test_local_times_and_instants_are_each_others_inverse(words: str, minutes: int) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes)
    with zone(words):
        assert at.astimezone(LOCAL).astimezone(UTC) == at


@pytest.mark.parametrize("words", ZONES)
def test_the_next_moment_is_the_first_at_which_a_pass_may_act(words: str) -> None:
    schedule = Schedule(at="30 2 * * *")
    with zone(words):
        for day in ZONES[words]:
            for hour in range(0, 48, 5):
                at = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(hours=hour)
                found = next_moment(schedule, at)
                assert found >= at
                assert may_act_now(schedule, at - timedelta(microseconds=1), found)
                assert not may_act_now(schedule, at - timedelta(microseconds=1), found - timedelta(microseconds=1))


def test_without_cron_words_the_next_moment_is_now() -> None:
    at = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
    assert next_moment(Schedule(), at) == at

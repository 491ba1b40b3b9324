"""What comes when: measuring goes on, so work that is idle now is forecast to be warned and stopped for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.lifecycle.forecast import FAILS_ON, NOT_IDLE_BEFORE, ahead, at_any_time
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.policy import AfterIdle, ClassSettings, OnLimit
from gpukeeper.model.series import NOT_MEASURED
from gpukeeper.model.subject import Crashes, Hold, Memory, Warned
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import DAY, HOUR, MINUTE, NOW, POLICY, quiet, subject

SECOND = timedelta(seconds=1)
LIMITS: dict[str, Any] = {"idle": 10 * MINUTE, "max_runtime": 5 * DAY, "start_grace": timedelta()}


def measured(ran: timedelta, until: timedelta = 20 * SECOND, **memory: Any) -> View:
    """It was measured and idle since it started, up to `until` ago, as a ledger records it."""
    series = tuple(
        msgspec.structs.replace(
            one,
            start=NOW - ran,
            minutes=(0.0,) * ((ran - until) // MINUTE + 1) + (NOT_MEASURED,) * (until // MINUTE),
            since=NOW - ran,
            until=NOW - until,
        )
        for one in quiet()
    )
    return View(subject(started=NOW - ran), series, Memory(first_start=NOW - ran, **memory))


def told(view: View, **limits: Any) -> list[tuple[timedelta, str]]:
    classes = {"managed": ClassSettings(**(LIMITS | limits))}
    book = Rulebook(msgspec.structs.replace(POLICY, classes=classes))
    return [(one.at - NOW, f"{one.action} {one.rule}") for one in ahead(view, book, NOW, tuple(Action), at_any_time)]


def test_idle_work_is_forecast_to_be_stopped_at_its_limit_and_not_at_its_maximum_runtime() -> None:
    """It ran for 7 of 10 minutes: warned at 8m and 9.5m, stopped 10 minutes after the first warning."""
    assert told(measured(7 * MINUTE)) == [
        (1 * MINUTE, "warn idle"),
        (2.5 * MINUTE, "warn idle"),
        (11 * MINUTE, "stop idle"),
        (11 * MINUTE, "remove idle"),
    ]


@pytest.mark.parametrize("limit", [30 * MINUTE, 2 * HOUR, 5 * HOUR])
def test_however_long_the_limit_is(limit: timedelta) -> None:
    expected = [(0.8 * limit, "warn idle"), (0.95 * limit, "warn idle")]
    stop = max(limit, 0.8 * limit + 10 * MINUTE)
    ran = 8 * MINUTE
    expected += [(stop, "stop idle"), (stop, "remove idle")]
    assert told(measured(ran), idle=limit) == [(at - ran, words) for at, words in expected]


def test_work_in_its_start_grace_is_forecast_to_be_stopped_after_it() -> None:
    found = told(measured(8 * MINUTE), start_grace=30 * MINUTE)
    assert found[:3] == [(30 * MINUTE, "warn idle"), (31.5 * MINUTE, "warn idle"), (40 * MINUTE, "stop idle")]


def test_work_that_crashes_again_and_again_is_forecast_to_be_stopped() -> None:
    """It seemed to recover two minutes from now, so that only its maximum runtime was forecast."""
    crashes = Crashes(7, NOW - 3 * MINUTE, NOW - 20 * SECOND)
    view = measured(30 * SECOND)
    view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, crashes=crashes))
    assert told(view)[:3] == [
        (5 * MINUTE, "warn restart_loop"),
        (6.5 * MINUTE, "warn restart_loop"),
        (15 * MINUTE, "stop restart_loop"),
    ]
    book = Rulebook(msgspec.structs.replace(POLICY, classes={"managed": ClassSettings(**LIMITS)}))
    found = ahead(view, book, NOW, tuple(Action), at_any_time)
    assert {one.provided for one in found[:3]} == {FAILS_ON}
    assert "it failed 41 times in a row in 18m" in found[2].reason
    recovered = msgspec.structs.replace(crashes, first=NOW - HOUR, last=NOW - HOUR / 2)
    view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, crashes=recovered))
    assert not [words for _, words in told(view) if "restart_loop" in words]


def test_held_work_is_forecast_to_be_warned_when_its_hold_ends() -> None:
    held = Hold("ann", NOW - HOUR, NOW + 3 * HOUR)
    found = told(measured(2 * HOUR, holds=(held,)))
    assert found[:3] == [(3 * HOUR, "warn idle"), (3 * HOUR, "warn idle"), (3 * HOUR + 10 * MINUTE, "stop idle")]


def test_what_comes_late_from_a_cluster_is_awaited() -> None:
    assert told(measured(7 * MINUTE, until=2.5 * MINUTE))[0] == (1 * MINUTE, "warn idle")


def test_after_a_gap_the_idle_time_begins_again_and_is_forecast() -> None:
    """Measured again for a minute: too short to be judged now, and not in the minutes to come."""
    view = measured(2 * HOUR)
    view = msgspec.structs.replace(
        view, series=tuple(msgspec.structs.replace(one, since=NOW - MINUTE) for one in view.series)
    )
    assert told(view)[0] == (7 * MINUTE, "warn idle")


@pytest.mark.parametrize("until", [4 * MINUTE, 2 * HOUR])
def test_what_is_not_measured_any_more_is_not_forecast_to_be_idle(until: timedelta) -> None:
    assert {words for _, words in told(measured(3 * HOUR, until))} == {"warn max_runtime", "stop max_runtime"}


def test_what_is_not_measured_yet_runs_until_another_rule_only_if_it_is_not_found_idle_before() -> None:
    """It was said to be stopped in four days, and was stopped when the idle time was over."""
    book = Rulebook(msgspec.structs.replace(POLICY, classes={"managed": ClassSettings(**LIMITS)}))
    started = msgspec.structs.replace(measured(30 * SECOND), series=())
    found = ahead(started, book, NOW, tuple(Action), at_any_time)
    assert {(one.rule, one.provided) for one in found} == {("max_runtime", NOT_IDLE_BEFORE)}


@pytest.mark.parametrize("ran", [7 * MINUTE, 40 * MINUTE])
def test_what_is_kept_by_something_unknown_runs_until_another_rule_only_if_it_is_not_idle_before(
    ran: timedelta,
) -> None:
    """Whether it has a keep-alive file could not be read for a moment, and it was said to be stopped days later."""
    view = measured(ran)
    marks = msgspec.structs.replace(view.subject.marks, keep_alive=Unknown("hidden"))
    view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, marks=marks))

    def conditions(**changes: Any) -> set[tuple[str, str]]:
        limits = ClassSettings(**LIMITS | changes)
        book = Rulebook(msgspec.structs.replace(POLICY, classes={"managed": limits}))
        return {(one.rule, one.provided) for one in ahead(view, book, NOW, tuple(Action), at_any_time)}

    assert conditions(idle=10 * MINUTE) == {("max_runtime", NOT_IDLE_BEFORE)}
    assert conditions(idle=None) == {("max_runtime", "")}
    assert conditions(on_idle=OnLimit.REPORT) == {("max_runtime", "")}, "idle work is only reported"


def test_where_no_warning_was_delivered_the_stop_depends_on_it() -> None:
    """It is warned again an hour after the last attempt, and stopped if that reaches its owner."""
    sent = tuple(
        Warned("idle", stage, NOW - ago, False, "run-1", LIMITS["idle"])
        for stage, ago in ((1, 5 * MINUTE), (2, 3 * MINUTE))
    )
    view, book = (
        measured(40 * MINUTE, warnings=sent),
        Rulebook(msgspec.structs.replace(POLICY, classes={"managed": ClassSettings(**LIMITS)})),
    )
    found = ahead(view, book, NOW, tuple(Action), at_any_time)
    assert [(one.at - NOW, one.action) for one in found[:2]] == [(57 * MINUTE, Action.WARN), (67 * MINUTE, Action.STOP)]
    assert {one.provided for one in found} == {"it stays idle and a warning reaches its owner"}


# What follows a stop


def test_a_class_that_keeps_what_was_idle_removes_it_like_other_stopped_work() -> None:
    assert told(measured(7 * MINUTE), after_idle=AfterIdle.KEEP)[-2:] == [
        (11 * MINUTE, "stop idle"),
        (11 * MINUTE + DAY, "remove retention"),
    ]


def test_what_a_stop_suspends_and_its_class_keeps_is_never_removed() -> None:
    view = measured(7 * MINUTE)
    view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, suspended_by_stop=True))
    assert told(view, after_idle=AfterIdle.KEEP)[-1] == (11 * MINUTE, "stop idle")


def test_a_runtime_that_is_only_reported_is_not_in_the_forecast() -> None:
    assert told(measured(7 * MINUTE), idle=None, on_max_runtime=OnLimit.REPORT) == []


def test_what_a_stop_suspends_is_removed_after_the_retention_of_stopped_work() -> None:
    view = measured(7 * MINUTE)
    view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, suspended_by_stop=True))
    assert POLICY.retention.stopped is not None
    assert told(view)[-2:] == [
        (11 * MINUTE, "stop idle"),
        (11 * MINUTE + POLICY.retention.stopped, "remove idle"),
    ]


def test_what_goes_when_it_is_stopped_is_forecast_to_be_removed_by_whatever_stops_it() -> None:
    view = measured(7 * MINUTE)
    gone = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, goes_when_stopped=True))
    found = told(gone, idle=None, after_idle=AfterIdle.KEEP)
    assert [words for _, words in found[-2:]] == ["stop max_runtime", "remove max_runtime"]

"""What the rules would have done to a recorded run. Passes are at 00, 05, 10 minutes; the idle time is one hour."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.config.load import load_builtin
from gpukeeper.model.decision import Action
from gpukeeper.model.policy import ClassSettings, Schedule
from gpukeeper.model.series import RecordedSeries, Signal
from gpukeeper.model.subject import Hold
from tests.unit.backtest.traces import DAY, GAP, HOUR, MINUTE, POLICY, T0, minutes, replayed, run


def test_idle_work_is_warned_at_80_and_95_percent_and_stopped_in_the_pass_at_its_idle_time() -> None:
    found = replayed(run((2 * HOUR, 90.0), (5 * HOUR, 0.0)))
    assert [(step.action, step.at - T0) for step in found.steps] == [
        (Action.WARN, 2 * HOUR + 50 * MINUTE),  # 48 minutes, in the next pass
        (Action.WARN, 3 * HOUR),  # 57 minutes
        (Action.STOP, 3 * HOUR + 5 * MINUTE),
    ]
    assert found.stop is not None
    assert (found.stop.rule, found.stop.since) == ("idle", T0 + 2 * HOUR)


def test_after_an_early_warning_and_a_late_one_it_is_stopped_at_its_idle_time() -> None:
    """The built-in times: each warning is sent once, and the first one counts until the stop."""
    day = load_builtin(["docker"]).policy
    found = replayed(run((2 * HOUR, 90.0), (20 * HOUR, 0.0), class_="managed"), day)
    assert [(step.action, step.at - T0) for step in found.steps] == [
        (Action.WARN, 3 * HOUR),
        (Action.WARN, 6 * HOUR + 45 * MINUTE),
        (Action.STOP, 7 * HOUR),
    ]
    again = replayed(run((2 * HOUR, 90.0), (90 * MINUTE, 0.0), (HOUR, 90.0), (9 * HOUR, 0.0), class_="managed"), day)
    assert [(step.stage, step.at - T0) for step in again.steps] == [
        (1, 3 * HOUR),
        (1, 5 * HOUR + 30 * MINUTE),
        (2, 9 * HOUR + 15 * MINUTE),
        (0, 9 * HOUR + 30 * MINUTE),
    ]


@pytest.mark.parametrize("pause", [30 * MINUTE, 45 * MINUTE, 55 * MINUTE])
def test_pauses_shorter_than_the_idle_time_never_stop_it(pause: object) -> None:
    parts = [(20 * MINUTE, 90.0), (pause, 0.0)] * 40
    found = replayed(run(*parts))  # type: ignore[arg-type]
    assert found.stop is None
    assert found.kept


def test_use_between_two_warnings_begins_again() -> None:
    found = replayed(run((HOUR, 90.0), (50 * MINUTE, 0.0), (10 * MINUTE, 90.0), (3 * HOUR, 0.0)))
    assert [step.stage for step in found.steps] == [1, 1, 2, 0]
    assert found.stop is not None
    assert found.stop.since == T0 + 2 * HOUR


def test_what_was_not_measured_is_not_idle() -> None:
    gap = run((HOUR, 90.0), (50 * MINUTE, 0.0), (10 * MINUTE, GAP), (50 * MINUTE, 0.0))
    assert replayed(gap).stop is None
    assert replayed(run((5 * HOUR, GAP))).steps == ()


def test_every_gpu_of_it_counts() -> None:
    one = run((6 * HOUR, 0.0), gpus=2)
    busy = RecordedSeries(Signal.GPU, "GPU-1", T0, minutes((6 * HOUR, 50.0)))
    assert replayed(msgspec.structs.replace(one, series=(one.series[0], busy))).stop is None
    assert replayed(msgspec.structs.replace(one, series=one.series[:1])).stop is None, "GPU-1 was not measured"
    assert replayed(one).stop is not None


def test_a_recorded_signal_can_veto_and_one_that_some_run_has_must_be_there() -> None:
    one = run((6 * HOUR, 0.0))
    computing = RecordedSeries(Signal.CPU, "", T0, minutes((6 * HOUR, 80.0)))
    quiet = RecordedSeries(Signal.CPU, "", T0, minutes((6 * HOUR, 0.0)))
    both = {Signal.GPU, Signal.CPU}
    assert replayed(one, signals=both).stop is None
    assert replayed(msgspec.structs.replace(one, series=(*one.series, computing)), signals=both).stop is None
    assert replayed(msgspec.structs.replace(one, series=(*one.series, quiet)), signals=both).stop is not None


def test_holds_count_while_they_last() -> None:
    held = Hold("ann", T0 + HOUR, T0 + 5 * HOUR)
    found = replayed(run((HOUR, 90.0), (9 * HOUR, 0.0), holds=(held,)))
    assert found.stop is not None
    assert found.stop.at > T0 + 5 * HOUR
    assert all(step.at >= T0 + 5 * HOUR for step in found.steps), "the warnings begin again, too"


def test_the_maximum_runtime_stops_busy_work() -> None:
    policy = msgspec.structs.replace(POLICY, classes={"batch": ClassSettings(max_runtime=DAY)})
    found = replayed(run((2 * DAY, 90.0)), policy)
    assert found.stop is not None
    assert (found.stop.rule, found.stop.at) == ("max_runtime", T0 + DAY)


def test_a_nightly_schedule_acts_at_night_only() -> None:
    policy = msgspec.structs.replace(POLICY, schedule=Schedule(at="30 2 * * *"))
    found = replayed(run((HOUR, 90.0), (5 * DAY, 0.0)), policy)
    assert found.stop is not None
    assert len({step.at.time() for step in found.steps}) == 1
    assert len({step.at.date() for step in found.steps}) == len(found.steps), "one step in a night"


def test_work_in_use_is_evaluated_once_an_idle_time_and_not_in_every_pass() -> None:
    found = replayed(run((5 * DAY, 90.0)))
    assert found.evaluated <= 5 * DAY / (40 * MINUTE)


def test_a_class_without_idle_time_is_never_stopped() -> None:
    found = replayed(run((5 * DAY, 0.0), class_="notebook"))
    assert found.stop is None


def test_nothing_is_decided_before_the_trace_begins() -> None:
    policy = msgspec.structs.replace(POLICY, classes={"batch": ClassSettings(max_runtime=DAY)})
    old = msgspec.structs.replace(run((2 * DAY, 90.0)), started=T0 - 9 * DAY)
    found = replayed(old, policy)
    assert found.stop is not None
    assert found.steps[0].at == T0, "warned first, although it is over its runtime"
    assert found.stop.at > T0

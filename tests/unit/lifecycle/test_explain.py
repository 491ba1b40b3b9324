"""What `explain` says: every signal against its threshold, what comes when, and what would change it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.explain import amount, idle_window, in_spite_of, remedies, signals, threshold_in_words
from gpukeeper.lifecycle.forecast import ahead, at_any_time
from gpukeeper.lifecycle.rules.idle import REPORTED_AFTER
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.policy import ClassSettings, Exemption, OnLimit
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.subject import EMPTY, Hold, Marks, Memory, State, Stopped, Warned
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import BOOK, DAY, HOUR, MINUTE, NOW, POLICY, ended_view, idle_view, quiet, subject

EVERY = frozenset(Action)


def with_(view: View, **facts: Any) -> View:
    return msgspec.structs.replace(view, **facts)


def told(view: View, book: Rulebook = BOOK, offered: frozenset[Action] = EVERY) -> list[tuple[timedelta, str, int]]:
    return [
        (one.at - NOW, f"{one.action} {one.rule}", one.stage) for one in ahead(view, book, NOW, offered, at_any_time)
    ]


def would_change(view: View, book: Rulebook = BOOK) -> str:
    return "\n".join(remedies(view, book, answers(view, book, NOW), NOW, at_any_time))


# Signals


def test_every_signal_is_reported_against_its_threshold_over_the_window() -> None:
    values = (90.0,) * 40 + (NOT_MEASURED,) * 3 + (4.0,) + (0.5,) * 26
    view = View(subject(), (Series(Signal.GPU, "GPU-0", NOW - 69 * MINUTE, values),))
    (one,) = signals(view, BOOK, NOW)
    assert (one.newest, one.newest_at) == (0.5, NOW)
    assert one.maximum == 4.0  # what was before the window does not count
    assert one.since == NOW - 26 * MINUTE, "without a gap"
    assert (one.threshold, one.window) == (5.0, 30 * MINUTE)


def test_a_minute_of_the_window_is_one_that_the_rule_looks_at() -> None:
    """The window and the rule agree on which minute is the first: use there keeps, use a minute before does not."""
    for back, highest in ((29, 50.0), (30, 0.0)):
        values = [0.0] * 90
        values[89 - back] = 50.0
        (one,) = signals(View(subject(), (Series(Signal.GPU, "GPU-0", NOW - 89 * MINUTE, tuple(values)),)), BOOK, NOW)
        assert one.maximum == highest


def test_each_signal_has_its_own_threshold() -> None:
    slice_ = Series(Signal.GPU, "MIG-1", NOW, (0.0,), slice=True)
    view = View(subject(devices=("GPU-0", "MIG-1")), (*quiet(), slice_))
    found = {(one.signal, one.device): one.threshold for one in signals(view, BOOK, NOW)}
    assert found[Signal.GPU, "GPU-0"] == 5.0
    assert found[Signal.GPU, "MIG-1"] == 0.5
    assert found[Signal.CPU, ""] == 2.0
    assert found[Signal.NETWORK, ""] == pytest.approx(1024 * 1024 / 1800)
    assert found[Signal.DISK, ""] == 100_000.0


def test_what_is_absent_by_design_or_not_measured_is_reported() -> None:
    absent = Series(Signal.NETWORK, "", NOW, (), missing=Unknown("it has the host's network", by_design=True))
    silent = Series(Signal.CPU, "", NOW - MINUTE, (NOT_MEASURED, NOT_MEASURED))
    by_signal = {one.signal: one for one in signals(View(subject(), (absent, silent)), BOOK, NOW)}
    assert by_signal[Signal.NETWORK].missing == absent.missing
    cpu = by_signal[Signal.CPU]
    assert (cpu.newest, cpu.maximum, cpu.since) == (None, None, None)


def test_without_an_idle_time_nothing_is_judged() -> None:
    assert signals(View(subject(class_="api", slices=("GPU-0",)), quiet()), BOOK, NOW) == ()
    assert idle_window(View(subject(class_=Unknown("silent"))), BOOK) is None


def test_what_holds_a_whole_gpu_without_an_idle_time_is_judged_for_the_report() -> None:
    large = {"dev": ClassSettings(), "devs": ClassSettings(idle_when_large=2 * HOUR)}
    book = Rulebook(msgspec.structs.replace(POLICY, classes=large))
    assert idle_window(View(subject(class_="dev")), book) == REPORTED_AFTER
    assert idle_window(View(subject(class_="devs")), book) == 2 * HOUR
    assert idle_window(View(subject(class_="devs", slices=("GPU-0",))), book) is None


def test_a_series_of_what_it_holds_no_more_says_nothing() -> None:
    before = Series(Signal.GPU, "MIG-old", NOW, (90.0,), slice=True)
    view = View(subject(), (*quiet(), before))
    assert "MIG-old" not in [one.device for one in signals(view, BOOK, NOW)]
    assert "MIG-old" in [one.device for one in signals(with_(view, subject=subject(devices=Unknown("?"))), BOOK, NOW)]


def test_under_high_demand_the_window_is_the_shorter_one() -> None:
    assert idle_window(View(subject(), pressure=True), BOOK) == 15 * MINUTE


@pytest.mark.parametrize(
    ("signal", "value", "words", "limit"),
    [
        (Signal.GPU, 83.4, "83.4 %", "83.4 %"),
        (Signal.CPU, 2.0, "2 % of a core", "2 % of a core, twice within 5m"),
        (Signal.NETWORK, 2048.0, "2.0 KiB/s", "2.0 KiB/s, twice within 5m"),
        (Signal.TERMINAL, 1.0, "input", "any input"),
        (Signal.TERMINAL, 0.0, "no input", "any input"),
    ],
)
def test_values_in_words(signal: Signal, value: float, words: str, limit: str) -> None:
    assert amount(signal, value) == words
    (one,) = signals(View(subject(), (Series(signal, "GPU-0", NOW, (value,)),)), BOOK, NOW)
    assert threshold_in_words(msgspec.structs.replace(one, threshold=value)) == limit


# What comes when


def test_the_stages_of_idle_are_told_before_they_come() -> None:
    """C14.2: warned at 80 % and 95 % of 30m, stopped at 30m or 10m after the first warning, whichever is later."""
    view = View(subject(), _used(10))
    assert told(view) == [
        (15 * MINUTE, "warn idle", 1),
        (19.5 * MINUTE, "warn idle", 2),
        (25 * MINUTE, "stop idle", 0),
        (25 * MINUTE, "remove idle", 0),
    ]


def test_the_forecast_is_what_the_rules_do() -> None:
    """Each event it names is the decision that the rules give at that time, with that much more silence."""
    view = View(subject(), _used(10))
    for one in ahead(view, BOOK, NOW, EVERY, at_any_time)[:3]:
        at = _next_minute(one.at)
        minutes = (at - NOW) // MINUTE
        later = tuple(msgspec.structs.replace(s, minutes=s.minutes + (0.0,) * minutes) for s in view.series)
        decision = decide(with_(view, series=later), BOOK, at)
        assert (decision.action, decision.rule, decision.stage) == (one.action, one.rule, one.stage)
        sent = Warned(one.rule, one.stage, one.at, True, "run-1", decision.limit)
        view = with_(view, memory=Memory(warnings=(*view.memory.warnings, sent)))


def test_use_just_now_puts_everything_off() -> None:
    assert told(View(subject(), _used(0)))[0] == (24 * MINUTE + MINUTE, "warn idle", 1)


def test_what_is_due_comes_now() -> None:
    assert told(idle_view()) == [(timedelta(), "stop idle", 0), (timedelta(), "remove idle", 0)]
    assert told(ended_view()) == [(timedelta(), "remove retention", 0)]


def test_a_hold_only_puts_it_off() -> None:
    held = with_(ended_view(), memory=Memory(holds=(Hold("ann", NOW, NOW + 2 * HOUR),)))
    assert told(held) == [(2 * HOUR, "remove retention", 0)]


def test_what_is_far_away_is_not_foretold() -> None:
    held = with_(idle_view(), memory=Memory(holds=(Hold("root", NOW, NOW + 3650 * DAY, admin=True, suspends=("*",)),)))
    assert told(held) == []


def test_looking_ahead_ends() -> None:
    many = tuple(Hold("ann", NOW, NOW + n * MINUTE) for n in range(1, 200))
    assert told(with_(ended_view(), memory=Memory(holds=many))) == []


def test_a_lease_that_begins_by_itself_counts_and_its_end_is_warned_of() -> None:
    """It begins with the first thing due, and lasts as long as a hold may; the maximum runtime goes on."""
    patient = {"managed": ClassSettings(idle=30 * MINUTE)}
    book = Rulebook(msgspec.structs.replace(POLICY, classes=patient))
    begins, lasts = 15 * MINUTE, DAY
    assert told(View(subject(marks=Marks(keep_alive=True)), _used(10)), book) == [
        (begins + lasts - 60 * MINUTE, "warn keep_alive", 1),
        (begins + lasts - 10 * MINUTE, "warn keep_alive", 2),
        (begins + lasts, "warn idle", 1),
        (begins + lasts, "warn idle", 2),
        (begins + lasts + 10 * MINUTE, "stop idle", 0),
        (begins + lasts + 10 * MINUTE, "remove idle", 0),
    ]


def test_what_was_never_measured_is_not_foretold() -> None:
    """Of idle nothing can be said; the maximum runtime needs no measurement."""
    unmeasured = View(subject(class_="managed"), (), EMPTY)
    assert [words for _, words, _ in told(unmeasured)] == ["warn max_runtime", "warn max_runtime", "stop max_runtime"]
    absent = tuple(
        msgspec.structs.replace(one, missing=Unknown("driver silent")) if one.signal is Signal.GPU else one
        for one in quiet()
    )
    assert "stop idle" not in [words for _, words, _ in told(with_(unmeasured, series=absent))]


def test_what_a_place_does_not_offer_is_not_foretold() -> None:
    assert told(idle_view(), offered=frozenset({Action.REMOVE})) == []
    assert told(View(subject(), _used(10)), offered=frozenset({Action.REMOVE})) == []


def test_where_no_rule_names_a_time_nothing_comes() -> None:
    assert told(View(subject(class_="infrastructure"))) == []


def _used(minutes_ago: int) -> tuple[Series, ...]:
    """No use by any sign, but for one minute of the GPU."""
    start = NOW - 89 * MINUTE
    busy = tuple(80.0 if n == 89 - minutes_ago else 0.0 for n in range(90))
    return (Series(Signal.GPU, "GPU-0", start, busy), *quiet()[1:])


def _next_minute(at: datetime) -> datetime:
    return at if at == at.replace(second=0) else at.replace(second=0) + MINUTE


# What would change it


def test_an_idle_workload_is_kept_by_use_a_hold_or_an_admin() -> None:
    words = would_change(idle_view())
    assert "use the GPU above 5 %" in words
    assert "gpukeeper workload hold docker/node-3/eval" in words
    assert "an admin exempts it" in words
    assert "keep-alive" not in words


def test_a_slice_needs_less_use() -> None:
    series = (Series(Signal.GPU, "MIG-1", NOW - 89 * MINUTE, (0.0,) * 90, slice=True), *quiet()[1:])
    assert "use the GPU above 0.5 %" in would_change(with_(idle_view(devices=("MIG-1",)), series=series))


@pytest.mark.parametrize(("there", "helps"), [(False, True), (True, False), (None, False), (Unknown("paused"), False)])
def test_a_keep_alive_file_helps_where_there_is_a_place_for_one_and_none_yet(there: Any, helps: bool) -> None:
    """Touching one that is there changes nothing: its lease runs on our clock."""
    assert ("touch the keep-alive file" in would_change(idle_view(marks=Marks(keep_alive=there)))) == helps


def test_a_hold_does_not_help_against_the_maximum_runtime_but_an_admin_does() -> None:
    """C8.5"""
    words = would_change(View(subject(class_="api", started=NOW - 20 * HOUR)))
    assert "workload hold docker/node-3/eval --suspends max_runtime" in words
    assert "hold it" not in words
    assert "use the GPU" not in words


def test_a_maximum_runtime_that_is_only_reported_needs_nothing() -> None:
    reports = {"api": ClassSettings(max_runtime=DAY, on_max_runtime=OnLimit.REPORT)}
    book = Rulebook(msgspec.structs.replace(POLICY, classes=reports))
    for ran in (20 * HOUR, 30 * HOUR):
        assert would_change(View(subject(class_="api", started=NOW - ran)), book) == ""


def test_what_is_unknown_would_change_it() -> None:
    assert "what is unknown becomes known: GPU use was not measured yet" in would_change(View(subject()))


def test_what_is_held_is_given_back_by_a_release() -> None:
    holds = (Hold("ann", NOW - HOUR, NOW + HOUR), Hold("ann", NOW - DAY, NOW - HOUR))
    assert "workload release docker/node-3/eval" in would_change(with_(idle_view(), memory=Memory(holds=holds)))
    assert "release" not in would_change(with_(idle_view(), memory=Memory(holds=holds[1:])))


@pytest.mark.parametrize("facts", [{"class_": "infrastructure"}, {"root": "docker/node-3/whole"}])
def test_what_is_not_ours_to_act_on_needs_nothing(facts: dict[str, Any]) -> None:
    assert would_change(idle_view(**facts)) == ""


def test_what_no_rule_is_about_needs_nothing() -> None:
    patient = Rulebook(msgspec.structs.replace(POLICY, classes={}))
    assert would_change(View(subject(state=State.RUNNING, devices=())), patient) == ""


def exempted(*rules: str) -> Rulebook:
    one = Exemption(reason="thesis", owner="ann", rules=rules, until=NOW + DAY)
    return Rulebook(msgspec.structs.replace(POLICY, exemptions=(one,)))


def test_what_is_exempt_names_its_exemption_and_suggests_no_other() -> None:
    words = would_change(idle_view(), exempted())
    assert words == (
        f"an admin ends its exemption in the policy; currently exempt until {NOW + DAY:%Y-%m-%d %H:%M} UTC: thesis"
    )


def test_what_an_exemption_does_not_suspend_is_still_answered() -> None:
    words = would_change(View(subject(class_="api", started=NOW - 20 * HOUR)), exempted("idle"))
    assert "currently exempt until" in words
    assert "workload hold docker/node-3/eval --suspends max_runtime" in words
    assert "an admin exempts it" not in words


def test_what_gpukeeper_stopped_can_be_brought_back_until_it_is_removed() -> None:
    view = ended_view()
    stopped = Stopped("gpukeeper", "max_runtime", NOW - MINUTE, view.subject.seen.incarnation)
    ours = with_(view, memory=Memory(stopped=stopped))
    assert "restore it: gpukeeper restore docker/node-3/eval. It will be deleted " in would_change(ours)
    for other in (
        msgspec.structs.replace(stopped, by="ann"),
        msgspec.structs.replace(stopped, incarnation="another run"),
    ):
        assert "restore" not in would_change(with_(view, memory=Memory(stopped=other)))


def test_a_hold_does_not_prevent_the_end_of_the_maximum_runtime_within_it() -> None:
    running = View(subject(class_="api", started=NOW - 20 * HOUR))
    act = in_spite_of(running, BOOK, Hold("ann", NOW, NOW + 12 * HOUR), NOW, EVERY, at_any_time)
    assert act is not None
    assert (act.action, act.rule, act.at) == (Action.STOP, "max_runtime", NOW + 4 * HOUR)
    assert in_spite_of(running, BOOK, Hold("ann", NOW, NOW + HOUR), NOW, EVERY, at_any_time) is None
    granted = Hold("root", NOW, NOW + 12 * HOUR, suspends=("max_runtime",), admin=True)
    assert in_spite_of(running, BOOK, granted, NOW, EVERY, at_any_time) is None


def test_the_time_of_the_next_thing_is_that_of_the_first_warning() -> None:
    """Not that of the stop: somebody who reads "due in 30m" is warned after 24."""
    used = with_(idle_view(), series=(Series(Signal.GPU, "GPU-0", NOW - 89 * MINUTE, (90.0,) * 90), *quiet()[1:]))
    decision = decide(used, BOOK, NOW)
    assert decision.due == NOW + 24 * MINUTE
    assert told(used)[0][1:] == ("warn idle", 1)

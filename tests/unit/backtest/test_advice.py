"""Candidates of advice on hand-made traces: one that must win, one that must not, a tie; and the policy that is written
does on the trace exactly what was reported."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from gpukeeper.__main__ import app
from gpukeeper.backtest.comparison import PartOfTrace, compare
from gpukeeper.backtest.replays import Asked, advice_on
from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.cli.advise import as_policy
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import JudgedRun, Judging
from gpukeeper.model.policy import Mode, Policy
from gpukeeper.model.series import RecordedRun, RecordedSeries, Signal
from gpukeeper.traces.synthetic import SyntheticTrace
from gpukeeper.views.advice import Advice, Kind, of_class
from gpukeeper.views.backtest import TraceFacts
from tests.unit.backtest.traces import Listed

pytestmark = pytest.mark.slow

T0 = datetime(2026, 3, 2, tzinfo=UTC)  # a Monday
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
DAYS = 18
COMPARED = T0 + 8 * DAY  # candidates are fitted before it
JUDGING = Judging(horizon=20 * HOUR)
WINDOWS = (HOUR, 3 * HOUR, 8 * HOUR)

Parts = tuple[tuple[int, float], ...]  # minutes, and the level in them
BUSY, QUIET = 90.0, 0.0
PAUSED: Parts = ((120, BUSY), (300, QUIET), (60, BUSY))  # comes back after five hours
LEFT: Parts = ((120, BUSY), (900, QUIET))


def series(signal: Signal, device: str, start: datetime, parts: Parts) -> RecordedSeries:
    return RecordedSeries(signal, device, start, array("f", [level for count, level in parts for _ in range(count)]))


def run(number: int, start: datetime, gpu: Parts, other: tuple[Signal, Parts] | None, owner: str) -> RecordedRun:
    device = f"GPU-{number}"
    more = () if other is None else (series(other[0], "", start, other[1]),)
    return RecordedRun(
        name=f"run-{number}",
        started=start,
        ended=start + sum(count for count, _ in gpu) * MINUTE,
        devices=(device,),
        series=(series(Signal.GPU, device, start, gpu), *more),
        owner=owner,
        class_="docker",
        platform="docker",
        kind="container",
    )


Life = tuple[Parts, tuple[Signal, Parts] | None, str]


def trace(
    life: Callable[[int, datetime], Life], signals: frozenset[Signal] = frozenset(), hour: int = 1, each_day: int = 4
) -> Listed:
    runs = []
    for number in range((DAYS - 1) * each_day):
        start = T0 + number // each_day * DAY + hour * HOUR + number % each_day * 5 * MINUTE
        runs.append(run(number, start, *life(number, start)))
    return Listed(runs, signals | {Signal.GPU}, T0 + DAYS * DAY)


@pytest.fixture
def given(tmp_path: Path) -> Callable[[str], Policy]:
    def read(text: str) -> Policy:
        file = tmp_path / "given.yaml"
        file.write_text(f"preset: shared-host\nscope: {{docker: {{}}}}\n{text}\n")
        return load_policy(file).policy

    return read


def advice(
    made: Listed, policy: Policy, windows: tuple[timedelta, ...] = WINDOWS, judging: Judging = JUDGING
) -> Advice:
    asked = Asked(policy=policy, source="given.yaml", grid=tuple(map(Variant, windows)), judging=judging, allowed=0.02)

    def facts(runs: int) -> TraceFacts:
        return TraceFacts(
            source=made.source, begin=made.begin, end=made.end, runs=runs, rows=0, bad_rows=0, bad=(), not_recorded=()
        )

    return advice_on(made, asked, facts)


def why(found: Advice, kind: Kind) -> str:
    return next(one.why for one in found.choice.tried if one.kind is kind)


def check_the_policy(found: Advice, made: Listed, policy: Policy, folder: Path) -> Policy:
    """Written, loaded and replayed on the part that nothing was fitted to."""
    file = folder / "advice.yaml"
    file.write_text(as_policy(found, policy))
    checked = CliRunner().invoke(app, ["policy", "check", str(file)])
    assert checked.exit_code == 0, checked.output
    written = load_policy(file).policy
    assert written.mode is Mode.PLAN
    last = PartOfTrace(made, found.split, is_later=True)
    runs = compare(last, written, (GIVEN,), found.judging)[GIVEN]
    assert found.classes
    for one in found.classes:
        assert of_class(one.class_, runs) == one.later
    return written


def typing(number: int, start: datetime) -> Life:
    """Half of the work pauses while its owner types; the rest is left."""
    typed = ((120, 0.0), *((9, 0.0), (1, 1.0)) * 30, (60, 0.0))
    return (PAUSED, (Signal.TERMINAL, typed), "ann") if number % 2 else (LEFT, (Signal.TERMINAL, ((1020, 0.0),)), "bob")


def test_a_signal_that_tells_pauses_from_left_work_wins(given: Callable[[str], Policy], tmp_path: Path) -> None:
    policy = given("activity: {signals: []}")
    made = trace(typing, frozenset({Signal.TERMINAL}), hour=9, each_day=8)
    found = advice(made, policy, (HOUR, 3 * HOUR))
    assert (found.kind, found.signals, why(found, Kind.SIGNALS)) == (Kind.SIGNALS, ("terminal",), "")
    (one,) = found.classes
    assert one.later.regrets == one.found.regrets == 0
    assert one.later.won > 0
    assert found.plain_total.won == 0, "no idle time alone has an allowed regret"
    assert check_the_policy(found, made, policy, tmp_path).activity.signals == ("terminal",)


def test_a_signal_that_no_longer_tells_them_apart_is_not_advised(given: Callable[[str], Policy]) -> None:
    def life(number: int, start: datetime) -> Life:
        gpu, other, owner = typing(number, start)
        silent = (Signal.TERMINAL, ((sum(count for count, _ in gpu), 0.0),))
        return gpu, other if start < COMPARED else silent, owner

    made = trace(life, frozenset({Signal.TERMINAL}))
    found = advice(made, given("activity: {signals: []}"), (HOUR, 3 * HOUR))
    assert (found.kind, found.signals) == (Kind.PLAIN, None)
    assert why(found, Kind.SIGNALS) == "more regret than allowed"
    assert next(one for one in found.choice.tried if one.kind is Kind.SIGNALS).found.regrets == 0, "it fitted well"


def test_the_plain_rule_wins_a_tie(given: Callable[[str], Policy], tmp_path: Path) -> None:
    def life(number: int, start: datetime) -> Life:
        return LEFT, (Signal.CPU, ((135, 100.0), (885, 0.0))), f"user{number % 4}"

    policy = given("activity: {signals: [cpu]}")
    made = trace(life, frozenset({Signal.CPU}))
    found = advice(made, policy)
    assert (found.kind, found.owners) == (Kind.PLAIN, None)
    plain, signals = found.choice.tried[:2]
    assert plain.unseen.won < signals.unseen.won < plain.unseen.won * 1.05
    assert signals.why == "wins less than 5% more than the plain rule: a tie"
    assert check_the_policy(found, made, policy, tmp_path).activity.signals == ("cpu",)


def test_a_signal_that_the_trace_does_not_have_is_never_proposed_nor_dropped(given: Callable[[str], Policy]) -> None:
    found = advice(trace(lambda number, start: (LEFT, None, "ann")), given(""))
    assert Kind.SIGNALS not in [one.kind for one in found.choice.tried]
    assert found.signals is None


def habits(number: int, start: datetime) -> Life:
    return (PAUSED, None, "ann") if number % 4 == 0 else (LEFT, None, "bob")


def test_owners_who_come_back_get_a_longer_idle_time(given: Callable[[str], Policy], tmp_path: Path) -> None:
    policy, made = given(""), trace(habits)
    found = advice(made, policy)
    assert found.kind is Kind.OWNERS
    assert found.owners is not None
    assert (found.owners.idle, list(found.owners.returns)) == (8 * HOUR, ["ann"])
    assert found.owners.returns["ann"] >= 10
    assert found.classes[0].window == HOUR
    assert found.total.won > found.plain_total.won * 1.5
    written = check_the_policy(found, made, policy, tmp_path)
    assert written.groups["came-back"].members == ("ann",)
    assert "came back at least 2 times" in (tmp_path / "advice.yaml").read_text()


def test_a_habit_that_changes_hands_is_not_advised(given: Callable[[str], Policy]) -> None:
    def life(number: int, start: datetime) -> Life:
        gpu, other, owner = habits(number, start)
        return gpu, other, owner if start < COMPARED else {"ann": "bob", "bob": "ann"}[owner]

    found = advice(trace(life, hour=9), given(""))
    assert (found.kind, found.owners) == (Kind.PLAIN, None)
    assert why(found, Kind.OWNERS) == "more regret than allowed"


def test_groups_of_the_policy_that_have_idle_times_are_left_alone(given: Callable[[str], Policy]) -> None:
    found = advice(trace(habits), given("groups: {staff: {members: [ann], idle: 2x}}"))
    assert Kind.OWNERS not in [one.kind for one in found.choice.tried]


def test_passes_that_act_in_the_afternoon_spare_what_is_used_every_morning(
    given: Callable[[str], Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def life(number: int, start: datetime) -> Life:
        night: Parts = ((180, BUSY), (960, QUIET), (70, BUSY))
        return (night if number % 2 else ((180, BUSY), (2000, QUIET))), None, f"user{number % 4}"

    policy, made = given(""), trace(life, hour=15, each_day=10)
    found = advice(made, policy, (2 * HOUR, 3 * HOUR), Judging(horizon=30 * HOUR))
    assert (found.kind, found.at) == (Kind.HOURS, "*/5 12-17 * * 1-5")
    assert found.classes[0].later.regrets == 0
    assert check_the_policy(found, made, policy, tmp_path).schedule.at == found.at
    monkeypatch.undo()
    time.tzset()


def test_a_trace_that_is_too_short_for_three_parts_tries_the_plain_rule_alone(given: Callable[[str], Policy]) -> None:
    found = advice(trace(habits), given(""), judging=Judging(horizon=100 * HOUR))
    assert (found.refused, found.kind, found.choice.tried) == ("", Kind.PLAIN, ())
    assert found.choice.why.startswith("Only the plain rule was tried. The trace is too short")


def test_a_policy_that_differs_in_nothing_for_a_run_is_not_replayed_again() -> None:
    made, policy = SyntheticTrace(5, 30, 4), load_policy(None).policy
    variants = (GIVEN, Variant(2 * HOUR), Variant(2 * HOUR, None, ()), Variant(None, 5.0))
    together = compare(made, policy, variants, JUDGING)
    for one in variants:
        assert without_effort(together[one]) == without_effort(compare(made, policy, (one,), JUDGING)[one])


def without_effort(runs: list[JudgedRun]) -> list[JudgedRun]:
    return [msgspec.structs.replace(one, evaluated=0) for one in runs]

"""Totals, intervals and advice of a backtest, from runs whose answer is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.ledger.meta import BacktestRecord
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Afterwards, JudgedRun, JudgedStop, Judging
from gpukeeper.model.decision import Action
from gpukeeper.model.policy import ClassSettings, Mode, Policy
from gpukeeper.views.advice import Advice, Request, advise
from gpukeeper.views.backtest import TraceFacts, regret_between, report, tally, won_between
from gpukeeper.views.own_state import backtest_warning

T0 = datetime(2026, 3, 2, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FACTS = TraceFacts(
    source="a.csv", begin=T0, end=T0 + 30 * DAY, runs=40, rows=100, bad_rows=0, bad=(), not_recorded=("cpu",)
)


def judged(
    number: int, afterwards: Afterwards | None, won: float = 5.0, rule: str = "idle", class_: str = "batch"
) -> JudgedRun:
    regretted = afterwards is Afterwards.REGRET
    stop = None
    if afterwards is not None:
        stop = JudgedStop(
            action=Action.STOP,
            since=None,
            due=None,
            at=T0 + HOUR,
            rule=rule,
            reason="idle for 1h",
            afterwards=afterwards,
            used_again=T0 + 2 * HOUR if regretted else None,
            won=won,
            cost=1.0 if regretted else 0.0,
        )
    return JudgedRun(
        place=("trace", "trace"),
        started=T0,
        ended=None,
        name=f"run-{number}",
        owner=f"owner-{number % 4}",
        class_=class_,
        gpus=1,
        held=10.0,
        measured=9.0,
        unused_tail=6.0,
        warned=2,
        came_back=0,
        stop=stop,
        evaluated=3,
    )


def some(unused: int, regrets: int, *, class_: str = "batch", won: float = 5.0, kept: int = 0) -> list[JudgedRun]:
    kinds = [*[Afterwards.UNUSED] * unused, *[Afterwards.REGRET] * regrets, *[None] * kept]
    return [judged(number, kind, won, class_=class_) for number, kind in enumerate(kinds)]


def test_stops_whose_end_is_not_known_are_no_part_of_the_share_of_regrets() -> None:
    open_ones = [judged(50, Afterwards.CENSORED), judged(51, Afterwards.UNKNOWABLE), judged(52, None)]
    total = tally([*some(3, 1), *open_ones])
    assert (total.runs, total.stops, total.known, total.regret) == (7, 6, 4, 0.25)
    assert (total.won, total.cost, total.net) == (30.0, 1.0, 29.0)
    assert total.coverage == pytest.approx(0.9)
    assert tally([]).regret is None
    assert tally([]).coverage is None


def test_only_the_stops_of_one_rule_can_be_counted() -> None:
    mixed = [*some(2, 0), judged(9, Afterwards.REGRET, rule="max_runtime")]
    assert (tally(mixed).regrets, tally(mixed, "idle").regrets, tally(mixed, "idle").runs) == (1, 0, 3)


def test_no_regret_in_few_stops_proves_little() -> None:
    few, many = regret_between(some(3, 0)), regret_between(some(300, 0))
    assert few is not None
    assert many is not None
    assert few.low == many.low == 0.0
    assert few.high > 0.5
    assert many.high < 0.02
    assert regret_between([judged(1, Afterwards.CENSORED)]) is None


def test_the_intervals_contain_what_was_seen_and_are_the_same_each_time() -> None:
    runs = some(30, 10)
    between, won = regret_between(runs), won_between(runs)
    assert between is not None
    assert won is not None
    assert between.low < 0.25 < between.high
    assert won.low < tally(runs).net < won.high
    assert won_between(runs) == won
    assert won_between([judged(1, None)]) is None


def test_the_report_groups_and_says_what_it_does_not_know() -> None:
    made = report("policy.yaml", "abc", FACTS, Judging(), {GIVEN: some(3, 1), Variant(HOUR): some(4, 0)})
    assert [row.name for row in made.classes] == ["batch"]
    assert sum(row.tally.runs for row in made.owners) == 4
    assert [row.words for row in made.curve] == ["this policy", "idle 1h"]
    assert len(made.stops) == 4
    assert any("cpu" in words for words in made.notes)
    short = FACTS.__class__(**{name: getattr(FACTS, name) for name in FACTS.__struct_fields__} | {"end": T0 + 4 * DAY})
    assert any("The trace is short" in words for words in report("", "", short, Judging(), {GIVEN: []}).notes)


def asked(allowed: float, **more: object) -> Request:
    given: dict[str, object] = {"trace": FACTS, "split": T0 + 20 * DAY, **more}
    return Request(
        policy="policy.yaml",
        judging=Judging(),
        allowed=allowed,
        idle={"batch": HOUR, "api": None},
        threshold=5.0,
        **given,  # type: ignore[arg-type]
    )


def advice(allowed: float, **more: object) -> Advice:
    short, long = Variant(HOUR), Variant(5 * HOUR)
    found = {GIVEN: some(20, 20), short: some(30, 10, won=9.0), long: some(20, 0, kept=20)}
    later = {GIVEN: some(20, 20), short: some(10, 10, kept=20), long: some(15, 1, kept=24)}
    return advise(asked(allowed, **more), found, later)


def test_the_idle_time_that_wins_most_within_the_allowed_regret_is_advised() -> None:
    (one,) = advice(0.02).classes
    assert (one.class_, one.window, one.found.regrets) == ("batch", 5 * HOUR, 0)
    assert (one.later.stops, one.held_up) == (16, False), "the later part says so where it does not hold"
    (generous,) = advice(0.30).classes
    assert generous.window == HOUR


def test_without_enough_stops_there_is_no_advice_and_a_reason() -> None:
    few = {GIVEN: some(3, 0), Variant(HOUR): some(3, 0)}
    (one,) = advise(asked(0.02), few, few).classes
    assert (one.window, one.why) == (None, "fewer than 10 stops with a known end")
    (bad,) = advise(asked(0.02), {GIVEN: some(9, 9), Variant(HOUR): some(9, 9)}, few | {GIVEN: some(9, 9)}).classes
    assert bad.why == "every idle time that was tried has more regret; the least is 50%"


def test_a_trace_that_is_too_short_gives_no_advice() -> None:
    found = advice(0.02, split=T0 + 2 * DAY)
    assert found.classes == ()
    assert found.refused.startswith("The trace is too short: its parts are 2d and 28d long")


def test_the_plain_choice_wins_ties() -> None:
    same = {variant: some(20, 0) for variant in (GIVEN, Variant(HOUR, 3.0), Variant(2 * HOUR, 3.0), Variant(HOUR, 5.0))}
    found = advise(asked(0.02), same, same)
    assert (found.threshold, found.classes[0].window) == (5.0, HOUR)
    del same[Variant(HOUR, 5.0)]
    assert advise(asked(0.02), same, same).classes[0].window == 2 * HOUR


def record(known: int, regrets: int) -> BacktestRecord:
    return BacktestRecord(
        at=T0, source="ledger", begin=T0, end=T0 + 30 * DAY, runs=99, stops=50, known=known, regrets=regrets, won=7.0
    )


def test_a_policy_that_acts_is_warned_about_without_a_backtest_or_with_too_much_regret() -> None:
    acting = Policy(mode=Mode.ENFORCE, classes={"batch": ClassSettings(idle=HOUR)})
    assert "is not on record here" in (backtest_warning(acting, None) or "")
    assert "12 of 40 stops by this policy (30%) would have been regretted" in (
        backtest_warning(acting, record(40, 12)) or ""
    )
    assert backtest_warning(acting, record(40, 2)) is None, "5 % is allowed"
    assert backtest_warning(acting, record(0, 0)) is None, "nothing is known of it"
    planned = Policy(mode=Mode.PLAN, classes=acting.classes)
    assert backtest_warning(planned, None) is None, "a record is asked for before it acts"
    assert backtest_warning(planned, record(40, 12)) == backtest_warning(acting, record(40, 12))
    assert backtest_warning(Policy(mode=Mode.ENFORCE), None) is None, "it stops no idle work"

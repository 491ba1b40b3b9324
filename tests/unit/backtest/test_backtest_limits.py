"""Budget, breaker and demand over recorded runs, with answers calculated by hand.

Every run is used for two hours. Alone, with an idle time of an hour, it is warned at 2:50 and 3:00 and stopped at 3:05.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec
import pytest

from gpukeeper.backtest.comparison import Where
from gpukeeper.backtest.replays import Compared, compare_together, scarce_times
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.model.policy import Amount, Breaker, Budget, Demand, Policy
from gpukeeper.model.series import MadePasses, RecordedRun
from gpukeeper.model.subject import PlaceKey
from tests.unit.backtest.traces import HOUR, JUDGING, MINUTE, POLICY, T0, Listed, run

BUSY, QUIET = (2 * HOUR, 90.0), (10 * HOUR, 0.0)
PLACE: PlaceKey = ("trace", "trace")


def trace_of(*runs: RecordedRun, made: Mapping[PlaceKey, MadePasses] | None = None) -> Listed:
    named = [msgspec.structs.replace(one, name=f"run-{number}") for number, one in enumerate(runs)]
    return Listed(named, made=made)


def policy(per_pass: int = 50, per_hour: int = 600, running: float = 1.0) -> Policy:
    budget = Budget(per_pass=Amount(count=per_pass), per_hour=Amount(count=per_hour))
    return msgspec.structs.replace(POLICY, budget=budget, breaker=Breaker(running=running))


def compared(trace: Listed, given: Policy) -> tuple[Compared, list[timedelta | None]]:
    """When each would be stopped."""
    found = compare_together(trace, given, (GIVEN,), JUDGING)
    return found, [None if one.stop is None else one.stop.at - T0 for one in found.runs[GIVEN]]


def at(hours: int, minutes: int = 0) -> timedelta:
    return hours * HOUR + minutes * MINUTE


def test_within_the_budget_nothing_is_deferred() -> None:
    found, stops = compared(trace_of(*[run(BUSY, QUIET)] * 5), policy())
    assert stops == [at(3, 5)] * 5
    assert not found.limits


def test_the_budget_of_a_pass_defers_to_the_next_one() -> None:
    found, stops = compared(trace_of(*[run(BUSY, QUIET)] * 5), policy(per_pass=2))
    assert stops == [at(3, 5), at(3, 5), at(3, 10), at(3, 10), at(3, 15)]
    assert sorted(found.limits[GIVEN].stop_from) == ["run-2", "run-3", "run-4"]


def test_the_budget_of_an_hour_defers_until_an_hour_is_over() -> None:
    _found, stops = compared(trace_of(*[run(BUSY, QUIET)] * 3), policy(per_hour=1))
    assert stops == [at(3, 5), at(4, 10), at(5, 15)]


def test_what_a_daemon_did_to_other_things_counts_in_the_same_hour() -> None:
    passes = tuple(T0 + number * 5 * MINUTE for number in range(24 * 12))
    others = tuple(int(one == T0 + at(2, 30)) for one in passes)
    zeros = (0,) * len(passes)
    made = {PLACE: MadePasses(passes, zeros, zeros, others)}
    _found, stops = compared(trace_of(run(BUSY, QUIET), run(BUSY, QUIET), made=made), policy(per_hour=2))
    assert stops == [at(3, 5), at(3, 35)], "at 3:35 the other one is more than an hour ago"


def test_what_is_used_again_before_its_turn_is_not_stopped_then() -> None:
    back = run(BUSY, (70 * MINUTE, 0.0), (HOUR, 90.0), QUIET)  # used again from 3:10 to 4:10
    _found, stops = compared(trace_of(run(BUSY, QUIET), back), policy(per_hour=1))
    assert stops == [at(3, 5), at(5, 15)], "a new hour of idle time, with its warnings"


def test_what_ends_before_its_turn_is_never_stopped() -> None:
    found, stops = compared(trace_of(run(BUSY, QUIET), run(BUSY, (2 * HOUR, 0.0))), policy(per_hour=1))
    assert stops == [at(3, 5), None]
    assert found.runs[GIVEN][1].stop is None


def test_a_breaker_that_opens_stops_everything_and_says_so() -> None:
    found, stops = compared(trace_of(*[run(BUSY, QUIET)] * 4, run((12 * HOUR, 90.0))), policy(running=0.5))
    assert stops == [None] * 5
    (opened,) = found.limits[GIVEN].opened
    assert opened.first == T0 + at(3, 5)
    assert opened.place == PLACE
    assert opened.words.startswith("The plan would stop 4 of 5 running workloads at once")


def test_a_breaker_closes_when_less_is_due() -> None:
    """Two of four come back at 4:00, so that two of five are due, and half of five is allowed."""
    back = run(BUSY, (2 * HOUR, 0.0), (8 * HOUR, 90.0))
    busy = run((12 * HOUR, 90.0))
    _found, stops = compared(trace_of(run(BUSY, QUIET), run(BUSY, QUIET), back, back, busy), policy(running=0.5))
    assert stops == [at(4, 5), at(4, 5), None, None, None]


def test_a_breaker_that_is_open_also_stops_warnings() -> None:
    """It is open from 3:05 to 4:30; one that would have been warned at 3:50 is warned when it closes."""
    back = run(BUSY, (150 * MINUTE, 0.0), (450 * MINUTE, 90.0))
    later = run((3 * HOUR, 90.0), (9 * HOUR, 0.0))
    found, stops = compared(trace_of(back, back, back, later, run((12 * HOUR, 90.0))), policy(running=0.4))
    assert found.limits[GIVEN].opened[0].first == T0 + at(3, 5)
    warned = found.runs[GIVEN][3].warned
    assert (stops[3], warned) == (at(4, 45), 2), "warned at 4:35 and 4:40, with ten minutes of lead"


def test_a_recorded_count_of_what_else_runs_keeps_the_breaker_closed() -> None:
    passes = tuple(T0 + number * 5 * MINUTE for number in range(24 * 12))
    made = {PLACE: MadePasses(passes, (100,) * len(passes), (100,) * len(passes), (0,) * len(passes))}
    _found, stops = compared(trace_of(*[run(BUSY, QUIET)] * 4, made=made), policy(running=0.5))
    assert stops == [at(3, 5)] * 4


def test_each_variant_has_its_own_limits() -> None:
    variants = (GIVEN, Variant(3 * HOUR))
    trace = trace_of(*[run(BUSY, QUIET)] * 2)
    alone = compare_together(trace, policy(per_pass=1), variants, JUDGING)
    two = compare_together(trace, policy(per_pass=1), variants, JUDGING, Where(workers=2))
    assert alone == two
    stops = {variant: [one.stop.at - T0 for one in alone.runs[variant] if one.stop] for variant in variants}
    assert stops == {GIVEN: [at(3, 5), at(3, 10)], variants[1]: [at(5), at(5, 5)]}


@pytest.mark.parametrize(("gpus", "expected"), [(4, []), (2, [at(0, 5), at(12)])])
def test_gpus_are_scarce_while_enough_of_them_are_held(gpus: int, expected: list[timedelta]) -> None:
    found = scarce_times(trace_of(run(BUSY, QUIET), run(BUSY, QUIET)), gpus, POLICY)
    assert [(one - T0).total_seconds() // 60 for one in found] == [one.total_seconds() // 60 for one in expected]


def test_idle_times_are_shorter_while_gpus_are_scarce() -> None:
    demanding = msgspec.structs.replace(policy(), demand=Demand(idle_factor=0.5))
    trace = trace_of(run(BUSY, QUIET), run(BUSY, QUIET))

    def first(scarce: tuple[datetime, ...] | None) -> timedelta:
        stop = compare_together(trace, demanding, (GIVEN,), JUDGING, scarce=scarce).runs[GIVEN][0].stop
        assert stop is not None
        return stop.at - T0

    assert first(None) == at(3, 5)
    assert first(scarce_times(trace, 2, demanding)) == at(2, 40), "half an hour, and ten minutes after the last warning"

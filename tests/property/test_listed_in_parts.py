"""Passes in which a run would be stopped: listed in parts, and again after a change, they are those listed at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from random import Random

import msgspec
import pytest

from gpukeeper.backtest import replays
from gpukeeper.backtest.replays import compare_together
from gpukeeper.config.load import load_policy
from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.replay import GIVEN, Listed, Passes, Variant, covering, proposals
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import Amount, Breaker, Budget, Schedule
from gpukeeper.model.series import RecordedRun, TraceTime
from gpukeeper.traces.synthetic import SyntheticTrace

HOUR = timedelta(hours=1)
POLICY = load_policy(None).policy
TRACE = SyntheticTrace(5, 20, 3)
SCHEDULES = {"every pass acts": POLICY.schedule, "acts at night": Schedule(at="30 2 * * *")}


def listed(run: RecordedRun, schedule: Schedule, closed: frozenset[datetime], known: Listed) -> Listed:
    policy = msgspec.structs.replace(POLICY, schedule=schedule)
    book, passes = Rulebook(covering(policy, (run.platform,))), Passes(schedule.every, opening(schedule))
    return proposals(run, book, passes, TraceTime(TRACE.begin, TRACE.end), TRACE.signals, closed, known)


def some_passes(random: Random) -> frozenset[datetime]:
    """Hours in which the breaker is open."""
    hours = [TRACE.begin + number * HOUR for number in range((TRACE.end - TRACE.begin) // HOUR)]
    opened = [hour for hour in hours if random.random() < 0.5]
    return frozenset(hour + number * POLICY.schedule.every for hour in opened for number in range(12))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_list_in_parts_is_the_list_at_once(name: str) -> None:
    schedule, changes = SCHEDULES[name], 0
    for seed, run in enumerate(TRACE.runs()):
        before, after = some_passes(Random(seed)), some_passes(Random(seed + 1000))
        part = Listed(HOUR)
        for within in (HOUR, 30 * HOUR):
            part = listed(run, schedule, before, msgspec.structs.replace(part, within=within))
            assert part == listed(run, schedule, before, Listed(within))
        kept = part.until_changed(before ^ after)
        again = listed(run, schedule, after, kept)
        assert again == listed(run, schedule, after, Listed(30 * HOUR))
        changes += again.steps != part.steps
    assert changes, "in no run did the breaker matter"


@pytest.mark.parametrize(
    "limits",
    [
        (Budget(per_pass=Amount(count=1), per_hour=Amount(count=1)), POLICY.breaker),
        (POLICY.budget, Breaker(running=0.05, floor=1)),
    ],
    ids=["tight budget", "breaker"],
)
def test_turns_do_not_depend_on_how_far_passes_are_listed(
    limits: Sequence[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, breaker = limits
    trace = SyntheticTrace(5, 12, 2)
    policy = msgspec.structs.replace(POLICY, budget=budget, breaker=breaker)
    variants = (GIVEN, Variant(2 * HOUR))
    in_parts = compare_together(trace, policy, variants, Judging())
    assert in_parts.limits
    monkeypatch.setattr(replays, "FIRST", timedelta(days=100))
    assert compare_together(trace, policy, variants, Judging()) == in_parts

"""Recorded work with the limits that concern all of it together: budget, breaker, and scarce GPUs.

First each run for itself. Where that is more at once than the policy allows, the passes in which each run would be
stopped are listed, and the turn of each is found. A breaker that is open also stops warnings, and later warnings mean
later stops: this is done again until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpukeeper.engine.pressure import Pressure
from gpukeeper.lifecycle.backtest.limits import NOTHING_LIMITED, Life, Limited, Proposed, limited
from gpukeeper.lifecycle.backtest.outcome import JudgedRun, Judging
from gpukeeper.lifecycle.backtest.replay import MOMENT, ReplayedStep
from gpukeeper.lifecycle.backtest.variants import Variant, applied
from gpukeeper.model.policy import Policy
from gpukeeper.model.trace import Trace
from gpukeeper.wiring.backtests import (
    HERE,
    Comparison,
    Progress,
    Where,
    comparison,
    judged_runs,
    proposed,
    results_of,
)

DAY = timedelta(days=1)
ROUNDS = 5  # each costs as much as the replay itself, or more while a breaker is open for days
LONGER = 8  # times as long, if a turn did not come


class Compared(NamedTuple):
    """`limits`: what budget and breaker refused, under each variant under which they refused anything. `unsettled`:
    variants whose warnings and breaker were not reconciled: from some time on their stops are approximate."""

    runs: Mapping[Variant, list[JudgedRun]]
    limits: Mapping[Variant, Limited]
    unsettled: frozenset[Variant]


def compare_together(
    trace: Trace,
    policy: Policy,
    variants: Sequence[Variant],
    judging: Judging,
    where: Where = HERE,
    progress: Progress = lambda done: None,
    scarce: tuple[datetime, ...] | None = None,
) -> Compared:
    given = comparison(trace, policy, variants, judging, scarce)
    alone = judged_runs(trace, given, where, progress)
    at_once = [variant for variant in variants if _first(alone[variant], applied(policy, variant), given).stop_from]
    if not at_once:
        return Compared(alone, {}, frozenset())
    here = msgspec.structs.replace(where, resume=None)
    found = dict.fromkeys(at_once, NOTHING_LIMITED)
    left, within = list(at_once), DAY
    for _ in range(ROUNDS):
        new = _turns(trace, _for(given, left, found, within), here, alone[left[0]], progress)
        within = within if all(one.whole for one in new.values()) else within * LONGER
        settled = [variant for variant in left if new[variant].whole and new[variant].closed == found[variant].closed]
        found.update({variant: one for variant, one in new.items() if one.whole})
        left = [variant for variant in left if variant not in settled]
        if not left:
            break
    again = judged_runs(trace, _for(given, at_once, found), here, progress)
    return Compared({**alone, **again}, found, frozenset(left))


def scarce_times(trace: Trace, gpus: int, policy: Policy) -> tuple[datetime, ...]:
    """When GPUs became scarce, and were not any more, in turn: from how many of `gpus` the recorded runs held."""
    changes: list[tuple[datetime, int]] = []
    for run in trace.runs():
        changes.append((run.started, len(run.devices)))
        if run.ended is not None:
            changes.append((run.ended, -len(run.devices)))
    changes.sort()
    pressure, place, every = Pressure(), ("", ""), policy.schedule.every
    found: list[datetime] = []
    held = position = 0
    at = trace.begin
    while at < trace.end:
        while position < len(changes) and changes[position][0] <= at:
            held += changes[position][1]
            position += 1
        pressure.update_demand(place, held / gpus, policy.demand, at)
        if pressure.gpus_are_scarce(place) != bool(len(found) % 2):
            found.append(at + MOMENT)  # a pass decides by what the one before it saw
        at += every
    return tuple(found)


def _for(
    given: Comparison, variants: Sequence[Variant], limits: Mapping[Variant, Limited], within: timedelta | None = None
) -> Comparison:
    some = tuple(limits[variant] for variant in variants)
    return msgspec.structs.replace(given, variants=tuple(variants), limits=some, within=within)


def _first(runs: Sequence[JudgedRun], policy: Policy, given: Comparison) -> Limited:
    """From the first pass in which each would be stopped: whether anything is refused at all."""
    some = [Proposed(_life(one), (_step(one),)) for one in runs if one.stop is not None]
    return limited(map(_life, runs), some, policy, given.made)


def _turns(
    trace: Trace, given: Comparison, where: Where, runs: Sequence[JudgedRun], progress: Progress
) -> dict[Variant, Limited]:
    """`runs`: of any variant; only when each began and ended is taken from them."""
    some: dict[Variant, list[Proposed]] = {variant: [] for variant in given.variants}
    within, lives = given.within or DAY, [_life(one) for one in runs]
    for number, each in enumerate(results_of(proposed, trace.runs(), given, where)):
        life = lives[number]
        progress(number + 1)
        for variant, steps in zip(given.variants, each, strict=True):
            if steps:
                whole = (life.ended or trace.end) <= steps[0].at + within
                some[variant].append(Proposed(life, steps, whole))
    return {
        variant: limited(lives, found, applied(given.policy, variant), given.made) for variant, found in some.items()
    }


def _life(one: JudgedRun) -> Life:
    return Life(one.name, one.place, one.started, one.ended)


def _step(one: JudgedRun) -> ReplayedStep:
    stop = one.stop
    assert stop is not None, "only runs that would be stopped"
    return ReplayedStep(stop.at, stop.action, stop.rule, stop.reason, 0, stop.since, stop.due)

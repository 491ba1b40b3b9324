"""Recorded work with the limits that concern all of it together: budget, breaker, and scarce GPUs.

First each run for itself. Where that is more at once than the policy allows, the passes in which each run would be
stopped are listed, and the turn of each is found. A breaker that is open also stops warnings, and later warnings mean
later stops: this is done again until nothing changes. What was listed is kept from one round to the next: only what
follows a change is evaluated again, and only as far as turns come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpukeeper.engine.pressure import Pressure
from gpukeeper.lifecycle.backtest.limits import NOTHING_LIMITED, Life, Limited, Proposed, limited
from gpukeeper.lifecycle.backtest.outcome import JudgedRun, Judging
from gpukeeper.lifecycle.backtest.replay import MOMENT, NEVER, Listed, ReplayedStep
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
ROUNDS = 5  # each costs as much as what changed since the one before
LONGER = 8  # times as long, if a turn did not come
FIRST = timedelta(hours=3)  # most turns come soon
FURTHER = 4  # times as long, for a run whose turn did not come
FEW = 32  # runs that take less time than processes take to start


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
    lists = _Lists(trace, here, [_life(one) for one in alone[left[0]]], progress)
    for _ in range(ROUNDS):
        new = lists.turns(_for(given, left, found), within)
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


def _for(given: Comparison, variants: Sequence[Variant], limits: Mapping[Variant, Limited]) -> Comparison:
    some = tuple(limits[variant] for variant in variants)
    return msgspec.structs.replace(given, variants=tuple(variants), limits=some)


def _first(runs: Sequence[JudgedRun], policy: Policy, given: Comparison) -> Limited:
    """From the first pass in which each would be stopped: whether anything is refused at all."""
    some = [Proposed(_life(one), (_step(one),)) for one in runs if one.stop is not None]
    return limited(map(_life, runs), some, policy, given.made)


class _Lists:
    """The passes in which each run would be stopped, under each variant. `lives`: of all runs, in the order of the
    trace."""

    def __init__(self, trace: Trace, where: Where, lives: Sequence[Life], progress: Progress) -> None:
        self._trace, self._where, self._lives, self._progress = trace, where, lives, progress
        self._listed: dict[Variant, dict[str, Listed]] = {}
        self._limits: dict[Variant, Limited] = {}  # under which they were listed

    def turns(self, given: Comparison, within: timedelta) -> dict[Variant, Limited]:
        """When the turn of each run comes, if that is `within` after it would first be stopped."""
        for variant, limits in zip(given.variants, given.limits, strict=True):
            self._take(variant, limits)
        while True:
            self._continue(given)
            found = {variant: self._limited(variant, given, within) for variant in given.variants}
            if not self._lengthen(found, within):
                return found

    def _take(self, variant: Variant, limits: Limited) -> None:
        """Drops what depends on passes in which the breaker is open now, or is not any more."""
        before = self._limits.get(variant, NOTHING_LIMITED).closed
        places = before.keys() | limits.closed.keys()
        nothing = frozenset[datetime]()
        changed = {place: before.get(place, nothing) ^ limits.closed.get(place, nothing) for place in places}
        listed = self._listed.get(variant, {})
        self._listed[variant] = {
            life.name: listed.get(life.name, Listed(FIRST)).until_changed(changed.get(life.place, nothing))
            for life in self._lives
        }
        self._limits[variant] = limits

    def _continue(self, given: Comparison) -> None:
        known = {
            life.name: tuple(self._listed[variant][life.name] for variant in given.variants) for life in self._lives
        }
        short = {name: some for name, some in known.items() if any(one.is_short for one in some)}
        if not short:
            return
        where = self._where if len(short) > FEW else HERE
        runs = (run for run in self._trace.runs() if run.name in short)
        found = results_of(proposed, runs, msgspec.structs.replace(given, listed=short), where)
        for number, (name, some) in enumerate(zip(short, found, strict=True), 1):
            self._progress(number)
            for variant, one in zip(given.variants, some, strict=True):
                self._listed[variant][name] = one

    def _limited(self, variant: Variant, given: Comparison, within: timedelta) -> Limited:
        some: list[Proposed] = []
        for life in self._lives:
            steps = self._listed[variant][life.name].steps
            if steps:
                whole = (life.ended or self._trace.end) <= steps[0].at + within
                some.append(Proposed(life, steps, whole))
        return limited(self._lives, some, applied(given.policy, variant), given.made)

    def _lengthen(self, found: Mapping[Variant, Limited], within: timedelta) -> bool:
        """Whether the turn of any run did not come in what is listed, but may come in what is not."""
        longer = False
        for variant, limits in found.items():
            listed = self._listed[variant]
            for name in (name for name, at in limits.stop_from.items() if at == NEVER):
                one = listed[name]
                if one.goes_on is not None and one.within < within:
                    listed[name] = msgspec.structs.replace(one, within=min(one.within * FURTHER, within))
                    longer = True
        return longer


def _life(one: JudgedRun) -> Life:
    return Life(one.name, one.place, one.started, one.ended)


def _step(one: JudgedRun) -> ReplayedStep:
    stop = one.stop
    assert stop is not None, "only runs that would be stopped"
    return ReplayedStep(stop.at, stop.action, stop.rule, stop.reason, 0, stop.since, stop.due)

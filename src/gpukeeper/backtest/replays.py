"""Replays of recorded work that need more than each run for itself. The result does not depend on where they run.

Limits that concern all of it together: budget, breaker, and scarce GPUs. And advice: which parts of a trace are
replayed under which policies; fitted and compared is only what the idle rule can stop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain
from math import isnan
from typing import NamedTuple

import msgspec

from gpukeeper.backtest.comparison import (
    HERE,
    Comparison,
    PartOfTrace,
    Progress,
    Where,
    compare,
    comparison,
    judged_runs,
    proposed,
    results_of,
)
from gpukeeper.engine.memory import Pressure
from gpukeeper.lifecycle.replay import (
    GIVEN,
    MOMENT,
    NEVER,
    Listed,
    ReplayedStep,
    Variant,
    applied,
    beginning,
    may_stop_idle,
    middle,
)
from gpukeeper.lifecycle.replay_outcome import NOTHING_LIMITED, JudgedRun, Judging, Life, Limited, Proposed, limited
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import RecordedRun, Signal, Trace
from gpukeeper.views.advice import (
    Advice,
    Choice,
    Chosen,
    Judged,
    Kind,
    Request,
    Rule,
    advise,
    around,
    best_fit,
    choose,
    fit_owners,
    fit_plain,
    fit_setting,
    owners_can_differ,
    settings_to_try,
    too_short,
)
from gpukeeper.views.backtest import TraceFacts

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


SPLIT = 2 / 3


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """`source`: of the policy. `grid`: idle times and thresholds to try. `allowed`: share of regrets."""

    policy: Policy
    source: str
    grid: tuple[Variant, ...]
    judging: Judging
    allowed: float


class Stoppable(PartOfTrace):
    """Only runs that the idle rule can stop. `seen`: signals that any of them has; complete after the last."""

    def __init__(self, whole: Trace, split: datetime, policy: Policy, *, is_later: bool) -> None:
        super().__init__(whole, split, is_later=is_later)
        self._book = Rulebook(policy)
        self.seen: set[str] = set()

    def runs(self) -> Iterator[RecordedRun]:
        for run in super().runs():
            if may_stop_idle(self._book, beginning(run).subject):
                measured = (one.signal for one in run.series if not all(map(isnan, one.minutes)))
                self.seen.update(one.value for one in measured if one is not Signal.GPU)
                yield run


class Replays:
    """Parts of one trace under variants of one policy."""

    def __init__(self, trace: Trace, asked: Asked, where: Where, progress: Progress) -> None:
        self.trace, self.asked, self._where, self._progress = trace, asked, where, progress
        self.split = middle(trace.begin, trace.end, SPLIT)
        self.first = PartOfTrace(trace, self.split, is_later=False)
        self.last = PartOfTrace(trace, self.split, is_later=True)
        self.grid = tuple(dict.fromkeys(self._same(one) for one in asked.grid))
        self.windows = tuple({one.window for one in self.grid if one.window is not None})
        self.classes = tuple(asked.policy.classes)

    def _same(self, one: Variant) -> Variant:
        """Written without the threshold, if it is the policy's."""
        is_given = one.window is not None and one.threshold == self.asked.policy.activity.gpu
        return msgspec.structs.replace(one, threshold=None) if is_given else one

    def of(self, part: Trace, variants: Collection[Variant]) -> Judged:
        order = tuple(dict.fromkeys(variants)) if isinstance(variants, tuple) else tuple(sorted(variants, key=repr))
        return compare(part, self.asked.policy, order, self.asked.judging, self._where, self._progress)

    def stoppable(self, part: Trace, split: datetime, *, is_later: bool) -> Stoppable:
        return Stoppable(part, split, self.asked.policy, is_later=is_later)

    def plain(self, judged: Judged) -> Rule:
        return fit_plain(self.classes, self.asked.policy.activity.gpu, judged, self.asked.allowed)

    def owners(self, plain: Rule, judged: Judged) -> Rule:
        return fit_owners(plain, self.classes, judged, self.asked.allowed)

    def settings(self, plain: Rule, settings: Sequence[Variant], part: Trace) -> tuple[list[Rule], Judged]:
        """Each setting with the idle times around those of the plain rule."""
        if not settings:
            return [], {}
        windows = around(plain, self.windows)
        judged = self.of(part, tuple(msgspec.structs.replace(one, window=w) for one in settings for w in windows))
        return [fit_setting(one, self.classes, judged, self.asked.allowed) for one in settings], judged


def advice_on(
    trace: Trace,
    asked: Asked,
    facts: Callable[[int], TraceFacts],
    where: Where = HERE,
    progress: Progress = lambda done: None,
) -> Advice:
    """`facts`: of the trace, with the number of runs in its first part."""
    replays = Replays(trace, asked, where, progress)
    found = replays.of(replays.first, (GIVEN, *replays.grid))
    request = Request(
        policy=asked.source,
        trace=facts(len(found[GIVEN])),
        judging=asked.judging,
        allowed=asked.allowed,
        split=replays.split,
        idle={name: one.idle for name, one in asked.policy.classes.items()},
        threshold=asked.policy.activity.gpu,
    )
    if too_short((trace.begin, replays.split, trace.end), replays.grid, asked.judging):
        return advise(request, found, found)
    plain = replays.plain(found)
    chosen, choice = Chosen(rule=plain, fitted=found), _why_plain(replays)
    if choice is None:
        rule, choice = _compared(replays)
        if rule.kind is not Kind.PLAIN:
            again = _again(rule, plain, found, replays)
            if again.rule.choices:
                chosen = again
            else:
                words = (
                    f"Fitted again to all of the time before the split, {rule.kind} has no class with an allowed regret"
                )
                choice = msgspec.structs.replace(choice, why=f"{words}: the plain rule is kept.")
    later = replays.of(replays.last, plain.variants | chosen.rule.variants | {GIVEN})
    return advise(request, found, later, chosen, choice)


def _why_plain(replays: Replays) -> Choice | None:
    """None: other rules are tried, too."""
    begin = middle(replays.first.begin, replays.first.end, SPLIT)
    if not replays.windows:
        return Choice(why="Only the plain rule was tried: --sweep names no idle times.")
    words = too_short((replays.first.begin, begin, replays.first.end), replays.grid, replays.asked.judging)
    return Choice(why=f"Only the plain rule was tried. {words}") if words else None


def _compared(replays: Replays) -> tuple[Rule, Choice]:
    """Fitted on one part and compared on the next."""
    asked = replays.asked
    begin = middle(replays.first.begin, replays.first.end, SPLIT)
    early = replays.stoppable(replays.first, begin, is_later=False)
    found = dict(replays.of(early, replays.grid))
    plain = replays.plain(found)
    settings, judged = replays.settings(plain, settings_to_try(asked.policy, plain, early.seen), early)
    found |= judged
    rules = [plain]
    for kind in (Kind.SIGNALS, Kind.OWNERS, Kind.HOURS):
        mine = [one for one in settings if one.kind is kind]
        if kind is Kind.OWNERS and owners_can_differ(asked.policy):
            mine = [replays.owners(plain, found)]
        if mine:
            rules.append(best_fit(mine, found))
    needed = frozenset(chain.from_iterable(one.fitted_variants for one in rules))
    unseen = replays.of(replays.stoppable(replays.first, begin, is_later=True), needed) if needed else {}
    return choose(rules, found, unseen, asked.allowed, begin)


def _again(rule: Rule, plain: Rule, found: Judged, replays: Replays) -> Chosen:
    """The rule that won, fitted to all of the first part."""
    if rule.kind is Kind.OWNERS:
        return Chosen(rule=replays.owners(plain, found), fitted=found)
    (fitted,), judged = replays.settings(
        plain, (rule.rest,), replays.stoppable(replays.trace, replays.split, is_later=False)
    )
    return Chosen(rule=fitted, fitted=judged)

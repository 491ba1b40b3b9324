"""Advice from a trace: which parts of it are replayed under which policies. The result does not depend on where.

The first two thirds of the time fit the rules, the last third has the figures. If the trace is long enough, candidates
are fitted on two thirds of the first part and compared on the rest of it; only the one that wins there is fitted again
on the whole of it. Fitted and compared is only what the idle rule can stop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from itertools import chain
from math import isnan

import msgspec

from gpukeeper.lifecycle.backtest.outcome import Judging
from gpukeeper.lifecycle.backtest.parts import middle
from gpukeeper.lifecycle.backtest.replay import beginning
from gpukeeper.lifecycle.backtest.variants import GIVEN, Variant, may_stop_idle
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import Signal
from gpukeeper.model.trace import RecordedRun, Trace
from gpukeeper.views.advice import Advice, Choice, Chosen, Request, advise, choose, too_short
from gpukeeper.views.advice_rules import (
    Judged,
    Kind,
    Rule,
    around,
    best_fit,
    fit_owners,
    fit_plain,
    fit_setting,
    owners_can_differ,
    settings_to_try,
)
from gpukeeper.views.backtest import TraceFacts
from gpukeeper.wiring.backtests import HERE, PartOfTrace, Where, compare

SPLIT = 2 / 3
Progress = Callable[[int], None]


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

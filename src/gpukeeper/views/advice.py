"""Which rule wins most at the regret that is allowed: fitted on one part of the recorded time, chosen on the next, and
reported on the last. Values only; nothing is switched on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

import msgspec

from gpukeeper.lifecycle.backtest.outcome import Judging
from gpukeeper.lifecycle.backtest.variants import GIVEN, Variant
from gpukeeper.model.durations import in_words
from gpukeeper.views.advice_rules import (
    STOPS_MIN,
    Judged,
    Kind,
    Rule,
    advised,
    fit_plain,
    of_class,
    under,
    why_not,
)
from gpukeeper.views.backtest import Tally, TraceFacts


class ClassAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """`window` None: no advice, and `why` says why. `held_up`: the regret of the later part is within what is allowed;
    None: it had no stop whose end is known."""

    class_: str = msgspec.field(name="class")
    today: timedelta | None
    window: timedelta | None
    why: str
    found: Tally
    later: Tally
    today_later: Tally
    held_up: bool | None


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that was compared: fitted on the first part (`found`), compared on the next (`unseen`), both of the
    classes for which it has an idle time. `why`: why it was not taken; empty: it was."""

    kind: Kind
    words: str
    found: Tally
    unseen: Tally
    why: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Rules were fitted before `begin` and compared from then to the split. None: only the plain rule was tried, and
    `why` says why. `tried`: the plain rule first."""

    begin: datetime | None = None
    tried: tuple[Tried, ...] = ()
    why: str = ""


PLAIN_ALONE = Choice()


class Returners(msgspec.Struct, frozen=True, kw_only=True):
    """Owners with an idle time of their own. `returns`: how many stops of each would have been regretted."""

    idle: timedelta
    returns: Mapping[str, int]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`threshold`: of GPU use, in percent. `kind`: of the rule that was chosen; `signals`, `at` and `owners` are what
    it has beside idle times. `total` and `plain_total`: what it and the plain rule do in the time after `split`, in
    classes for which each has an idle time. `refused`: why there is no advice at all."""

    policy: str
    trace: TraceFacts
    judging: Judging
    allowed: float
    split: datetime
    threshold: float
    kind: Kind
    signals: tuple[str, ...] | None
    at: str | None
    owners: Returners | None
    choice: Choice
    total: Tally
    plain_total: Tally
    classes: tuple[ClassAdvice, ...]
    refused: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`idle`: the idle times of the classes in the given policy. `threshold`: its GPU threshold."""

    policy: str
    trace: TraceFacts
    judging: Judging
    allowed: float
    split: datetime
    idle: Mapping[str, timedelta | None]
    threshold: float


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A rule, and the judged runs of the first part that it was fitted to."""

    rule: Rule
    fitted: Judged


def advise(
    asked: Request, found: Judged, later: Judged, chosen: Chosen | None = None, choice: Choice = PLAIN_ALONE
) -> Advice:
    """`found` has the given policy under GIVEN and a grid of windows and thresholds, `later` the given policy and all
    variants of the chosen rule and of the plain one. Nothing chosen: the plain one."""
    refused = too_short((asked.trace.begin, asked.split, asked.trace.end), found, asked.judging)
    plain = fit_plain(asked.idle, asked.threshold, found, asked.allowed)
    chosen = chosen or Chosen(rule=plain, fitted=found)
    rule = chosen.rule
    rows = [] if refused else [_row(name, chosen, asked, found, later) for name in asked.idle]
    own = rule.for_members.window if rule.for_members is not None else None
    return Advice(
        policy=asked.policy,
        trace=asked.trace,
        judging=asked.judging,
        allowed=asked.allowed,
        split=asked.split,
        threshold=asked.threshold if rule.rest.threshold is None else rule.rest.threshold,
        kind=rule.kind,
        signals=rule.rest.signals,
        at=rule.rest.at,
        owners=None if own is None else Returners(idle=own, returns=rule.returns),
        choice=choice,
        total=Tally() if refused else advised(rule, later),
        plain_total=Tally() if refused else advised(plain, later),
        classes=tuple(row for row in rows if row is not None),
        refused=refused,
    )


def choose(
    rules: Sequence[Rule], found: Judged, unseen: Judged, allowed: float, begin: datetime
) -> tuple[Rule, Choice]:
    """The plain rule first; it is kept unless another one wins clearly in the time that none was fitted to."""
    plain, *others = rules
    before = {one.kind: advised(one, found) if one.choices else Tally() for one in rules}
    after = {one.kind: advised(one, unseen) if one.choices else Tally() for one in rules}
    reasons = {one.kind: _not_taken(one, after[one.kind], after[plain.kind], allowed) for one in others}
    better = [one for one in others if not reasons[one.kind]]
    best = max(better, key=lambda one: after[one.kind].net, default=plain)
    for one in better:
        if one is not best:
            reasons[one.kind] = "another candidate wins more"
    if best is not plain:
        reasons[plain.kind] = "a candidate wins more"
    tried = (
        Tried(
            kind=one.kind,
            words=one.words,
            found=before[one.kind],
            unseen=after[one.kind],
            why=reasons.get(one.kind, ""),
        )
        for one in rules
    )
    return best, Choice(begin=begin, tried=tuple(tried))


def _not_taken(one: Rule, mine: Tally, plain: Tally, allowed: float) -> str:
    if not one.choices:
        return "no class with an allowed regret in the time that it was fitted to"
    return why_not(mine, plain, allowed)


def _row(name: str, chosen: Chosen, asked: Request, found: Judged, later: Judged) -> ClassAdvice | None:
    today, present = asked.idle[name], of_class(name, found[GIVEN])
    rule, choice = chosen.rule, chosen.rule.choices.get(name)
    if choice is None and not present.runs:
        return None
    then = of_class(name, under(rule, later))
    held_up = None if choice is None or then.regret is None else then.regret <= asked.allowed
    return ClassAdvice(
        class_=name,
        today=today,
        window=None if choice is None else choice.window or today,
        why=_why_not(name, asked, found) if choice is None else "",
        found=present if choice is None else advised(rule, chosen.fitted, (name,)),
        later=then,
        today_later=of_class(name, later[GIVEN]),
        held_up=held_up,
    )


def _why_not(name: str, asked: Request, found: Judged) -> str:
    if asked.idle[name] is None:
        return "it has no idle time in the policy"
    tallies = [of_class(name, runs) for variant, runs in found.items() if variant != GIVEN]
    if max((one.known for one in tallies), default=0) < STOPS_MIN:
        return f"fewer than {STOPS_MIN} stops with a known end"
    least = min(one.regret for one in tallies if one.known >= STOPS_MIN and one.regret is not None)
    return f"every idle time that was tried has more regret; the least is {least:.0%}"


def too_short(times: Sequence[datetime], variants: Collection[Variant], judging: Judging) -> str:
    """`times`: begin and end of the trace, and where it is split between them."""
    needed = judging.horizon + max((one.window for one in variants if one.window is not None), default=timedelta())
    parts = [after - before for before, after in pairwise(times)]
    if min(parts) >= needed:
        return ""
    *some, last = map(in_words, parts)
    return (
        f"The trace is too short: its parts are {', '.join(some)} and {last} long, and each must "
        f"be at least {in_words(needed)}: the longest idle time that is tried, and the time within which a return "
        "counts as regret. Record longer, or try shorter ones with --sweep and --horizon."
    )

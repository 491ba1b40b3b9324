"""Which idle time wins most at the regret that is allowed: found on one part of the recorded time, reported on a later
part. Values only; nothing is switched on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.backtest.outcome import JudgedRun, Judging
from gpukeeper.lifecycle.backtest.variants import GIVEN, Variant
from gpukeeper.lifecycle.rules import idle
from gpukeeper.model.durations import in_words
from gpukeeper.views.backtest import Tally, TraceFacts, tally

STOPS_MIN = 10  # with a known end, of one class: with fewer a share of regrets says nothing


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


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`threshold`: of GPU use, in percent. `refused`: why there is no advice at all."""

    policy: str
    trace: TraceFacts
    judging: Judging
    allowed: float
    split: datetime
    threshold: float
    classes: tuple[ClassAdvice, ...]
    refused: str = ""


Judged = Mapping[Variant, Sequence[JudgedRun]]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`idle`: the idle times of the classes in the given policy. `threshold`: its GPU threshold."""

    policy: str
    trace: TraceFacts
    judging: Judging
    allowed: float
    split: datetime
    idle: Mapping[str, timedelta | None]
    threshold: float


def advise(asked: Request, found: Judged, later: Judged) -> Advice:
    """`found` and `later` have the given policy under GIVEN and the same grid of windows and thresholds."""
    refused = _too_short(asked, found)
    grid = [variant for variant in found if variant != GIVEN]
    thresholds = sorted({asked.threshold if one.threshold is None else one.threshold for one in grid})
    # A plain rule wins ties: the threshold of the given policy first, then the lowest, which stops least.
    thresholds.sort(key=lambda one: (one != asked.threshold, one))
    choices = {}
    for threshold in thresholds:
        mine = [one for one in grid if (asked.threshold if one.threshold is None else one.threshold) == threshold]
        choices[threshold] = {name: _best(name, mine, found, asked.allowed) for name in asked.idle}
    best = max(thresholds, key=lambda one: _net(choices[one], found), default=asked.threshold)
    rows = [] if refused else [_row(name, choice, asked, found, later) for name, choice in choices[best].items()]
    return Advice(
        policy=asked.policy,
        trace=asked.trace,
        judging=asked.judging,
        allowed=asked.allowed,
        split=asked.split,
        threshold=best,
        classes=tuple(row for row in rows if row is not None),
        refused=refused,
    )


def _best(name: str, grid: Sequence[Variant], found: Judged, allowed: float) -> Variant | None:
    """The longer window wins ties."""
    fit = [(one, _of(name, found[one])) for one in grid]
    good = [
        (one, mine)
        for one, mine in fit
        if mine.known >= STOPS_MIN and mine.regret is not None and mine.regret <= allowed
    ]
    if not good:
        return None
    return max(good, key=lambda pair: (round(pair[1].net, 6), pair[0].window or timedelta()))[0]


def _net(choice: Mapping[str, Variant | None], found: Judged) -> float:
    return sum(_of(name, found[one]).net for name, one in choice.items() if one is not None)


def _of(name: str, runs: Sequence[JudgedRun]) -> Tally:
    return tally((one for one in runs if one.class_ == name), idle.NAME)


def _row(name: str, choice: Variant | None, asked: Request, found: Judged, later: Judged) -> ClassAdvice | None:
    today, present = asked.idle[name], _of(name, found[GIVEN])
    if choice is None:
        if not present.runs:
            return None
        why = _why_not(name, asked, found)
        return ClassAdvice(
            class_=name,
            today=today,
            window=None,
            why=why,
            found=present,
            later=_of(name, later[GIVEN]),
            today_later=_of(name, later[GIVEN]),
            held_up=None,
        )
    then = _of(name, later[choice])
    return ClassAdvice(
        class_=name,
        today=today,
        window=choice.window or today,
        why="",
        found=_of(name, found[choice]),
        later=then,
        today_later=_of(name, later[GIVEN]),
        held_up=None if then.regret is None else then.regret <= asked.allowed,
    )


def _why_not(name: str, asked: Request, found: Judged) -> str:
    if asked.idle[name] is None:
        return "it has no idle time in the policy"
    tallies = [_of(name, runs) for variant, runs in found.items() if variant != GIVEN]
    if max((one.known for one in tallies), default=0) < STOPS_MIN:
        return f"fewer than {STOPS_MIN} stops with a known end"
    least = min(one.regret for one in tallies if one.known >= STOPS_MIN and one.regret is not None)
    return f"every idle time that was tried has more regret; the least is {least:.0%}"


def _too_short(asked: Request, found: Judged) -> str:
    windows = [one.window for one in found if one.window is not None]
    needed = asked.judging.horizon + max(windows, default=timedelta())
    parts = (asked.split - asked.trace.begin, asked.trace.end - asked.split)
    if min(parts) < needed:
        return (
            f"The trace is too short: its parts are {in_words(parts[0])} and {in_words(parts[1])} long, and each must "
            f"be at least {in_words(needed)}: the longest idle time that is tried, and the time within which a return "
            "counts as regret. Record longer, or try shorter ones with --sweep and --horizon."
        )
    return ""

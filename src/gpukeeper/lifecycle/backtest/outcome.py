"""What a stop would have won and cost, from what the run did in fact afterwards.

docs/explanation/what-a-backtest-can-know.md defines each word used here.

A minute is *used* if a GPU of the run was measured at or over the threshold. The threshold is one for all policies of
a comparison: a policy with a higher one must not seem better because it does not see use.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import chain
from math import isnan

import msgspec

from gpukeeper.lifecycle.backtest.replay import ReplayedRun
from gpukeeper.lifecycle.forecast import MINUTE
from gpukeeper.model.decision import Action
from gpukeeper.model.identity import PlaceKey
from gpukeeper.model.series import Signal
from gpukeeper.model.trace import RecordedRun, TraceTime

HOUR = timedelta(hours=1)
NOTHING = timedelta()


class Afterwards(StrEnum):
    """What became of a run after the time at which it would have been stopped."""

    UNUSED = "unused"  # it did not use its GPUs again, within the horizon or until it ended
    REGRET = "regret"  # it used them again within the horizon
    CENSORED = "censored"  # the trace ends before the horizon and before the run, or gpukeeper did stop the run
    UNKNOWABLE = "unknowable"  # no use was measured, but there is a gap in which it may have been used


class Judging(msgspec.Struct, frozen=True, kw_only=True):
    """`horizon`: use later than this after a stop is a new beginning, and no regret. `restart`: what starting again
    costs the owner: this time of all its GPUs. `gap`: a gap in the measurements this long may hide a return, a
    shorter one not."""

    threshold: float = 5.0  # percent
    slice_threshold: float = 0.5
    horizon: timedelta = timedelta(days=3)
    restart: timedelta = timedelta(minutes=30)
    gap: timedelta = timedelta(minutes=10)


class JudgedStop(msgspec.Struct, frozen=True, kw_only=True):
    """`used_again`: the first use after it. `won`: hours times GPUs that were not used until then, or until the run or
    the trace ended; of what was measured only. `cost`: hours times GPUs of a restart."""

    at: datetime
    action: Action
    rule: str
    reason: str
    since: datetime | None
    due: datetime | None
    afterwards: Afterwards
    used_again: datetime | None
    won: float
    cost: float


class JudgedRun(msgspec.Struct, frozen=True, kw_only=True):
    """All in hours times GPUs. `held`: from its start to its end, within the trace. `measured`: of these, measured.
    `unused_tail`: after its last use, what one who knows the future would win without a regret. `came_back`: first
    warnings after which it was used, and no stop came."""

    name: str
    place: PlaceKey
    started: datetime
    ended: datetime | None
    owner: str | None
    class_: str
    gpus: int
    held: float
    measured: float
    unused_tail: float
    warned: int
    came_back: int
    stop: JudgedStop | None
    evaluated: int


class Usage:
    """Of one run, computed once for all policies that are compared: the minutes in which it was used, and measured."""

    def __init__(self, run: RecordedRun, judging: Judging, time: TraceTime) -> None:
        self.run, self.judging = run, judging
        self.end = run.ended or time.end
        self.begin = max(run.started, time.begin)
        self.start = self.begin.replace(second=0, microsecond=0)
        count = max(0, -((self.start - self.end) // MINUTE))
        self.used, unmeasured = _minutes(run, judging, self.start, count)
        self.unmeasured = sorted(unmeasured)
        self.count = count

    def first_use(self, since: datetime) -> datetime | None:
        """The beginning of the first used minute that does not begin before it."""
        position = bisect_left(self.used, -((self.start - since) // MINUTE))
        return self.start + self.used[position] * MINUTE if position < len(self.used) else None

    def unmeasured_minutes(self, since: datetime, until: datetime) -> int:
        first, last = -((self.start - since) // MINUTE), -((self.start - until) // MINUTE)
        return bisect_left(self.unmeasured, last) - bisect_left(self.unmeasured, first)

    def may_hide_use(self, since: datetime, until: datetime) -> bool:
        """Whether so many minutes in a row were not measured that it may have been used in them."""
        first, last = -((self.start - since) // MINUTE), -((self.start - until) // MINUTE)
        inside = self.unmeasured[bisect_left(self.unmeasured, first) : bisect_left(self.unmeasured, last)]
        length = self.judging.gap // MINUTE
        # Sorted and distinct: as many in a row as there are between two of them so many places apart.
        return any(b - a == length - 1 for a, b in zip(inside, inside[length - 1 :], strict=False))

    @property
    def last_use(self) -> datetime:
        """The end of the last used minute; its start if it was never used."""
        return self.start + (self.used[-1] + 1) * MINUTE if self.used else self.start


def judge(usage: Usage, replayed: ReplayedRun) -> JudgedRun:
    run = usage.run
    gpus = len(run.devices)
    held = _hours(usage.end - usage.begin) * gpus
    stop = _judged_stop(usage, replayed)
    unknown_tail = usage.unmeasured_minutes(usage.last_use, usage.end)
    return JudgedRun(
        name=run.name,
        place=(run.platform, run.place),
        started=run.started,
        ended=run.ended,
        owner=run.owner,
        class_=replayed.class_,
        gpus=gpus,
        held=held,
        measured=_hours((usage.count - len(usage.unmeasured)) * MINUTE) * gpus,
        unused_tail=_hours(max(NOTHING, usage.end - usage.last_use - unknown_tail * MINUTE)) * gpus,
        warned=sum(step.action is Action.WARN for step in replayed.steps),
        came_back=_came_back(usage, replayed),
        stop=stop,
        evaluated=replayed.evaluated,
    )


def _judged_stop(usage: Usage, replayed: ReplayedRun) -> JudgedStop | None:
    stop = replayed.stop
    if stop is None:
        return None
    gpus, judging = len(usage.run.devices), usage.judging
    again = usage.first_use(stop.at)
    limit = stop.at + judging.horizon
    if again is not None and again < limit:
        afterwards = Afterwards.REGRET
    elif usage.may_hide_use(stop.at, min(limit, usage.end)):
        afterwards = Afterwards.UNKNOWABLE
    elif (usage.run.ended is None or usage.run.stopped) and usage.end < limit:
        afterwards = Afterwards.CENSORED
    else:
        afterwards = Afterwards.UNUSED
    until = usage.end if again is None else again
    won = until - stop.at - usage.unmeasured_minutes(stop.at, until) * MINUTE
    return JudgedStop(
        at=stop.at,
        action=stop.action,
        rule=stop.rule,
        reason=stop.reason,
        since=stop.since,
        due=stop.due,
        afterwards=afterwards,
        used_again=again,
        won=_hours(max(NOTHING, won)) * gpus,
        cost=_hours(judging.restart) * gpus if afterwards is Afterwards.REGRET else 0.0,
    )


def _came_back(usage: Usage, replayed: ReplayedRun) -> int:
    """First warnings after which it was used before anything else happened to it."""
    firsts = [step for step in replayed.steps if step.action is Action.WARN and step.stage == 1]
    last = usage.end if replayed.stop is None else replayed.stop.at
    ends = (*(step.at for step in firsts[1:]), last)
    uses = ((usage.first_use(step.at), end) for step, end in zip(firsts, ends, strict=False))
    return sum(use is not None and use < end for use, end in uses)


def _minutes(run: RecordedRun, judging: Judging, start: datetime, count: int) -> tuple[list[int], set[int]]:
    """Numbers of the minutes in which any GPU of it was used, and of those in which none was and not all were
    measured."""
    used: set[int] = set()
    gaps: set[int] = set()
    measured = dict.fromkeys(run.devices, False)
    for one in run.series:
        if one.signal is not Signal.GPU or one.device not in measured:
            continue
        measured[one.device] = True
        shift = (one.start - start) // MINUTE
        threshold = judging.slice_threshold if one.slice else judging.threshold
        used.update([shift + n for n, value in enumerate(one.minutes) if value >= threshold])
        gaps.update([shift + n for n, value in enumerate(one.minutes) if isnan(value)])
        gaps.update(chain(range(shift), range(shift + len(one.minutes), count)))
    if not all(measured.values()) or not measured:
        gaps.update(range(count))
    inside = sorted(n for n in used if 0 <= n < count)
    return inside, {n for n in gaps if 0 <= n < count and n not in used}


def _hours(span: timedelta) -> float:
    return span / HOUR

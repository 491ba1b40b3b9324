"""What stops would have won and cost, from what the runs did in fact afterwards; and which of them budget and breaker
would have deferred, over all runs. docs/explanation/what-a-backtest-can-know.md defines each word used here. Pure.

A minute is *used* if a GPU of the run was measured at or over the threshold. The threshold is one for all policies of
a comparison: a policy with a higher one must not seem better because it does not see use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from heapq import heappop, heappush
from itertools import accumulate, chain
from math import isnan

import msgspec

from gpukeeper.lifecycle.budget import BudgetFacts, make_plan
from gpukeeper.lifecycle.forecast import MINUTE
from gpukeeper.lifecycle.replay import NEVER, Refused, ReplayedRun, ReplayedStep
from gpukeeper.model.decision import Action, Decision, Verdict
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import MadePasses, RecordedRun, Signal, TraceTime
from gpukeeper.model.subject import PlaceKey, Ref, Seen

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


_HOUR = timedelta(hours=1)
Made = Mapping[PlaceKey, MadePasses]


class Life(msgspec.Struct, frozen=True):
    """One run, as far as it is counted."""

    name: str
    place: PlaceKey
    started: datetime
    ended: datetime | None


class Proposed(msgspec.Struct, frozen=True):
    """The passes in which a run would be stopped. `whole`: those after a refusal are included, so that it is known when
    its turn comes."""

    life: Life
    steps: tuple[ReplayedStep, ...]
    whole: bool = False


class Opened(msgspec.Struct, frozen=True):
    """The breaker was open in this many passes from the first to the last of them; maybe not in all between them."""

    place: PlaceKey
    first: datetime
    last: datetime
    passes: int
    words: str


class Limited(msgspec.Struct, frozen=True):
    """`stop_from`: of runs that were refused at first; NEVER: also in every later pass. `closed`: passes in which the
    breaker was open, so that nobody was warned either. `whole`: False if it is not known when a turn comes."""

    stop_from: Mapping[str, datetime]
    closed: Mapping[PlaceKey, frozenset[datetime]]
    opened: tuple[Opened, ...]
    whole: bool

    def of(self, name: str, place: PlaceKey) -> Refused:
        return Refused(self.closed.get(place, frozenset()), self.stop_from.get(name))


NOTHING_LIMITED = Limited({}, {}, (), whole=True)


def limited(lives: Iterable[Life], proposed: Sequence[Proposed], policy: Policy, made: Made) -> Limited:
    """`lives`: all runs of the trace, also those that are never stopped.

    Each run is replayed alone. Budget and breaker limit how many are stopped at once, so they need all runs: this
    takes the passes in which each run would be stopped and calls `make_plan` for one pass after the other, as the
    engine does. A stop that is refused is proposed again in the next pass in which the rules still require it.

    What a daemon did to other things (removals of finished work, for instance) counts in the same hour, as it was
    recorded.
    """
    return _Passes(lives, proposed, policy, made).all()


class _Passes:
    def __init__(self, lives: Iterable[Life], proposed: Sequence[Proposed], policy: Policy, made: Made) -> None:
        self.counts, self.proposed, self.policy = _by_place(lives, made), proposed, policy
        others = sorted((at, n) for one in made.values() for at, n in zip(one.at, one.others, strict=True) if n)
        self.others = [at for at, _n in others]  # passes in which a daemon took steps on what is no run of the trace
        self.others_until = [0, *accumulate(n for _at, n in others)]  # how many before each of these
        self.acts: deque[datetime] = deque()
        self.stop_from: dict[str, datetime] = {}
        self.open: dict[PlaceKey, list[tuple[datetime, str]]] = {}
        self.whole = True
        self.queue: list[tuple[datetime, PlaceKey, int, int]] = []  # pass, place, which of `proposed`, which step

    def all(self) -> Limited:
        for index in range(len(self.proposed)):
            self._propose(index, 0)
        while self.queue:
            at, place = self.queue[0][:2]
            due: list[tuple[int, int]] = []
            while self.queue and self.queue[0][:2] == (at, place):
                due.append(heappop(self.queue)[2:])
            self._pass(at, place, due)
        closed = {place: frozenset(at for at, _words in found) for place, found in self.open.items()}
        opened = [_opened(place, found) for place, found in self.open.items()]
        return Limited(self.stop_from, closed, tuple(sorted(opened, key=lambda one: one.first)), self.whole)

    def _pass(self, at: datetime, place: PlaceKey, due: Sequence[tuple[int, int]]) -> None:
        while self.acts and self.acts[0] < at - _HOUR:
            self.acts.popleft()
        seen, running = self.counts[place].at(at)
        decisions = [_decision(self.proposed[index].life, self.proposed[index].steps[number]) for index, number in due]
        others = self.counts[place].others(at)
        decisions += [_other(place, number, at) for number in range(others)]
        acts = len(self.acts) + self._others_between(at - _HOUR, at) - others
        facts = BudgetFacts(seen, running, before=0, vanished=0, acts_last_hour=acts)
        plan = make_plan(decisions, self.policy, facts, at, pass_id=0)
        if plan.breaker is not None:
            self.open.setdefault(place, []).append((at, plan.breaker))
        taken = {step.decision.seen.ref.name for step in plan.steps}
        for index, number in due:
            life = self.proposed[index].life
            if life.name in taken:
                self.acts.append(at)
                self.counts[place].stop(life)
                if number:
                    self.stop_from[life.name] = at
            else:
                self._propose(index, number + 1)

    def _others_between(self, since: datetime, at: datetime) -> int:
        first, last = bisect_left(self.others, since), bisect_right(self.others, at)
        return self.others_until[last] - self.others_until[first]

    def _propose(self, index: int, number: int) -> None:
        one = self.proposed[index]
        if number < len(one.steps):
            heappush(self.queue, (one.steps[number].at, one.life.place, index, number))
        else:
            self.stop_from[one.life.name] = NEVER
            self.whole = self.whole and one.whole


class _Count:
    """How many runs of one place there are at a time. A daemon also counted what is not in the trace: `made`."""

    def __init__(self, lives: Sequence[Life], made: MadePasses) -> None:
        self._starts = sorted(life.started for life in lives)
        self._ends = sorted(life.ended for life in lives if life.ended is not None)
        self._made = made
        self._stopped: list[datetime] = []  # when those that the replay stopped did end; a heap

    def stop(self, life: Life) -> None:
        heappush(self._stopped, life.ended or NEVER)

    def at(self, at: datetime) -> tuple[int, int]:
        """All that is seen, and what of it runs."""
        while self._stopped and self._stopped[0] <= at:
            heappop(self._stopped)
        recorded = bisect_right(self._starts, at) - bisect_right(self._ends, at)
        position = bisect_right(self._made.at, at) - 1
        counted = self._made.running[position] if position >= 0 else 0
        running = max(counted, recorded) - len(self._stopped)
        return max(self._made.seen[position] if position >= 0 else 0, running), running

    def others(self, at: datetime) -> int:
        """Steps that the daemon took in this very pass on what is no run of the trace."""
        position = bisect_left(self._made.at, at)
        found = position < len(self._made.at) and self._made.at[position] == at
        return self._made.others[position] if found else 0


def _by_place(lives: Iterable[Life], made: Made) -> dict[PlaceKey, _Count]:
    found: dict[PlaceKey, list[Life]] = {}
    for one in lives:
        found.setdefault(one.place, []).append(one)
    return {place: _Count(some, made.get(place, MadePasses())) for place, some in found.items()}


def _decision(life: Life, step: ReplayedStep) -> Decision:
    platform, place = life.place
    seen = Seen(Ref(platform, place, "workload", life.name, life.name), "", "", step.at)
    return Decision(
        seen=seen,
        action=step.action,
        rule=step.rule,
        reason=step.reason,
        verdict=Verdict.DUE,
        due=step.due,
        since=step.since,
        running=True,
    )


def _other(place: PlaceKey, number: int, at: datetime) -> Decision:
    """It was taken, so it came before what was deferred: without a time it is first."""
    name = f"/{number}"  # no run has this name
    return Decision(
        seen=Seen(Ref(*place, "", name, name), "", "", at),
        action=Action.REMOVE,
        rule="",
        reason="",
        verdict=Verdict.DUE,
    )


def _opened(place: PlaceKey, found: Sequence[tuple[datetime, str]]) -> Opened:
    (first, words), (last, _words) = found[0], found[-1]
    return Opened(place, first, last, len(found), words)

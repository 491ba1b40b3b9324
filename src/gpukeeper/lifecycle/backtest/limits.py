"""Budget and breaker over recorded runs: which stops they would have deferred, and until when.

Each run is replayed alone. Budget and breaker limit how many are stopped at once, so they need all runs: this module
takes the passes in which each run would be stopped and calls `make_plan` for one pass after the other, as the engine
does. A stop that is refused is proposed again in the next pass in which the rules still require it.

What a daemon did to other things (removals of finished work, for instance) counts in the same hour, as it was recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import accumulate

import msgspec

from gpukeeper.lifecycle.backtest.replay import NEVER, Refused, ReplayedStep
from gpukeeper.lifecycle.budget import BudgetFacts, make_plan
from gpukeeper.model.decision import Action, Decision, Verdict
from gpukeeper.model.identity import PlaceKey, Ref, Seen
from gpukeeper.model.policy import Policy
from gpukeeper.model.trace import MadePasses

HOUR = timedelta(hours=1)
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
    """`lives`: all runs of the trace, also those that are never stopped."""
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
        while self.acts and self.acts[0] < at - HOUR:
            self.acts.popleft()
        seen, running = self.counts[place].at(at)
        decisions = [_decision(self.proposed[index].life, self.proposed[index].steps[number]) for index, number in due]
        others = self.counts[place].others(at)
        decisions += [_other(place, number, at) for number in range(others)]
        acts = len(self.acts) + self._others_between(at - HOUR, at) - others
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
        seen, step.action, step.rule, step.reason, Verdict.DUE, due=step.due, since=step.since, running=True
    )


def _other(place: PlaceKey, number: int, at: datetime) -> Decision:
    """It was taken, so it came before what was deferred: without a time it is first."""
    name = f"/{number}"  # no run has this name
    return Decision(Seen(Ref(*place, "", name, name), "", "", at), Action.REMOVE, "", "", Verdict.DUE)


def _opened(place: PlaceKey, found: Sequence[tuple[datetime, str]]) -> Opened:
    (first, words), (last, _words) = found[0], found[-1]
    return Opened(place, first, last, len(found), words)

"""What a daemon keeps for its live views: GPUs, the workloads on them, and the decisions of its last passes.

Nothing is kept unless a view is wanted (`enabled`), and nothing is read for it: passes and meter ticks bring the facts.
Bounded: one entry for each GPU and each workload at a place, at most MOST of them, and six hours of use in steps of
five minutes for each GPU that work runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import isnan

import msgspec

from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.activity import Waste, wasted
from gpukeeper.lifecycle.claims import runs_on_gpus
from gpukeeper.lifecycle.forecast import UpcomingAction, ahead
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, PlaceHead, Unseen, Verdict, View
from gpukeeper.model.series import Sample, Series, Signal
from gpukeeper.model.subject import PlaceKey, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

MOST = 20_000  # entries of one place
STEP = timedelta(minutes=5)
STEPS = 72  # six hours
_SHOWN = (Shape.WORKLOAD, Shape.ORPHAN, Shape.DEVICE)
_NEWEST = 3  # minutes of use that are kept: what a GPU is used now


class LiveFact(msgspec.Struct, frozen=True):
    """One GPU or workload as of the last pass that read it. `ahead`: only of what runs on GPUs or ended; that of the
    pass before until `forecast` has made it again from `unforecast`, the view with every minute."""

    view: View  # with the newest minutes of use only
    decision: Decision
    ahead: tuple[UpcomingAction, ...] = ()
    waste: Waste | None = None
    unforecast: View | None = None
    max_runtime: timedelta | None = None  # with `ahead`: of its class; None: it has none


class UseHistory(msgspec.Struct):
    """Mean use of one GPU by one workload in steps of five minutes; the first begins at `start`."""

    start: int  # number of the step since 1970
    sums: list[float]
    counts: list[int]
    added: int = 0  # values so far: a reader sees by it that something changed

    def add(self, at: datetime, value: float) -> None:
        step = step_of(at)
        if step < self.start:
            return
        while self.start + len(self.sums) <= step:
            self.sums.append(0.0)
            self.counts.append(0)
        over = len(self.sums) - STEPS
        if over > 0:
            del self.sums[:over], self.counts[:over]
            self.start += over
        self.sums[step - self.start] += value
        self.counts[step - self.start] += 1
        self.added += 1

    def after(self, older: UseHistory | None) -> UseHistory:
        """Both in one; what is older ends before this begins."""
        if older is None:
            return self
        gap = self.start - older.start - len(older.sums)
        cut = max(len(older.sums) + gap + len(self.sums) - STEPS, 0)
        return UseHistory(
            older.start + cut,
            [*older.sums, *[0.0] * gap, *self.sums][cut:],
            [*older.counts, *[0] * gap, *self.counts][cut:],
            older.added + self.added,
        )

    def means(self) -> tuple[float | None, ...]:
        """None: not measured."""
        return tuple(s / n if n else None for s, n in zip(self.sums, self.counts, strict=True))


class PlaceState(PlaceHead, frozen=True, kw_only=True):
    """`steps` and `deferred`: of the last pass; keys of workloads, in order."""

    unseen: tuple[Unseen, ...] = ()
    breaker: str | None = None
    steps: tuple[str, ...] = ()  # a narrow pass has only its own
    deferred: tuple[str, ...] = ()
    left_out: int = 0


@dataclass
class LivePlace:
    """What the last passes found at one place."""

    state: PlaceState
    facts: dict[str, LiveFact] = field(default_factory=dict)  # by key


@dataclass
class LiveState:
    """`changed` is set whenever something in it changed; the reader clears it. `version` rises with it, for readers
    that only compare. `gpus_only`: without workloads that have no GPU, forecasts and the history of use. A fact is
    replaced, never changed: a reader recognizes by identity what changed."""

    enabled: bool = False
    gpus_only: bool = False
    version: int = 0
    reads: int = 0  # passes and requests that read objects; not measurements
    places: dict[PlaceKey, LivePlace] = field(default_factory=dict)
    history: dict[tuple[str, str], UseHistory] = field(default_factory=dict)  # by key of the workload, and device
    cpu: dict[str, Sample] = field(default_factory=dict)  # by key: the newest
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: dict[PlaceKey, dict[str, LiveFact]] = field(default_factory=dict)  # of a whole pass in progress
    _recalled: set[str] = field(default_factory=set)  # keys
    _renewed: dict[tuple[PlaceKey, str], datetime] = field(default_factory=dict)  # read again after a request
    _offered: dict[PlaceKey, frozenset[Action]] = field(default_factory=dict)
    _unrecalled: set[str] = field(default_factory=set)  # keys
    _unforecast: dict[str, PlaceKey] = field(default_factory=dict)  # keys of facts that wait for their forecast

    def begin(self, platform: Platform, *, whole: bool) -> None:
        if not self.enabled:
            return
        self._offered[key_of(platform)] = frozenset(platform.guards)
        self._pending.pop(key_of(platform), None)  # of a whole pass that ended midway
        if whole:
            self._pending[key_of(platform)] = {}

    def note(self, platform: Platform, view: View, decision: Decision, now: datetime, waste: Waste | None) -> None:
        """One object that a pass read and decided about. Its forecast is made later: a pass does not wait for it."""
        subject = view.subject
        if not self.enabled or subject.shape not in _SHOWN:
            return
        unwanted = isinstance(subject.root, str) or (self.gpus_only and subject.devices == ())
        if unwanted and subject.shape is not Shape.DEVICE:  # a slice of a GPU counts, a part of a workload does not
            return
        place = key_of(platform)
        into = self._pending.get(place)
        if into is None:
            into = self._place(place, now).facts
        key = subject.ref.key
        if key not in into and len(into) >= MOST:
            here = self._place(place, now)
            here.state = msgspec.structs.replace(here.state, left_out=here.state.left_out + 1)
            return
        if self._renewed and now < self._renewed.get((place, key), now):  # read before a request changed it
            known = self._place(place, now).facts.get(key)
            if known is not None:
                into[key] = known
            return
        known = self.places[place].facts.get(key) if place in self.places else None
        into[key] = self._fact(view, decision, waste, known)
        if into[key].unforecast is not None and place not in self._pending:
            self._unforecast[key] = place

    def forecast(self, book: Rulebook, now: datetime) -> Iterator[None]:
        """Makes one forecast after the other, the newest fact first. It takes most of a millisecond each: the caller
        decides how many, and lets others work in between."""
        while self._unforecast:
            key, place = self._unforecast.popitem()
            fact = self.places[place].facts.get(key) if place in self.places else None
            if fact is None or fact.unforecast is None:
                continue
            coming = coming_of(fact.unforecast, fact.decision, book, now, self._offered.get(place, frozenset()))
            self.places[place].facts[key] = _forecast(fact, coming, book)
            self._has_changed()
            yield

    def renew(self, platform: Platform, view: View, decision: Decision, book: Rulebook, now: datetime) -> None:
        """One object that was read again because a request changed it."""
        place, key = key_of(platform), view.subject.ref.key
        if not self.enabled or place not in self.places or key not in self.places[place].facts:
            return
        fact = self._fact(view, decision, wasted(view, book, now), None)
        if fact.unforecast is not None:
            coming = coming_of(view, decision, book, now, frozenset(platform.guards))
            fact = _forecast(fact, coming, book)
        self.places[place].facts[key] = fact
        if key in self._pending.get(place, {}):
            self._pending[place][key] = fact
        self._renewed[place, key] = now
        self._has_changed(read=True)

    def remove(self, ref: Ref) -> None:
        """One object that a request removed."""
        place = self.places.get((ref.platform, ref.place))
        if place is not None and place.facts.pop(ref.key, None) is not None:
            self._pending.get((ref.platform, ref.place), {}).pop(ref.key, None)
            self._has_changed(read=True)

    def named(self, words: str) -> list[Ref]:
        """What a request with these words is about, as far as it is shown."""
        return [
            fact.view.subject.ref
            for place in self.places.values()
            for fact in place.facts.values()
            if fact.view.subject.ref.ends_with(words)
        ]

    def finish(self, state: PlaceState, gone: Iterable[Ref], *, whole: bool = True) -> None:
        """After the last object. What a whole pass did not list is dropped only if everything could be listed;
        otherwise it is shown as it was, with its age."""
        if not self.enabled:
            return
        place = (state.platform, state.place)
        here = self._place(place, state.at)
        found = self._pending.pop(place, None)
        if found is not None:
            here.facts = {**here.facts, **found} if state.unseen else found
            self._unforecast.update({key: place for key, one in found.items() if one.unforecast is not None})
        # Of a narrow pass what could not be read is that of the last whole one, like the totals.
        unseen = state.unseen if whole else here.state.unseen
        here.state = msgspec.structs.replace(state, unseen=unseen, left_out=here.state.left_out)
        self._unrecalled |= {
            key for key, one in here.facts.items() if one.unforecast is not None and runs_on_gpus(one.view.subject)
        }
        for ref in gone:
            here.facts.pop(ref.key, None)
        if found is not None:
            self._renewed = {key: at for key, at in self._renewed.items() if key[0] != place or at >= state.at}
        self._drop_history()
        self._has_changed(read=True)

    def measured(self, samples: Iterable[Sample]) -> None:
        """What a meter read just now."""
        if not self.enabled:
            return
        self.cpu.update((one.key, one) for one in samples if one.signal is Signal.CPU)
        if self.gpus_only:
            return
        for one in samples:
            if one.signal is Signal.GPU and isinstance(one.value, float | int) and not isnan(one.value):
                self._history(one.key, one.device, one.at).add(one.at, float(one.value))
        self._has_changed()

    def recall(self, key: str, series: Iterable[Series]) -> None:
        """Minutes that were recorded before this daemon started."""
        for one in series:
            if one.signal is not Signal.GPU:
                continue
            newer = self.history.pop((key, one.device), None)
            known = [(one.start + i * timedelta(minutes=1), v) for i, v in enumerate(one.minutes) if not isnan(v)]
            for at, value in known:
                if newer is None or step_of(at) < newer.start:
                    self._history(key, one.device, at).add(at, value)
            if newer is not None:
                self.history[key, one.device] = newer.after(self.history.get((key, one.device)))
        self._recalled.add(key)

    def unknown_history(self) -> list[str]:
        """Keys of workloads on GPUs that a pass read since this was asked last, and of which what was recorded was not
        recalled yet."""
        asked, self._unrecalled = self._unrecalled, set()
        return [key for key in asked if key not in self._recalled]

    def _fact(self, view: View, decision: Decision, waste: Waste | None, known: LiveFact | None) -> LiveFact:
        """`known`: what it was before; its forecast counts until there is a new one, if it still runs."""
        slim = view
        if view.series:
            newest = tuple(_newest(one) for one in view.series if one.signal is Signal.GPU)
            slim = msgspec.structs.replace(view, series=newest)
        if self.gpus_only or not (runs_on_gpus(view.subject) or _will_go(view.subject, decision)):
            return LiveFact(slim, decision, waste=waste)
        same = known is not None and known.view.subject.seen.incarnation == view.subject.seen.incarnation
        if known is None or not same:
            return LiveFact(slim, decision, waste=waste, unforecast=view)
        return LiveFact(slim, decision, known.ahead, waste, view, known.max_runtime)

    def _has_changed(self, *, read: bool = False) -> None:
        self.version += 1
        self.reads += read
        self.changed.set()

    def _history(self, key: str, device: str, at: datetime) -> UseHistory:
        return self.history.setdefault((key, device), UseHistory(step_of(at), [], []))

    def _place(self, place: PlaceKey, at: datetime) -> LivePlace:
        state = PlaceState(platform=place[0], place=place[1], at=at, seen=0, running=0)
        return self.places.setdefault(place, LivePlace(state))

    def _drop_history(self) -> None:
        places = [place.facts for place in self.places.values()]
        for gone in [one for one in self.history if not any(one[0] in facts for facts in places)]:
            del self.history[gone]
        self._recalled = {key for key in self._recalled if any(key in facts for facts in places)}
        self.cpu = {key: one for key, one in self.cpu.items() if any(key in facts for facts in places)}


def coming_of(
    view: View, decision: Decision, book: Rulebook, now: datetime, offered: Collection[Action]
) -> tuple[UpcomingAction, ...]:
    """`decision`: of the pass. What it postponed, such as a step that failed, does not come before that time."""
    opens = opening(book.policy.schedule)
    coming = ahead(view, book, now, offered, opens)
    due = decision.due
    if not coming or coming[0].at > now or decision.action is not Action.KEEP or due is None or due <= now:
        return coming
    return ahead(view, book, now, offered, lambda at, acted: opens(max(at, due), acted))


def _forecast(fact: LiveFact, coming: tuple[UpcomingAction, ...], book: Rulebook) -> LiveFact:
    limits = book.settings(fact.view.subject).limits
    longest = None if isinstance(limits, Unknown) else limits.longest
    return msgspec.structs.replace(fact, ahead=coming, unforecast=None, max_runtime=longest)


def _will_go(subject: Subject, decision: Decision) -> bool:
    """Whether it ended and may be removed later. What holds it now, and until when, is for the forecast to find."""
    ended = subject.shape is Shape.WORKLOAD and subject.state in (State.ENDED, State.SUSPENDED)
    return ended and decision.action is Action.KEEP and decision.verdict is not Verdict.SILENT


def step_of(at: datetime) -> int:
    return int(at.timestamp() // STEP.total_seconds())


def step_start(step: int) -> datetime:
    return datetime.fromtimestamp(step * STEP.total_seconds(), UTC)


def _newest(one: Series) -> Series:
    cut = max(len(one.minutes) - _NEWEST, 0)
    return msgspec.structs.replace(one, start=one.start + cut * timedelta(minutes=1), minutes=one.minutes[cut:])

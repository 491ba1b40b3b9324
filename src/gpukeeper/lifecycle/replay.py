"""One recorded run under a policy: which warnings it would have got, and when it would have been stopped. Pure.

The rules decide, as in a pass; this file only moves the time. A run is replayed until it would have been stopped:
what it did after that belongs to another course of events. Also the policies of a comparison, and a trace in two
parts: advice is found on the earlier one and judged on the later one, which it never saw.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from gpukeeper.lifecycle.activity import PAIR, secondary_threshold
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.forecast import MINUTE, Opens, after, with_lease
from gpukeeper.lifecycle.rules import idle
from gpukeeper.lifecycle.rules.idle import HORIZON_SLACK, horizon
from gpukeeper.lifecycle.settings import Rulebook, idle_times
from gpukeeper.model.decision import ACTING, Action, Decision, Verdict, View
from gpukeeper.model.policy import Activity, OnLimit, PlaceScope, Policy
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.series import RecordedRun, RecordedSeries, Series, Signal, TraceTime
from gpukeeper.model.subject import Memory, Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

HOUR = timedelta(hours=1)
INCARNATION = "recorded"
NOT_RECORDED = Unknown("not in the trace", by_design=True)
NEVER = datetime.max.replace(tzinfo=UTC)
MOMENT = timedelta(microseconds=1)
_SAYS_WHEN = (Verdict.WAIT, Verdict.REPORT, Verdict.SILENT)
COUNTS_ALONE = (Signal.GPU, Signal.TERMINAL)


class ReplayedStep(msgspec.Struct, frozen=True):
    """`since`: beginning of the condition; of idle work, its quiet time."""

    at: datetime
    action: Action
    rule: str
    reason: str
    stage: int = 0
    since: datetime | None = None
    due: datetime | None = None


class ReplayedRun(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` are warnings, then at most one stop or removal. `kept`: the last decision, if it was not stopped."""

    class_: str
    steps: tuple[ReplayedStep, ...]
    kept: str
    evaluated: int

    @property
    def stop(self) -> ReplayedStep | None:
        last = self.steps[-1] if self.steps else None
        return last if last is not None and last.action is not Action.WARN else None


class Passes(msgspec.Struct, frozen=True):
    """When a daemon would have made its passes: every `every`, counted from midnight of the first day of 1970; or when
    it made them, if `made` has the times, in order; before the first of these, as without. `opens`: the first time
    from then on at which the policy lets a pass act. `scarce`: when GPUs became scarce, and were not any more, in
    turn."""

    every: timedelta
    opens: Opens
    made: Sequence[datetime] = ()
    scarce: Sequence[datetime] = ()

    def first(self, at: datetime) -> datetime:
        regular = at + (EPOCH - at) % self.every
        if not self.made or regular < self.made[0]:
            return regular
        position = bisect_left(self.made, at)
        return self.made[position] if position < len(self.made) else NEVER

    def after(self, at: datetime) -> datetime:
        return self.first(at + MOMENT) if self.made else at + self.every

    def last(self, since: datetime, until: datetime) -> datetime:
        """The last one until then, or `since`, which is one itself."""
        if self.made and until >= self.made[0]:
            return self.made[bisect_right(self.made, until) - 1]
        return max(since, until - (until - EPOCH) % self.every)

    def is_scarce(self, at: datetime) -> bool:
        return bisect_right(self.scarce, at) % 2 == 1


class Refused(msgspec.Struct, frozen=True):
    """What budget and breaker refuse one run: every step in the passes of `closed`, and a stop before `stop_from`."""

    closed: frozenset[datetime] = frozenset()
    stop_from: datetime | None = None

    def refuses(self, action: Action, at: datetime) -> bool:
        return at in self.closed or (action in ACTING and self.stop_from is not None and at < self.stop_from)


class Mark(msgspec.Struct, frozen=True):
    """A pass from which a course can be continued. `memory` None: nothing was done before it. `acted`: the last pass in
    which a step was taken."""

    at: datetime
    memory: Memory | None = None
    acted: datetime | None = None


BEGINNING = Mark(EPOCH)


class Listed(msgspec.Struct, frozen=True):
    """The passes in which a run would be stopped if no stop were allowed, until `within` after the first. `warned`:
    those in which a warning was due, taken or refused. `goes_on`: the first one not evaluated; None: it is whole."""

    within: timedelta
    steps: tuple[ReplayedStep, ...] = ()
    warned: tuple[Mark, ...] = ()
    goes_on: Mark | None = BEGINNING

    @property
    def is_short(self) -> bool:
        return self.goes_on is not None and (not self.steps or self.goes_on.at < self.steps[0].at + self.within)

    def until_changed(self, changed: Collection[datetime]) -> Listed:
        """Without what may differ if the breaker was open, or was not, in these passes. Stops are refused anyway, so
        only warnings make a difference."""
        first = next((mark for mark in self.warned if mark.at in changed), None)
        if first is None:
            return self
        steps = tuple(step for step in self.steps if step.at < first.at)
        warned = tuple(mark for mark in self.warned if mark.at < first.at)
        return Listed(self.within, steps, warned, first)


Watch = Callable[[datetime, View, Decision], None]
NOTHING_REFUSED = Refused()


def replay(
    run: RecordedRun,
    book: Rulebook,
    passes: Passes,
    time: TraceTime,
    recorded: Collection[str],
    watch: Watch | None = None,
    refused: Refused = NOTHING_REFUSED,
    also: datetime | None = None,
) -> ReplayedRun:
    """`time`: of the trace; no decision before it begins. `recorded`: signals that the trace has; a signal that it does
    not have vetoes nothing. `watch` gets every evaluation. `also`: the last pass until then is evaluated, even if
    nothing can be due in it.

    Passes in which nothing can be due are left out: rules say when they are due, and the idle rule does nothing as
    long as there was use within the time that it waits. What is not known (a gap, a hold) is evaluated again in
    every pass.
    """
    course = _Course(run, book, passes, time, recorded, watch, refused)
    course.also = also
    steps = tuple(course.steps())
    return ReplayedRun(class_=course.class_, steps=steps, kept=course.kept, evaluated=course.evaluated)


def proposals(
    run: RecordedRun,
    book: Rulebook,
    passes: Passes,
    time: TraceTime,
    recorded: Collection[str],
    closed: frozenset[datetime],
    known: Listed,
) -> Listed:
    """What is known, continued as far as it is to reach."""
    if known.goes_on is None or not known.is_short:
        return known
    course = _Course(run, book, passes, time, recorded, None, Refused(closed, NEVER))
    course.within = known.within
    course.proposed, course.warned = list(known.steps), list(known.warned)
    for _warning in course.steps(known.goes_on):
        pass
    return Listed(known.within, tuple(course.proposed), tuple(course.warned), course.goes_on)


class _Course:
    def __init__(
        self,
        run: RecordedRun,
        book: Rulebook,
        passes: Passes,
        time: TraceTime,
        recorded: Collection[str],
        watch: Watch | None,
        refused: Refused,
    ) -> None:
        self.run, self.book, self.passes, self.refused = run, book, passes, refused
        self.begin, self.end = max(run.started, time.begin), run.ended or time.end
        if run.stopped:
            self.end += MOMENT  # in the very pass that stopped it
        self.watch = watch
        self.within: timedelta | None = None  # not longer than this after the first stop that is refused
        self.proposed: list[ReplayedStep] = []  # stops that were refused
        self.warned: list[Mark] = []  # where warnings were due
        self.goes_on: Mark | None = None  # where it was not longer than `within`
        self.also: datetime | None = None
        self.class_ = self.kept = ""
        self.evaluated = 0
        policy = book.policy
        self._reach = horizon(policy, max(idle_times(policy), default=HOUR)) + HORIZON_SLACK
        self._absent = tuple(
            Series(Signal(name), "", run.started, (), missing=NOT_RECORDED)
            for name in policy.activity.signals
            if name not in recorded or name in run.absent
        )

    def steps(self, begin: Mark = BEGINNING) -> Iterator[ReplayedStep]:
        view = beginning(self.run)
        if begin.memory is not None:
            view = msgspec.structs.replace(view, memory=begin.memory)
        at, acted = max(self.passes.first(self.begin), begin.at), begin.acted
        while at < self.end:
            if self._is_long_enough(at):
                self.goes_on = Mark(at, view.memory, acted)
                return
            view = self._seen(view, at)
            decision = decide(view, self.book, at)
            self.evaluated += 1
            if self.watch is not None:
                self.watch(at, view, decision)
            self.class_, self.kept = decision.class_, decision.reason
            if decision.action is Action.KEEP:
                view = with_lease(view, decision)
                at = self._with_also(at, self._next(view, decision, at))
                continue
            opened = self.passes.opens(at, acted)
            if opened > at:
                at = self.passes.first(opened)
                continue
            step = ReplayedStep(
                at, decision.action, decision.rule, decision.reason, decision.stage, decision.since, decision.due
            )
            if decision.action is Action.WARN:
                self.warned.append(Mark(at, view.memory, acted))
            if self.refused.refuses(decision.action, at):
                if decision.action in ACTING:
                    self.proposed.append(step)
                at = self.passes.after(at)
                continue
            acted = at
            yield step
            changed = after(view, decision, at, State.ENDED, delivered=self.run.reachable)
            if decision.action in ACTING or changed is None:
                self.kept = ""
                return
            view = changed
            at = self.passes.after(at)

    def _is_long_enough(self, at: datetime) -> bool:
        return self.within is not None and bool(self.proposed) and at >= self.proposed[0].at + self.within

    def _next(self, view: View, decision: Decision, at: datetime) -> datetime:
        """The first pass in which anything may be done. What is unknown or protected may change in every pass."""
        later, settings = self.passes.after(at), self.book.settings(view.subject)
        if decision.verdict not in _SAYS_WHEN:
            return later
        due = self._others_due(view, at)
        first = idle.first_action(view, settings, scarce=bool(self.passes.scarce))
        if first is not None:
            earliest = later if first.not_before is None else max(later, first.not_before)
            due = self._not_in_use(earliest, first.after, first.window, due)
        return max(later, self.passes.first(due))

    def _with_also(self, at: datetime, following: datetime) -> datetime:
        if self.also is None or not at < self.also < following:
            return following
        last = self.passes.last(at, self.also)
        return last if last > at else following

    def _others_due(self, view: View, at: datetime) -> datetime:
        """When a rule other than idle may have something to do."""
        given = answers(view, self.book, at, but=idle.NAME)
        return min((one.due for one in given if one.due is not None), default=self.end)

    def _not_in_use(self, at: datetime, needed: timedelta, window: timedelta, until: datetime) -> datetime:
        """The first time from then on before which it ran and was not in use for so long, or `until`. Before it the
        idle rule has nothing to do, whatever else it finds."""
        at = max(at, self.run.started + needed)
        activity = self.book.policy.activity
        watched = [
            (one, threshold_of(one, activity, window))
            for one in self.run.series
            if one.signal in activity.signals or (one.signal is Signal.GPU and one.device in self.run.devices)
        ]
        while at < until:
            used = max((_last_use(one, threshold, at - needed, at) for one, threshold in watched), default=at - needed)
            if used + needed <= at:
                return at
            at = used + needed
        return until

    def _seen(self, view: View, at: datetime) -> View:
        """With what a daemon would have measured until then."""
        subject = msgspec.structs.replace(view.subject, seen=msgspec.structs.replace(view.subject.seen, at=at))
        known = {one.signal for one in self.run.series}
        series = [_window(one, at - self._reach, at) for one in self.run.series]
        series += [one for one in self._absent if one.signal not in known]
        held = tuple(hold for hold in self.run.holds if hold.at <= at)
        if held:
            view = msgspec.structs.replace(view, memory=msgspec.structs.replace(view.memory, holds=held))
        scarce = self.passes.is_scarce(at)
        return msgspec.structs.replace(view, subject=subject, series=tuple(series), pressure=scarce)


def beginning(run: RecordedRun) -> View:
    """As a daemon saw it first."""
    ref = Ref(run.platform, run.place, run.kind, run.name, run.name, run.namespace)
    subject = Subject(
        seen=Seen(ref, INCARNATION, "", run.started),
        state=State.RUNNING,
        owner=run.owner,
        class_=run.class_,
        created=run.first_start or run.started,
        started=run.started,
        devices=run.devices,
        slices=tuple({one.device for one in run.series if one.slice}),
        labels=run.labels,
    )
    first = run.first_start or run.started
    return View(
        subject,
        (),
        Memory(first_start=first, started=run.started, state=State.RUNNING, incarnation=INCARNATION),
    )


def _window(one: RecordedSeries, since: datetime, at: datetime) -> Series:
    """The minutes that were over at `at`."""
    first = max(0, (since - one.start) // MINUTE)
    last = max(first, (at - one.start) // MINUTE)
    return Series(one.signal, one.device, one.start + first * MINUTE, tuple(one.minutes[first:last]), one.slice)


def threshold_of(one: RecordedSeries, activity: Activity, window: timedelta) -> float:
    if one.signal is Signal.GPU:
        return activity.gpu_slice if one.slice else activity.gpu
    return secondary_threshold(one.signal, activity, window)


def _last_use(one: RecordedSeries, threshold: float, since: datetime, at: datetime) -> datetime:
    """The end of the last minute of that time that counts as use, as assess_use counts; `since`: it has none."""
    first, last = max(0, (since - one.start) // MINUTE), (at - one.start) // MINUTE
    values, alone, earlier = one.minutes, one.signal in COUNTS_ALONE, -PAIR
    for position in range(min(last, len(values)) - 1, first - 1, -1):
        if values[position] >= threshold:
            if alone:
                return one.start + (position + 1) * MINUTE
            if 0 < earlier - position < PAIR:
                return one.start + (earlier + 1) * MINUTE
            earlier = position
    return since


_AT_ONCE = timedelta()


class Variant(msgspec.Struct, frozen=True, order=True):
    """None: as in the given policy. `threshold` in percent. `at`: cron words, when passes act."""

    window: timedelta | None = None
    threshold: float | None = None
    signals: tuple[str, ...] | None = None
    at: str | None = None

    @property
    def words(self) -> str:
        parts = [] if self.window is None else [f"idle {in_words(self.window)}"]
        parts += [] if self.threshold is None else [f"GPU below {self.threshold:g}%"]
        parts += [] if self.signals is None else [f"signals {', '.join(self.signals) or 'none'}"]
        parts += [] if self.at is None else [f"acts at {self.at}"]
        return ", ".join(parts) or "this policy"


GIVEN = Variant()


def applied(policy: Policy, variant: Variant) -> Policy:
    """The idle time is that of every class that has one. Classes without one stay without."""
    classes = policy.classes
    if variant.window is not None:
        window = variant.window
        classes = {
            name: one if one.idle is None else msgspec.structs.replace(one, idle=window)
            for name, one in classes.items()
        }
    activity = policy.activity
    if variant.threshold is not None:
        activity = msgspec.structs.replace(activity, gpu=variant.threshold)
    if variant.signals is not None:
        activity = msgspec.structs.replace(activity, signals=variant.signals)
    schedule = policy.schedule
    if variant.at is not None:
        schedule = msgspec.structs.replace(schedule, at=variant.at)
    return msgspec.structs.replace(policy, classes=classes, activity=activity, schedule=schedule)


def may_stop_idle(book: Rulebook, subject: Subject) -> bool:
    """Whether the idle rule stops work like this at all."""
    limits = book.settings(subject).limits
    if isinstance(limits, Unknown):
        return True
    return limits.on_idle is OnLimit.STOP and (limits.idle is not None or limits.idle_when_large is not None)


def deciding(book: Rulebook, subject: Subject) -> Hashable:
    """What of a policy decides about this work, as far as variants differ: two that have it in common do the same to
    it. An idle time after which it is only reported makes no difference."""
    limits, policy = book.settings(subject).limits, book.policy
    if not isinstance(limits, Unknown) and limits.idle is not None and limits.on_idle is OnLimit.REPORT:
        limits = msgspec.structs.replace(limits, idle=_AT_ONCE)
    return limits, policy.activity, policy.schedule


def covering(policy: Policy, platforms: Collection[str]) -> Policy:
    """With a scope that covers all recorded work: a trace of another place is judged, too."""
    return msgspec.structs.replace(policy, scope={name: PlaceScope() for name in platforms})


def grid(windows: Collection[timedelta], thresholds: Collection[float]) -> Iterator[Variant]:
    """All combinations; an empty side stays as in the given policy."""
    for threshold in (*sorted(thresholds),) or (None,):
        for window in (*sorted(windows),) or (None,):
            yield Variant(window, threshold)


def earlier(run: RecordedRun, split: datetime) -> RecordedRun | None:
    """What was known of it at `split`. None: it had not started."""
    if run.started >= split:
        return None
    if run.ended is not None and run.ended <= split:
        return run
    return msgspec.structs.replace(run, ended=None, series=tuple(_until(one, split) for one in run.series))


def later(run: RecordedRun, split: datetime) -> RecordedRun | None:
    """What it did from `split` on. Its idle time begins there at the earliest. None: it had ended."""
    if run.started >= split:
        return run
    if run.ended is not None and run.ended <= split:
        return None
    return msgspec.structs.replace(
        run,
        started=split,
        first_start=run.first_start or run.started,
        series=tuple(_since(one, split) for one in run.series),
    )


def middle(begin: datetime, end: datetime, share: float) -> datetime:
    """A whole minute."""
    return (begin + (end - begin) * share).replace(second=0, microsecond=0)


def _until(one: RecordedSeries, split: datetime) -> RecordedSeries:
    return msgspec.structs.replace(one, minutes=one.minutes[: _minutes(split - one.start)])


def _since(one: RecordedSeries, split: datetime) -> RecordedSeries:
    gone = _minutes(split - one.start)
    return msgspec.structs.replace(one, start=one.start + gone * MINUTE, minutes=one.minutes[gone:])


def _minutes(span: timedelta) -> int:
    return max(0, span // MINUTE)

"""What happens when: the rules themselves, evaluated at one due time after the other, on a view that changes with time.

Pure, and no second copy of any rule: `explain` evaluates until the first act, `policy try` until nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.rules import hold, keep_alive
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Result, Verdict, View
from gpukeeper.model.event import Closed, Noticed, WarningSent
from gpukeeper.model.fold import remember
from gpukeeper.model.memory import EMPTY, KEEP_ALIVE
from gpukeeper.model.series import Series
from gpukeeper.model.subject import Outcome, State

MINUTE = timedelta(minutes=1)
FAR = timedelta(days=60)  # later actions are not predicted
STEPS = 100  # more than all rules together have stages, and people have holds


class UpcomingAction(msgspec.Struct, frozen=True):
    """What would be done, and when, if nothing changes. KEEP: from then on it is reported, and nothing is done."""

    at: datetime
    action: Action
    rule: str
    reason: str
    stage: int = 0


Measure = Callable[[View, datetime], View]
Opens = Callable[[datetime, datetime | None], datetime]


def quiet_until(view: View, at: datetime) -> View:
    """The same with no use from its newest minute on. What was never measured stays so."""
    last = at.replace(second=0, microsecond=0)
    return msgspec.structs.replace(view, series=tuple(_quiet(one, last) for one in view.series))


def at_any_time(at: datetime, acted: datetime | None) -> datetime:
    return at


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """`measure`: the view with what will have been measured by then. `opens`: the first time from then on at which
    anything is done, given the time of the last step: a pass takes one step on a workload. `after_stop`: in what state
    a stop leaves it. `reports`: also what is only reported, once by each rule.
    """

    measure: Measure = quiet_until
    opens: Opens = at_any_time
    after_stop: State = State.ENDED
    steps: int = STEPS
    reports: bool = False


def ahead(
    view: View, book: Rulebook, now: datetime, offered: Collection[Action], opens: Opens
) -> tuple[UpcomingAction, ...]:
    """What comes without use and without requests, up to and with the first act."""
    found: list[UpcomingAction] = []
    for one in course(view, book, now, offered, Assumptions(opens=opens)):
        found.append(one)
        if one.action is not Action.WARN:
            break
    return tuple(found)


def course(
    view: View, book: Rulebook, now: datetime, offered: Collection[Action], assumed: Assumptions
) -> Iterator[UpcomingAction]:
    """Everything that comes until it is gone, or until the rules have no time to name."""
    at = earliest = now
    acted: datetime | None = None
    reported: set[str] = set()
    for _ in range(assumed.steps):
        view = assumed.measure(view, at)
        decision = decide(view, book, at)
        if decision.action is Action.KEEP:
            if assumed.reports and decision.verdict is Verdict.REPORT and decision.rule not in reported:
                reported.add(decision.rule)
                yield UpcomingAction(at, Action.KEEP, decision.rule, decision.reason)
            view = with_lease(view, decision)
            later = _next_time(view, book, at)
            if later is None or later - now > FAR:
                return
            # Unless it only waits, something other than time keeps it until then.
            at, earliest = later, earliest if decision.verdict is Verdict.WAIT else later
            continue
        if not _is_offered(decision, offered):
            return
        # A later pass finds what was due before it; it happens then.
        when = max(earliest, decision.due or at)
        opened = assumed.opens(when, acted)
        if opened > max(when, at):
            if opened - now > FAR:
                return
            at = earliest = opened
            continue
        earliest = acted = opened
        yield UpcomingAction(opened, decision.action, decision.rule, decision.reason, decision.stage)
        changed = after(view, decision, opened, assumed.after_stop)
        if changed is None:
            return
        view = changed


def with_lease(view: View, decision: Decision) -> View:
    """With the keep-alive lease that begins with this decision, if one does."""
    if decision.begins is None:
        return view
    memory = msgspec.structs.replace(view.memory, holds=(*view.memory.holds, decision.begins))
    return msgspec.structs.replace(view, memory=memory)


def _is_offered(decision: Decision, offered: Collection[Action]) -> bool:
    """Whether the place can do it, or what a warning announces. A warning that announces nothing needs nothing."""
    if decision.action is not Action.WARN:
        return decision.action in offered
    return decision.then is Action.KEEP or decision.then in offered


def after(view: View, decision: Decision, when: datetime, after_stop: State, *, delivered: bool = True) -> View | None:
    """The view after that step, remembered as the ledger remembers it. None: it is gone."""
    subject = view.subject
    match decision.action:
        case Action.WARN:
            return msgspec.structs.replace(
                view, memory=remember(view.memory, _warning(decision, when, delivered)) or EMPTY
            )
        case Action.STOP if not subject.goes_when_stopped:
            return _stopped(view, decision, when, after_stop)
        case Action.TRIM:
            return msgspec.structs.replace(
                view, subject=msgspec.structs.replace(subject, live_children=0, dead_children=0)
            )
        case _:
            return None


def _warning(decision: Decision, when: datetime, delivered: bool) -> WarningSent:
    unheard = None if delivered else decision.unheard
    return WarningSent(
        at=when,
        ref=decision.seen.ref,
        rule=decision.rule,
        stage=decision.stage,
        incarnation=decision.seen.incarnation,
        limit=decision.limit,
        delivered=delivered,
        channel="forecast",
        message=decision.reason if unheard is None else unheard.words,
        until=decision.announced if unheard is None else unheard.at,
        removes=decision.then is Action.REMOVE,
    )


def _stopped(view: View, decision: Decision, when: datetime, state: State) -> View:
    ended = when if state is State.ENDED else None
    outcome = Outcome.STOPPED if state is State.ENDED else None
    subject = msgspec.structs.replace(view.subject, state=state, ended=ended, outcome=outcome)
    incarnation = subject.seen.incarnation
    closed = Closed(
        at=when,
        ref=subject.ref,
        step="",
        action=Action.STOP,
        rule=decision.rule,
        result=Result.RECLAIMED,
        reason=decision.reason,
        incarnation=incarnation,
    )
    started = subject.started if isinstance(subject.started, datetime) else None
    noticed = Noticed(
        at=when, ref=subject.ref, incarnation=incarnation, state=state, started=started, ended=ended, outcome=outcome
    )
    # The ledger had this run before it was stopped, also if a hypothetical view does not contain it.
    known = msgspec.structs.replace(view.memory, incarnation=incarnation)
    memory = remember(remember(known, closed) or EMPTY, noticed) or EMPTY
    return msgspec.structs.replace(view, subject=subject, memory=memory)


def _quiet(one: Series, last: datetime) -> Series:
    more = (last - one.start) // MINUTE + 1 - len(one.minutes)
    if one.missing is not None or more <= 0 or not one.minutes:
        return one
    return msgspec.structs.replace(one, minutes=one.minutes + (0.0,) * more)


def _next_time(view: View, book: Rulebook, at: datetime) -> datetime | None:
    """When the next answer may change: something is due, a hold ends, or a lease's end is near enough to warn."""
    settings = book.settings(view.subject)
    times = [one.due for one in answers(view, book, at) if one.due is not None]
    for one in view.memory.holds:
        end = hold.end_of(one, settings)
        times += [end, *(end - before for before in keep_alive.WARNED_BEFORE if one.by == KEEP_ALIVE)]
    return min((time for time in times if time > at), default=None)

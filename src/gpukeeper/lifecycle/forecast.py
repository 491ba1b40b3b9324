"""What happens next, when and on which condition: the rules themselves, evaluated at one due time after the other, on
a view that changes with time. `explain` evaluates until the first act, `policy try` until nothing is left.

And in words, for every page, command and reply. Times in words are UTC; where people read them, they are shown in a
zone of theirs. Pure, and no second copy of any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import isnan

import msgspec

from gpukeeper.lifecycle.activity import TAIL_MAX, measured_span
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.rules import hold, idle, keep_alive, restart_loop
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Result, Verdict, View
from gpukeeper.model.event import Closed, Noticed, WarningSent
from gpukeeper.model.fold import remember
from gpukeeper.model.policy import Mode
from gpukeeper.model.series import Series
from gpukeeper.model.subject import EMPTY, KEEP_ALIVE, LIVE, Crashes, Outcome, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import SOON, due_in_words, in_words

MINUTE = timedelta(minutes=1)
FAR = timedelta(days=60)  # later actions are not predicted
STEPS = 100  # more than all rules together have stages, and people have holds


STAYS_IDLE = "it stays idle"
NOT_USED = "it is not used from now on"  # of what is in use now
NOT_IDLE_BEFORE = "not idle before"  # of what is not measured, or not yet
FAILS_ON = "it goes on failing"
REACHED = "a warning reaches its owner"  # where none did


class UpcomingAction(msgspec.Struct, frozen=True):
    """What would be done, and when, if nothing changes. KEEP: from then on it is reported, and nothing is done.

    `reason`: at that time; `currently`: what the rule answers now. `provided`: what must be true until then; empty: use
    does not prevent it. `would`: the policy's mode is plan, so it is not done unattended.
    """

    at: datetime
    action: Action
    rule: str
    reason: str
    stage: int = 0
    currently: str = ""
    provided: str = ""
    would: bool = False


Measure = Callable[[View, datetime], View]
Opens = Callable[[datetime, datetime | None], datetime]


def quiet_from(now: datetime) -> Measure:
    """From now on it is measured without a gap, and not used. What is not measured now stays so."""

    def measure(view: View, at: datetime) -> View:
        return msgspec.structs.replace(view, series=tuple(_quiet(one, now, at) for one in view.series))

    return measure


def at_any_time(at: datetime, acted: datetime | None) -> datetime:
    return at


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """`measure`: the view with what will have been measured by then. `opens`: the first time from then on at which
    anything is done, given the time of the last step: a pass takes one step on a workload. `after_stop`: in what state
    a stop leaves it. `reports`: also what is only reported, once by each rule. `busy`: it stays in use, so its idleness
    is not awaited.
    """

    measure: Measure
    opens: Opens = at_any_time
    after_stop: State = State.ENDED
    steps: int = STEPS
    reports: bool = False
    busy: bool = False


def ahead(
    view: View, book: Rulebook, now: datetime, offered: Collection[Action], opens: Opens
) -> tuple[UpcomingAction, ...]:
    """What comes without use and without requests, up to and with the first act; with the removal of what was idle or
    goes by the rule that stops it, or if a stop is its removal."""
    found: list[UpcomingAction] = []
    said = {one.rule: one.reason for one in answers(view, book, now)}
    after_stop = State.SUSPENDED if view.subject.suspended_by_stop else State.ENDED
    assumed = Assumptions(measure=quiet_from(now), opens=opens, after_stop=after_stop)
    stop: UpcomingAction | None = None
    for one in course(view, book, now, offered, assumed):
        if stop is not None and (one.action is not Action.REMOVE or stop.rule not in (one.rule, idle.NAME)):
            break
        found.append(msgspec.structs.replace(one, currently=said[(stop or one).rule]))
        if one.action is not Action.WARN and (stop is not None or one.action is not Action.STOP):
            break
        stop = found[-1] if one.action is Action.STOP else None
    if stop is not None and view.subject.goes_when_stopped:
        found.append(msgspec.structs.replace(stop, action=Action.REMOVE))
    return tuple(found)


def course(
    view: View, book: Rulebook, now: datetime, offered: Collection[Action], assumed: Assumptions
) -> Iterator[UpcomingAction]:
    """Everything that comes until it is gone, or until the rules have no time to name."""
    at = earliest = now
    acted: datetime | None = None
    reported: set[str] = set()
    condition = NOT_USED if idle.in_use(view, book.settings(view.subject), now) else STAYS_IDLE
    if _unreached(view, book):
        condition += f" and {REACHED}"
    provided, otherwise, would = "", "", book.policy.mode is Mode.PLAN
    conditions, measure = {idle.NAME: condition}, assumed.measure
    if view.subject.crashes is not None and restart_loop.is_failing(view.subject.crashes, now):
        conditions[restart_loop.NAME], measure = FAILS_ON, _failing_on(view.subject.crashes, measure)
    for _ in range(assumed.steps):
        view = measure(view, at)
        decision = decide(view, book, at)
        otherwise = otherwise or _unless_idle(view, book, decision, at)
        if decision.action is Action.KEEP:
            if assumed.reports and decision.verdict is Verdict.REPORT and decision.rule not in reported:
                reported.add(decision.rule)
                yield UpcomingAction(at, Action.KEEP, decision.rule, decision.reason)
            view = with_lease(view, decision)
            later = _next_time(view, book, now, at, idle.NAME if assumed.busy else "")
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
        if opened < at:
            decision = _at_its_time(view, book, decision, opened, measure)
        earliest = acted = opened
        if view.subject.state in LIVE:  # what follows a stop depends on what the stop depends on
            provided = conditions.get(decision.rule, otherwise)
        yield UpcomingAction(
            opened,
            decision.action,
            decision.rule,
            decision.reason,
            decision.stage,
            provided=provided,
            would=would,
        )
        changed = after(view, decision, opened, assumed.after_stop)
        if changed is None:
            return
        view = changed


def _failing_on(seen: Crashes, measured: Measure) -> Measure:
    def measure(view: View, at: datetime) -> View:
        subject = msgspec.structs.replace(view.subject, crashes=restart_loop.continued(seen, at))
        return measured(msgspec.structs.replace(view, subject=subject), at)

    return measure


def _unless_idle(view: View, book: Rulebook, decision: Decision, at: datetime) -> str:
    """What the idle rule may stop as soon as something unknown becomes known (its use, its holds, its keep-alive file)
    is not said to run until another rule is due."""
    settings = book.settings(view.subject)
    if (
        decision.verdict is not Verdict.UNKNOWN
        or view.subject.state not in LIVE
        or not idle.can_stop(view.subject, settings)
    ):
        return ""
    return "" if idle.evaluate(view, settings, at).verdict is Verdict.SILENT else NOT_IDLE_BEFORE


def _unreached(view: View, book: Rulebook) -> bool:
    """Warnings about idleness were sent, and none was delivered, which a stop needs."""
    sent = [w.delivered for w in view.memory.warnings if w.rule == idle.NAME and w.limit]
    return book.policy.warnings.require_delivery and bool(sent) and not any(sent)


def _at_its_time(view: View, book: Rulebook, late: Decision, due: datetime, measure: Measure) -> Decision:
    """A decision that was found after its time, as it was then: what it announces is counted from there."""
    then = decide(measure(view, due), book, due)
    return then if (then.rule, then.action, then.stage) == (late.rule, late.action, late.stage) else late


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


def _quiet(one: Series, now: datetime, at: datetime) -> Series:
    """What was read last is new enough to be judged by: the minutes since then are still to come, as quiet ones."""
    span = None if one.missing is not None else measured_span(one, now)
    if span is None or now - span[1] > TAIL_MAX:
        return one
    known = len(one.minutes)
    while isnan(one.minutes[known - 1]):
        known -= 1
    more = (at - one.start) // MINUTE + 1 - known
    minutes = one.minutes[:known] + (0.0,) * more if more > 0 else one.minutes
    until = None if one.until is None else max(one.until, at)
    return msgspec.structs.replace(one, minutes=minutes, until=until)


def _next_time(view: View, book: Rulebook, now: datetime, at: datetime, but: str) -> datetime | None:
    """When the next answer may change: something is due, it was quiet long enough to be judged, a hold ends, or a
    lease's end is near enough to warn. `but`: this rule is not awaited."""
    settings = book.settings(view.subject)
    times = [one.due for one in answers(view, book, at, but) if one.due is not None]
    begun = [span[0] for one in view.series if (span := measured_span(one, at)) is not None]
    used = now.replace(second=0, microsecond=0) + MINUTE  # the last use is before
    times += [since + book.policy.activity.settle for since in (*begun, used)]
    for one in view.memory.holds:
        end = hold.end_of(one, settings)
        times += [end, *(end - before for before in keep_alive.WARNED_BEFORE if one.by == KEEP_ALIVE)]
    return min((time for time in times if time > at), default=None)


NOT_UNATTENDED = "The policy's mode is plan: nothing is warned about, stopped or removed unattended."
_DONE = {
    "": "checked again",
    Action.WARN: "warned",
    Action.STOP: "stopped",
    Action.TRIM: "trimmed",
    Action.REMOVE: "deleted",
    Action.RELEASE: "released",
}


class NextStep(msgspec.Struct, frozen=True):
    """`action`: empty where only the rule is known. `at`: None: at the next pass. `provided` and `would`: as in
    UpcomingAction."""

    action: str
    at: datetime | None
    rule: str
    provided: str = ""
    would: bool = False


class NextActions(msgspec.Struct, frozen=True):
    """`reason`: what the rule of these steps answers now; empty if there are none."""

    class_: str | Unknown
    steps: tuple[NextStep, ...]
    reason: str = ""


def next_actions(view: View, book: Rulebook, now: datetime, offered: Collection[Action], opens: Opens) -> NextActions:
    coming, decision = ahead(view, book, now, offered, opens), decide(view, book, now)
    return as_next(coming, decision, view.subject.class_, now, would=book.policy.mode is Mode.PLAN)


def as_next(
    coming: Sequence[UpcomingAction],
    decision: Decision,
    class_: str | Unknown,
    now: datetime,
    *,
    would: bool,
    offered: bool = False,
) -> NextActions:
    """`class_`: as its platform recognized it. What another rule could not determine is named, too. Without a forecast
    the decision is what is known. `offered`: its place can do what was decided."""
    act = next((one for one in coming if one.action is not Action.WARN), coming[-1] if coming else None)
    unknown = decision.verdict is Verdict.UNKNOWN and act is not None and decision.rule != act.rule
    reason = f"{act.currently}{f'; {decision.reason}' if unknown else ''}" if act is not None else ""
    steps = next_steps(coming, now)
    if not steps and (offered or decision.action is Action.KEEP):
        steps = steps_of(decision, now, would=would)
        reason = decision.reason if steps else ""
    return NextActions(decision.class_ or class_, steps, reason)


def steps_of(decision: Decision, now: datetime, *, would: bool) -> tuple[NextStep, ...]:
    """As far as it follows from a decision alone: what it does, and what a warning announces."""
    provided = STAYS_IDLE if decision.rule == idle.NAME and decision.running else ""
    if decision.action is not Action.KEEP:
        first = NextStep(decision.action.value, None, decision.rule, provided, would)
        if decision.action is not Action.WARN or decision.then is Action.KEEP:
            return (first,)
        return (first, NextStep(decision.then.value, decision.announced, decision.rule, provided, would))
    if decision.verdict is Verdict.WAIT and decision.due is not None and decision.due > now:
        return (NextStep("", decision.due, decision.rule),)
    return ()


def next_steps(coming: Iterable[UpcomingAction], now: datetime) -> tuple[NextStep, ...]:
    return tuple(
        NextStep(one.action.value, one.at if one.at > now else None, one.rule, one.provided, one.would)
        for one in coming
    )


class Phrase(msgspec.Struct, frozen=True):
    """One step as a part of a sentence: what joins it, what is done, and when (None: at the next pass)."""

    join: str
    words: str
    at: datetime | None


def phrases(steps: Sequence[NextStep]) -> list[Phrase]:
    """The first step and the acts, as one sentence. A condition comes first, so that it is not what is cut off."""
    found: list[Phrase] = []
    before: NextStep | None = None
    for one in (*steps[:1], *(one for one in steps[1:] if one.action != Action.WARN)):
        known = "" if before is None else before.provided
        condition = "" if one.provided == known else f"if {one.provided}, " if one.provided else "in any case "
        begin = "" if found else "would be " if one.would and one.action else "will be "
        if before is not None and (before.action, before.at) == (Action.STOP, one.at):
            found[-1] = msgspec.structs.replace(found[-1], words=f"{found[-1].words}, then {done_word(one.action)}")
        else:
            found.append(Phrase((", then " if found else "") + condition, begin + done_word(one.action), one.at))
        before = one
    return found


def act_of(steps: Sequence[NextStep]) -> NextStep | None:
    """What the warnings are about. None: nothing comes."""
    return next((one for one in steps if one.action != Action.WARN), steps[-1] if steps else None)


def done_word(action: str) -> str:
    """ "stopped" of "stop"."""
    return _DONE[action]


def coming_in_words(steps: Sequence[NextStep], now: datetime) -> str:
    """ "if it stays idle, will be warned at 2026-03-02 09:30 UTC (in 1h), then stopped at …". Empty: nothing comes."""
    return "".join(f"{one.join}{one.words} {due_in_words(one.at or now, now)}" for one in phrases(steps))


def coming_in_brief(steps: Sequence[NextStep], now: datetime) -> str:
    """With distances alone, for a picture that changes while it is read."""
    return "".join(
        f"{one.join}{one.words} {SOON if one.at is None or one.at <= now else f'in {in_words(one.at - now)}'}"
        for one in phrases(steps)
    )

"""A running workload that holds GPUs and is idle is warned twice, stopped, and removed if configured (after_idle)."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.activity import MINUTE, Use, UseAssessment, assess_use
from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Rulebook, Settings
from gpukeeper.lifecycle.warnings import AGAIN, DELETED, Countdown, share_of, staged, valid_for
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import WITHOUT_GPU, AfterIdle, ClassSettings, OnLimit, Policy
from gpukeeper.model.subject import Shape, State, Subject, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "idle"

REPORTED_AFTER = timedelta(minutes=30)  # when its class has no idle time, yet it holds more than a slice
DAY = timedelta(days=1)
_KEPT = "kept until a person resumes or removes it"
HORIZON_SLACK = timedelta(minutes=15)  # a pass may come late; its warnings still belong to this quiet time
_LIVE = (State.RUNNING, State.PAUSED)
_OVER = (State.ENDED, State.SUSPENDED)
_NOT_RUNNING = Answer(NAME, Verdict.SILENT, "it is not running")
_NO_GPU = Answer(NAME, Verdict.SILENT, "it holds no GPU")
_NO_LIMIT = Answer(NAME, Verdict.SILENT, "its class has no idle time")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject, limits = view.subject, settings.limits
    if subject.state in _OVER:
        return _after_stop(view, settings, now)
    if subject.state is not State.RUNNING and subject.state is not State.PAUSED:
        return _NOT_RUNNING
    if subject.devices == ():
        return _NO_GPU
    if isinstance(limits, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, limits.why)
    allowed = limits.idle
    if allowed is None:
        if not is_large(subject):
            return _NO_LIMIT
        if limits.idle_when_large is None:
            return _report_large(view, settings, now)
        allowed = limits.idle_when_large
    if isinstance(subject.devices, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"which GPUs it holds is unknown ({subject.devices.why})")
    if not isinstance(subject.started, datetime):
        return Answer(NAME, Verdict.UNKNOWN, "when it started is unknown")
    window = allowed * settings.policy.demand.idle_factor if _is_shortened(view, settings) else allowed
    return _judge(view, settings, limits, window, subject.devices, subject.started, now)


RULE = Rule(
    name=NAME,
    summary=(
        "Work without GPU use and other activity for its idle time is warned twice, stopped, then removed (after_idle)."
    ),
    shapes=(Shape.WORKLOAD,),
    states=(State.RUNNING, State.PAUSED, State.SUSPENDED, State.ENDED),
    acts=True,
    yields_to=("stop_hold", "keep_alive"),
    evaluate=evaluate,
)


def watched(view: View, settings: Settings, now: datetime) -> str:
    """The state of running work under this rule, as a label for the metrics: `monitored`, or why it is skipped."""
    subject, limits = view.subject, settings.limits
    if subject.devices == () or settings.class_name == WITHOUT_GPU:
        return "no_gpu"
    if settings.untouchable is True:
        return "never_touched"  # monitoring, infrastructure
    if isinstance(limits, Unknown) or isinstance(subject.devices, Unknown) or not isinstance(subject.started, datetime):
        return "unknown"
    if limits.idle is None and (limits.idle_when_large is None or not is_large(subject)):
        return "no_idle_time"
    graced = (view.memory.first_start or subject.started) + limits.start_grace
    return "grace" if now < graced else "monitored"


def horizon(policy: Policy, window: timedelta) -> timedelta:
    """How far back use is searched for: at least to the warnings of the pass before. A warning is for this idle period
    only if everything since then was searched."""
    if policy.schedule.at is not None:
        return valid_for(policy.warnings, window)
    given, apart = policy.warnings, max(HORIZON_SLACK, policy.schedule.every)
    again = AGAIN if given.require_delivery else timedelta()
    return min(window + given.lead + given.undelivered + again + apart, valid_for(given, window))


class FirstAction(msgspec.Struct, frozen=True):
    """`after`: how long it must be idle before this rule warns or notifies. `window`: the time for which its use is
    judged. `not_before`: its owner was notified, and is not notified again until then."""

    after: timedelta
    window: timedelta
    not_before: datetime | None = None


def first_action(view: View, settings: Settings, *, scarce: bool) -> FirstAction | None:
    """If GPUs may become scarce, the least of both times. None: the rule does nothing, or its limits are unknown."""
    limits, subject = settings.limits, view.subject
    if isinstance(limits, Unknown):
        return None
    window = limits.idle if limits.idle is not None else limits.idle_when_large if is_large(subject) else None
    if window is not None:
        if limits.on_idle is OnLimit.REPORT:
            return None  # only reported: nobody is notified
        window *= min(settings.policy.demand.idle_factor, 1.0) if scarce else 1.0
        return FirstAction(_next(settings, limits, window), window)
    if not (limits.tell_when_large and is_large(subject)):
        return None
    last = max((w.at for w in view.memory.warnings if _notified(w)), default=None)
    return FirstAction(REPORTED_AFTER, REPORTED_AFTER + MINUTE, None if last is None else last + DAY)


def _notified(warned: Warned) -> bool:
    """That it holds much, although its class has no idle time."""
    return warned.rule == NAME and not warned.limit


def is_large(subject: Subject) -> bool:
    """Holds more than one slice: a whole GPU, or several of anything. Unknown counts as large."""
    devices = subject.devices
    return isinstance(devices, Unknown) or len(devices) > 1 or any(one not in subject.slices for one in devices)


def may_be_idle(subject: Subject, book: Rulebook) -> bool:
    """Runs, holds GPUs, and its class has an idle time or it holds much: only these are measured."""
    if subject.state not in _LIVE or subject.devices == () or subject.root is not None:
        return False
    limits = book.settings(subject).limits
    return isinstance(limits, Unknown) or limits.idle is not None or is_large(subject)


def can_stop(subject: Subject, settings: Settings) -> bool:
    """Its class has an idle time for it, and does not only report idle work."""
    limits = settings.limits
    if isinstance(limits, Unknown) or limits.on_idle is OnLimit.REPORT:
        return False
    return limits.idle is not None or (limits.idle_when_large is not None and is_large(subject))


def in_use(view: View, settings: Settings, now: datetime) -> bool:
    """Whether it is measured to be in use now. Not measured is not in use, nor idle."""
    limits, devices = settings.limits, view.subject.devices
    if isinstance(limits, Unknown) or isinstance(devices, Unknown) or not devices:
        return False
    judged = assess_use(view.series, devices, settings.policy.activity, limits.idle or REPORTED_AFTER, now)
    return judged.use is Use.ACTIVE


def _report_large(view: View, settings: Settings, now: datetime) -> Answer:
    """No action follows, so missing measurements are not reported."""
    devices = view.subject.devices
    if isinstance(devices, Unknown):
        return _NO_LIMIT
    window = REPORTED_AFTER + MINUTE  # the present minute is not over
    judged = assess_use(view.series, devices, settings.policy.activity, window, now, 2 * window)
    if judged.use is not Use.QUIET or judged.since is None or now - judged.since < REPORTED_AFTER:
        return Answer(NAME, Verdict.SILENT, f"its class has no idle time; {judged.reason}")
    idle_for = ("at least " if judged.used is None else "") + in_words(now - judged.since)
    words = f"holds {_in_words(view.subject, devices)}, idle for {idle_for}; its class has no idle time"
    told = any(_notified(w) and timedelta() <= now - w.at < DAY for w in view.memory.warnings)
    if told or isinstance(settings.limits, Unknown) or not settings.limits.tell_when_large:
        return Answer(NAME, Verdict.REPORT, words, since=judged.since)
    # Once a day, and nothing follows from it: others wait for a GPU, and only its owner knows.
    asked = f"{words}. No action is taken; if you do not need it now, stop it so that others can use it"
    return Answer(NAME, Verdict.DUE, asked, Action.WARN, now, judged.since, stage=1)


def _in_words(subject: Subject, devices: tuple[str, ...]) -> str:
    slices = sum(one in subject.slices for one in devices)
    counts = ((len(devices) - slices, "whole GPU"), (slices, "slice"))
    return " and ".join(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count)


def _judge(
    view: View,
    settings: Settings,
    limits: ClassSettings,
    window: timedelta,
    devices: tuple[str, ...],
    started: datetime,
    now: datetime,
) -> Answer:
    # The grace is given once per workload, at its very first start; a restart only begins a new window.
    graced = (view.memory.first_start or started) + limits.start_grace
    if now < graced:
        words = f"started {in_words(now - started)} ago, in its start grace"
        return Answer(NAME, Verdict.WAIT, words, due=graced + _next(settings, limits, window))
    judged = assess_use(view.series, devices, settings.policy.activity, window, now, horizon(settings.policy, window))
    if judged.use is Use.UNKNOWN:
        return Answer(NAME, Verdict.UNKNOWN, judged.reason)
    if judged.use is Use.ACTIVE:
        return Answer(NAME, Verdict.WAIT, judged.reason, due=now + _next(settings, limits, window))
    since = max(judged.since or now, graced, started)
    idle_for = in_words(now - since)
    if judged.used is None and since == judged.since:
        idle_for = _longer(view, settings, window, devices, since, now)
    words = _condition(view, settings, judged, window, idle_for, now - since)
    if limits.on_idle is OnLimit.REPORT:
        if now - since < window:
            return Answer(NAME, Verdict.WAIT, words, due=since + window)
        return Answer(NAME, Verdict.REPORT, words + "; its class only reports idle work", since=since)
    to = Countdown(
        rule=NAME,
        action=Action.STOP,
        begin=since,
        limit=window,
        stages=settings.policy.warnings.idle,
        condition=words,
        since=since,
        remedy="Use it, or keep it",
        # A warning belongs to this quiet time if neither use nor a gap came after it.
        only_after=max(judged.since or now, started),
        # The idle time restarts after a gap. The first warning is not repeated each time: owners would ignore it.
        told_after=max(judged.used or now - horizon(settings.policy, window), started),
        then=_then(view, settings),
        delivered=settings.policy.warnings.require_delivery,
        shortened=_is_shortened(view, settings),
    )
    return staged(view, settings, now, to)


def _longer(
    view: View, settings: Settings, window: timedelta, devices: tuple[str, ...], since: datetime, now: datetime
) -> str:
    """No use was found as far back as the rule searches: how long it is idle, by all that is known. For words only."""
    known = min((one.start for one in view.series if one.minutes), default=since)
    if known < since:
        judged = assess_use(view.series, devices, settings.policy.activity, window, now, now - known + MINUTE)
        started = view.subject.started
        since = max(judged.since or since, started) if isinstance(started, datetime) else since
    # Later than what is known: then it was used, not measured, or started.
    exact = since > known or since == view.subject.started
    return in_words(now - since) if exact else f"at least {in_words(now - since)}"


def removed_later(view: View, settings: Settings) -> timedelta | None:
    """How long after its stop it is removed, by its class or as other stopped work. None: never, or it is not known."""
    limits, retention, subject = settings.limits, settings.retention, view.subject
    if isinstance(limits, Unknown):
        return None
    removes = limits.after_idle is AfterIdle.REMOVE
    if removes and not subject.suspended_by_stop:
        return timedelta()
    if isinstance(retention, Unknown) or (subject.suspended_by_stop and not removes):
        return None
    if subject.suspended_by_stop or subject.marks.ttl is None or not settings.policy.own_ttl:
        return retention.stopped
    ttl = subject.marks.ttl
    return None if isinstance(ttl, Unknown) else min(ttl / settings.divisor, retention.max)


def _then(view: View, settings: Settings) -> str:
    after = removed_later(view, settings)
    if after is not None:
        return f"{DELETED} {in_words(after)} later" if after else DELETED
    known = not isinstance(settings.limits, Unknown) and (
        settings.limits.after_idle is AfterIdle.KEEP or not isinstance(settings.retention, Unknown)
    )
    return f", then {_KEPT}" if known and view.subject.suspended_by_stop else ""


def _is_shortened(view: View, settings: Settings) -> bool:
    """Whether its idle time is shorter than usual, because demand is high."""
    return view.pressure and settings.policy.demand.idle_factor < 1


def _condition(
    view: View, settings: Settings, judged: UseAssessment, window: timedelta, idle_for: str, quiet: timedelta
) -> str:
    words = f"idle for {idle_for}, allowed {in_words(window)}"
    if quiet < min(settings.policy.activity.settle, window / 2):  # its start or its grace was just now
        words = f"its idle time counts from {in_words(quiet)} ago on, allowed {in_words(window)}"
    if _is_shortened(view, settings):
        words += " while GPUs are scarce"
    if judged.skipped:
        words += f" (not checked: {', '.join(judged.skipped)})"
    return words


def _next(settings: Settings, limits: ClassSettings, window: timedelta) -> timedelta:
    """How much idle time passes until the next action: the first warning, or the report."""
    stages = settings.policy.warnings.idle
    return window if limits.on_idle is OnLimit.REPORT or not stages else share_of(window, stages[0])


def _after_stop(view: View, settings: Settings, now: datetime) -> Answer:
    """Ended work is removed at once. What can be resumed is kept as long as stopped work."""
    stopped, limits = view.memory.stopped, settings.limits
    if stopped is None or stopped.by != "gpukeeper" or stopped.rule != NAME:
        return _NOT_RUNNING
    suspended = view.subject.state is State.SUSPENDED
    if stopped.incarnation != view.subject.seen.incarnation:
        return _NOT_RUNNING  # somebody set it going since, and whoever ended that run was not us
    if isinstance(limits, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, limits.why)
    keeps = limits.after_idle is AfterIdle.KEEP
    if not suspended and keeps:
        return _NOT_RUNNING  # kept like other stopped work, and then removed by the same rules
    words = "stopped because it was idle; its class then removes it"
    if not suspended:
        return Answer(NAME, Verdict.DUE, words, Action.REMOVE, stopped.at)
    if isinstance(settings.retention, Unknown) and not keeps:
        return Answer(NAME, Verdict.UNKNOWN, settings.retention.why)
    keep = None if keeps or isinstance(settings.retention, Unknown) else settings.retention.stopped
    if keep is None:
        return Answer(NAME, Verdict.PROTECT, f"suspended because it was idle; {_KEPT}")
    due, words = stopped.at + keep, f"suspended because it was idle; its class removes it {in_words(keep)} later"
    if now < due:
        return Answer(NAME, Verdict.WAIT, words, due=due)
    return Answer(NAME, Verdict.DUE, words, Action.REMOVE, due)

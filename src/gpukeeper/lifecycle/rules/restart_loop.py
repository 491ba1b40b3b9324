"""A workload that ended for good and runs again under the same uid is in a loop: it fails, expires and starts again.
So is one that fails again and again and that its platform starts again each time."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.lifecycle.warnings import AT_ONCE, Countdown, staged
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import OnLimit
from gpukeeper.model.subject import Crashes, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "restart_loop"

FAILURES = 5  # in a row: a service that waits for another one fails a few times, too
RECOVERED = timedelta(minutes=2)  # a run of this length, and twice as long as those before, ends the loop
_RUNS = (State.RUNNING, State.PAUSED)
_NO_LOOP = Answer(NAME, Verdict.SILENT, "it has not ended for good before, and does not fail again and again")
_NOT_IDLE = frozenset({"idle"})  # each of its short runs would begin a new idle time


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject, ends = view.subject, view.memory.ends_seen
    if subject.crashes is not None and subject.state in _RUNS:
        return _crashing(subject.crashes, view, settings, now)
    if not subject.ends_for_good or subject.state not in _RUNS or ends == 0:
        return _NO_LOOP
    condition = f"it ended {ends} time{'s' if ends > 1 else ''} and runs again under the same identity"
    if ends < settings.policy.loops:
        return Answer(NAME, Verdict.REPORT, condition)
    lead = settings.policy.warnings.lead
    to = Countdown(
        rule=NAME,
        action=Action.REMOVE,
        # Not counted from this run's start: a run may be shorter than the lead and would never be old enough.
        begin=now - lead,
        limit=lead,
        stages=AT_ONCE,
        condition=condition,
        since=subject.started if isinstance(subject.started, datetime) else now,
        remedy="Keep it",
    )
    return staged(view, settings, now, to)


RULE = Rule(
    name=NAME,
    summary=(
        "A root that ends for good and runs again is removed after a warning; what crashes again and again counts as "
        "idle."
    ),
    shapes=(Shape.WORKLOAD,),
    states=(State.RUNNING, State.PAUSED),
    acts=True,
    yields_to=("keep_alive",),
    evaluate=evaluate,
)


def is_failing(seen: Crashes, now: datetime) -> bool:
    return seen.count >= FAILURES and now - seen.last <= max(RECOVERED, 2 * _usual(seen))


def continued(seen: Crashes, at: datetime) -> Crashes:
    """If it goes on failing until then."""
    each = max(_usual(seen), timedelta(seconds=1))
    more = max((at - seen.last) // each, 0)
    return Crashes(seen.count + more, seen.first, seen.last + more * each)


def _usual(seen: Crashes) -> timedelta:
    return (seen.last - seen.first) / max(1, seen.count - 1)


def _crashing(seen: Crashes, view: View, settings: Settings, now: datetime) -> Answer:
    """Its GPUs are as idle as those of work that does nothing, so its class's idle time counts."""
    if not is_failing(seen, now):
        return _NO_LOOP
    failed = in_words(max(now - seen.first, timedelta()))
    condition = f"it failed {seen.count} times in a row in {failed} and was started again each time"
    limits = settings.limits
    if isinstance(limits, Unknown) or isinstance(view.subject.devices, Unknown) or not view.subject.devices:
        return Answer(NAME, Verdict.REPORT, condition, since=seen.first, suspends=_NOT_IDLE)
    if limits.idle is None or limits.on_idle is OnLimit.REPORT:
        words = f"{condition}; its class only reports it"
        return Answer(NAME, Verdict.REPORT, words, since=seen.first, suspends=_NOT_IDLE)
    to = Countdown(
        rule=NAME,
        action=Action.STOP,
        begin=seen.first,
        limit=limits.idle,
        stages=settings.policy.warnings.idle,
        condition=condition,
        since=seen.first,
        remedy="Repair it, or keep it",
        only_after=seen.first,
    )
    answer = staged(view, settings, now, to)
    if answer.verdict is Verdict.WAIT:  # visible from the beginning
        return msgspec.structs.replace(answer, verdict=Verdict.REPORT, suspends=_NOT_IDLE)
    return answer

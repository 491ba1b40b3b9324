"""The maximum runtime. Runtime adds up over restarts of the same workload."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.lifecycle.warnings import Countdown, staged
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import OnLimit
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "max_runtime"

HOUR = timedelta(hours=1)
_NOT_RUNNING = Answer(NAME, Verdict.SILENT, "it is not running")
_NO_LIMIT = Answer(NAME, Verdict.SILENT, "its class has no maximum runtime")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject = view.subject
    if subject.state is not State.RUNNING and subject.state is not State.PAUSED:
        return _NOT_RUNNING
    limits = settings.limits
    if isinstance(limits, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, limits.why)
    if limits.max_runtime is None:
        return _NO_LIMIT
    if not isinstance(subject.started, datetime):
        return Answer(NAME, Verdict.UNKNOWN, f"when it started is unknown ({_why(subject.started)})")
    begin = subject.started - view.memory.ran
    words, over = f"ran for {in_words(now - begin)}, allowed {in_words(limits.max_runtime)}", begin + limits.max_runtime
    if limits.on_max_runtime is OnLimit.REPORT:
        words += "; its class only reports long runtimes"
        if now < over:
            return Answer(NAME, Verdict.WAIT, words, due=over)
        return Answer(NAME, Verdict.REPORT, words, since=over)
    to = Countdown(
        rule=NAME,
        action=Action.STOP,
        begin=begin,
        limit=limits.max_runtime,
        stages=settings.policy.warnings.runtime,
        condition=words,
        since=over,
        remedy="Save your work; an admin can grant more time",
        # Who starts it again is warned again; but restarting every few minutes does not put the stop off for ever.
        only_after=min(subject.started, now - HOUR),
        holdable=RULE.holdable,
    )
    return staged(view, settings, now, to)


RULE = Rule(
    name=NAME,
    summary="Work that ran longer than its limit is warned twice and stopped, or only reported (on_max_runtime).",
    shapes=(Shape.WORKLOAD,),
    states=(State.RUNNING, State.PAUSED),
    acts=True,
    holdable=False,  # a hold must not make work immortal
    evaluate=evaluate,
)


def _why(started: Unknown | None) -> str:
    return started.why if isinstance(started, Unknown) else "the platform reports no start time"

"""A workload that ended for good and runs again under the same uid is in a loop: it fails, expires and starts again."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.lifecycle.warnings import AT_ONCE, Countdown, keep_it, staged
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape, State

NAME = "restart_loop"
SUMMARY = "A root that ended for good and runs again is reported; if it repeats, it is removed after a warning."
FOR = (Shape.WORKLOAD,)
IN = (State.RUNNING, State.PAUSED)
ACTS = True
YIELDS_TO = ("keep_alive",)

_RUNS = (State.RUNNING, State.PAUSED)
_NO_LOOP = Answer(NAME, Verdict.SILENT, "it has not ended for good before")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject, ends = view.subject, view.memory.ends_seen
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
        remedy=f"Keep it: {keep_it(view, settings, now)}",
    )
    return staged(view, settings, now, to)

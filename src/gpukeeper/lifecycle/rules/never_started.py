"""Created and never started: a failed or forgotten start. It blocks names and GPU claims."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "never_started"

_STARTED = Answer(NAME, Verdict.SILENT, "it was started")
_NO_LIMIT = Answer(NAME, Verdict.SILENT, "its class keeps workloads that were never started")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    if view.subject.state is not State.CREATED:
        return _STARTED
    if view.memory.first_start is not None:
        return _STARTED  # it ran before, and waits to run again
    if isinstance(settings.limits, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, settings.limits.why)
    if settings.limits.never_started is None:
        return _NO_LIMIT
    created = view.subject.created
    if isinstance(created, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"when it was created is unknown ({created.why})")
    due = created + settings.limits.never_started
    why = f" ({view.subject.starting})" if view.subject.starting else ""
    allowed = in_words(settings.limits.never_started)
    reason = f"created {in_words(now - created)} ago and never started{why}, allowed {allowed}"
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, created)


RULE = Rule(
    name=NAME,
    summary="A workload that was created and not started within never_started (30m) is removed.",
    shapes=(Shape.WORKLOAD,),
    states=(State.CREATED,),
    acts=True,
    yields_to=("keep_alive",),
    evaluate=evaluate,
)

"""How long ended work is kept: by outcome and environment. Failures are kept longer."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rule import Rule, comes_back, ended_in_words, finish_of
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.lifecycle.warnings import remove_with_children
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Outcome, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "retention"

_NOT_ENDED = Answer(NAME, Verdict.SILENT, "it has not ended")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject = view.subject
    if subject.state is not State.ENDED:
        return _NOT_ENDED
    if isinstance(settings.retention, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, settings.retention.why)
    if isinstance(subject.outcome, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"how it ended is unknown ({subject.outcome.why})")
    outcome = subject.outcome or Outcome.STOPPED
    keep = getattr(settings.retention, outcome.value)
    if keep is None:
        return Answer(NAME, Verdict.PROTECT, f"{outcome}; kept until a person removes it (retention: manual)")
    ended = finish_of(view, now)
    due = ended + keep
    reason = f"{ended_in_words(subject, outcome, ended, now)}, kept for {in_words(keep)}"
    if now < due:
        again = comes_back(view)
        return Answer(NAME, Verdict.WAIT, f"{reason}{again}", due=None if again else due)
    answer = Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, ended)
    return remove_with_children(NAME, view, settings, now, answer)


RULE = Rule(
    name=NAME,
    summary="Ended work is removed when its retention is over: by outcome, and by environment if the policy has any.",
    shapes=(Shape.WORKLOAD,),
    states=(State.ENDED,),
    acts=True,
    yields_to=("stop_hold", "keep_alive", "live_children", "own_ttl"),
    evaluate=evaluate,
)

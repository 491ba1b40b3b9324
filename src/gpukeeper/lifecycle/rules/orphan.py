"""Processes that outlived their workload. Ended only with proof that they belonged to it; others are reported."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "orphan"

SETTLE = timedelta(minutes=1)
_NOT_ONE = Answer(NAME, Verdict.SILENT, "not an orphan")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject = view.subject
    if subject.shape is not Shape.ORPHAN:
        return _NOT_ONE
    if isinstance(subject.proof, Unknown):
        return Answer(
            NAME, Verdict.UNKNOWN, f"whether it belongs to an ended workload is unknown ({subject.proof.why})"
        )
    if subject.proof is None:
        return Answer(NAME, Verdict.REPORT, "no proof that it belongs to an ended workload; it is never touched")
    if isinstance(subject.created, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"its age is unknown ({subject.created.why})")
    reason = f"left behind by a workload that ended ({subject.proof}), {in_words(now - subject.created)} old"
    if not settings.policy.orphans:
        return Answer(NAME, Verdict.REPORT, reason + "; the policy only reports orphans", since=subject.created)
    due = subject.created + SETTLE
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, subject.created)


RULE = Rule(
    name=NAME,
    summary="A process that outlived its workload is ended if it provably belongs to it; other processes never.",
    shapes=(Shape.ORPHAN,),
    acts=True,
    counted_once=True,  # all that one workload left began to be left at its end
    evaluate=evaluate,
)

"""A removal that does not end: what blocks it, and whether that may be removed."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "stuck_removal"

_NOT_STUCK = Answer(NAME, Verdict.SILENT, "nothing blocks its removal")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    blocked = view.subject.blocked
    if view.subject.state is not State.REMOVING or blocked is None:
        return _NOT_STUCK
    condition = f"its removal began {in_words(now - blocked.since)} ago and is blocked by {blocked.by}: {blocked.why}"
    if isinstance(blocked.proven, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"{condition}. Not proven ({blocked.proven.why}), so it stays")
    if not blocked.proven:
        return Answer(NAME, Verdict.REPORT, condition, since=blocked.since)
    if blocked.by not in settings.policy.release:
        words = f"{condition}. It is not expected to end by itself; kubernetes.release does not name {blocked.by}"
        return Answer(NAME, Verdict.REPORT, words, since=blocked.since)
    return Answer(NAME, Verdict.DUE, condition, Action.RELEASE, blocked.since, blocked.since)


RULE = Rule(
    name=NAME,
    summary="A stuck removal is reported; what blocks it is removed if the policy names it and it provably never ends.",
    shapes=(Shape.WORKLOAD,),
    states=(State.REMOVING,),
    acts=True,
    while_removed=True,
    evaluate=evaluate,
)

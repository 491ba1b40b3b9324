"""Trees that ended work left behind: deleted if proven dead and unused for long enough."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.lifecycle.rule import Rule, Turn
from gpukeeper.lifecycle.rules.temporary_tree import by_evidence, not_free, unused
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import Kept
from gpukeeper.model.subject import Category, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words

NAME = "leftover_tree"

_NOT_ONE = Answer(NAME, Verdict.SILENT, "not a tree of ended work")
_FOR_EVER = Kept(older_than=None)
_WORDS = {
    Category.UNFINISHED: "left by an interrupted removal of gpukeeper",
    Category.DEAD_SESSION: "a dead session",
    Category.DEAD_LOGS: "logs of processes that ended",
    Category.REPORT: "a report",
}


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject = view.subject
    if subject.shape is not Shape.TREE or subject.category is Category.TEMPORARY:
        return _NOT_ONE
    if (problem := not_free(NAME, subject)) is not None:
        return problem
    last_used = subject.last_used
    if not isinstance(last_used, datetime):
        why = last_used.why if isinstance(last_used, Unknown) else "it has no timestamps"
        return Answer(NAME, Verdict.UNKNOWN, f"when it was last used is unknown ({why})")
    kept = settings.policy.kept.get(subject.category.value, _FOR_EVER)
    reason = f"{_WORDS[subject.category]}{_size(subject)}, {unused(last_used, now)}"
    if kept.older_than is None:
        reason += f"{by_evidence(subject)}; the policy only reports these"
        return Answer(NAME, Verdict.REPORT, reason, since=last_used)
    allowed = _allowed(kept.older_than, kept.under_pressure if view.pressure else None)
    reason += f", allowed {in_words(allowed)}"
    if allowed < kept.older_than:
        reason += " while the disk is too full"
    reason += by_evidence(subject)
    due = last_used + allowed
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    pressed = now < last_used + kept.older_than
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, last_used, pressed=pressed)


RULE = Rule(
    name=NAME,
    summary="Trees of ended work are deleted if proven dead, not in use, and unused for the age of their category.",
    shapes=(Shape.TREE,),
    acts=True,
    turn=Turn.TREES,
    evaluate=evaluate,
)


def on_request(view: View, settings: Settings, now: datetime) -> Answer:
    """At the request of its owner: nothing is skipped."""
    return evaluate(view, settings, now)


def _allowed(older_than: timedelta, under_pressure: timedelta | None) -> timedelta:
    return older_than if under_pressure is None else min(older_than, under_pressure)


def _size(subject: Subject) -> str:
    return "" if isinstance(subject.size, Unknown) else f" of {size_in_words(subject.size)}"

"""Trees that ended work left behind and that are proven to be over: they go when nobody used them for long enough."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rules.temporary_tree import not_free
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.durations import in_words, size_in_words
from gpukeeper.model.subject import Category, Shape, Subject
from gpukeeper.model.unknown import Unknown

NAME = "leftover_tree"
SAYS = "Trees of ended work go when they are proven to be over, closed, and unused for as long as their category says."
FOR = (Shape.TREE,)
ACTS = True

_NOT_ONE = Answer(NAME, Verdict.SILENT, "a temporary tree, or none at all")
_WORDS = {
    Category.UNFINISHED: "left by a removal of gpukeeper that was interrupted",
    Category.DEAD_SESSION: "a dead session",
    Category.DEAD_LOGS: "logs of processes that ended",
    Category.REPORT: "a report",
}


def ask(view: View, settings: Settings, now: datetime) -> Answer:
    subject = view.subject
    if subject.shape is not Shape.TREE or subject.category is Category.TEMPORARY:
        return _NOT_ONE
    what, kept = _WORDS[subject.category], settings.policy.kept.get(subject.category.value)
    if kept is None or kept.older_than is None:
        return Answer(NAME, Verdict.PROTECT, f"{what}; the policy keeps these until somebody removes them")
    if (problem := not_free(NAME, subject)) is not None:
        return problem
    last_used = subject.last_used
    if not isinstance(last_used, datetime):
        why = last_used.why if isinstance(last_used, Unknown) else "it has no times"
        return Answer(NAME, Verdict.UNKNOWN, f"when it was last used is not known ({why})")
    shrinks = view.pressure and kept.under_pressure is not None
    allowed = min(kept.older_than, kept.under_pressure) if shrinks and kept.under_pressure else kept.older_than
    reason = f"{what}{_size(subject)}, unused for {in_words(now - last_used)}, allowed {in_words(allowed)}"
    if shrinks:
        reason += " while the disk is too full"
    due = last_used + allowed
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, last_used)


def _size(subject: Subject) -> str:
    return "" if isinstance(subject.size, Unknown) else f" of {size_in_words(subject.size)}"

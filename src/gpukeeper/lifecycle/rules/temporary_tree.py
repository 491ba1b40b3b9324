"""Temporary files below a root that the policy names: not in use, old enough, and large enough to matter."""

from __future__ import annotations

import posixpath
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache

from gpukeeper.lifecycle.rule import Rule, Turn
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import Policy, Temporary
from gpukeeper.model.subject import Category, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words

NAME = "temporary_tree"

_NOT_ONE = Answer(NAME, Verdict.SILENT, "not a temporary tree")
_NOT_NAMED = Answer(NAME, Verdict.PROTECT, "no root and pattern of the policy names it, or a keep pattern matches it")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject = view.subject
    if subject.shape is not Shape.TREE or subject.category is not Category.TEMPORARY:
        return _NOT_ONE
    named = named_by(settings.policy, subject)
    if named is None:
        return _NOT_NAMED
    if subject.kept is not None:  # first: what is kept anyway is not in the total size, which may be less than its own
        return _stays(NAME, subject.kept)
    together = subject.size if subject.together is None else subject.together
    where = f"on {subject.ref.namespace}" if subject.ref.namespace else f"below {named.root}"
    if isinstance(together, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"the size of such trees {where} is unknown ({together.why})")
    if together < named.above and not view.pressure:
        held = f"{size_in_words(together)} of such trees {where}"
        return Answer(NAME, Verdict.PROTECT, f"{held}; considered above {size_in_words(named.above)}")
    return not_free(NAME, subject) or _by_age(subject, named, together, view.pressure, now)


RULE = Rule(
    name=NAME,
    summary=(
        "Trees that match a pattern below a named root are deleted if large, not in use, and unused for long enough."
    ),
    shapes=(Shape.TREE,),
    acts=True,
    turn=Turn.TREES,
    evaluate=evaluate,
)


def on_request(view: View, settings: Settings, now: datetime) -> Answer:
    """On request of its owner: every condition except the total size of such trees."""
    named = named_by(settings.policy, view.subject)
    if named is None:
        return _NOT_NAMED
    return not_free(NAME, view.subject) or _by_age(view.subject, named, named.above, view.pressure, now)


def named_by(policy: Policy, subject: Subject) -> Temporary | None:
    """The entry that names it: a direct child of the root, by pattern. Anything else is never deleted."""
    root, name = posixpath.split(subject.ref.name)
    here = [e for e in policy.temporary if e.platform == subject.ref.platform and _normal(e.root) == root]
    if any(fnmatchcase(name, pattern) for entry in here for pattern in entry.keep):
        return None  # whichever entry names it: what is to be kept is kept
    return next((entry for entry in here if any(fnmatchcase(name, pattern) for pattern in entry.names)), None)


@lru_cache(maxsize=256)
def _normal(root: str) -> str:
    """Of the policy: the same few for every tree."""
    return posixpath.normpath(root)


def not_free(rule: str, subject: Subject) -> Answer | None:
    """Why it is kept at any age: in use itself, or next to work that may use it. None: it is free."""
    if subject.kept is not None:
        return _stays(rule, subject.kept)
    work = work_beside(subject, rule)
    if work is not None:
        return work
    if isinstance(subject.in_use, Unknown):
        return Answer(rule, Verdict.UNKNOWN, f"whether it is in use is unknown ({subject.in_use.why})")
    if subject.in_use:
        return Answer(rule, Verdict.PROTECT, "in use: a process has files of it open or runs inside it")
    return None


def _stays(rule: str, why: str) -> Answer:
    return Answer(rule, Verdict.PROTECT, f"it stays: {why}")


def work_beside(subject: Subject, rule: str = NAME) -> Answer | None:
    if isinstance(subject.busy, Unknown):
        return Answer(rule, Verdict.UNKNOWN, f"whether work runs beside it is unknown ({subject.busy.why})")
    return None if subject.busy is None else Answer(rule, Verdict.PROTECT, f"work runs beside it: {subject.busy}")


def unused(last_used: datetime, now: datetime) -> str:
    ahead = last_used > now
    return f"may be in use for {in_words(last_used - now)} more" if ahead else f"unused for {in_words(now - last_used)}"


def by_evidence(subject: Subject) -> str:
    return f" ({subject.use_evidence})" if subject.use_evidence else ""


def _by_age(subject: Subject, named: Temporary, together: int, pressure: bool, now: datetime) -> Answer:
    last_used = subject.last_used
    if not isinstance(last_used, datetime):
        why = last_used.why if isinstance(last_used, Unknown) else "it has no timestamps"
        return Answer(NAME, Verdict.UNKNOWN, f"when it was last used is unknown ({why})")
    if isinstance(subject.size, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"its size is unknown ({subject.size.why})")
    allowed = min(named.older_than, named.under_pressure) if pressure else named.older_than
    reason = f"{size_in_words(subject.size)}, {unused(last_used, now)}, allowed {in_words(allowed)}"
    if pressure:
        reason += " while the disk is too full"
    reason += by_evidence(subject)
    due = last_used + allowed
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    otherwise = together >= named.above and now >= last_used + named.older_than
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, last_used, pressed=not otherwise)

"""Build cache of image builds. It contains no user's work; without it the next build takes longer."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rule import Rule, Turn
from gpukeeper.lifecycle.rules.unused_image import size_words
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "build_cache"

_NOT_ONE = Answer(NAME, Verdict.SILENT, "not build cache")
_USED = Answer(NAME, Verdict.PROTECT, "a build uses it")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject, unused = view.subject, settings.policy.build_cache.unused
    if subject.shape is not Shape.CACHE:
        return _NOT_ONE
    if isinstance(subject.in_use, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"whether it is in use is unknown ({subject.in_use.why})")
    if subject.in_use:
        return _USED
    last_used = subject.last_used
    if not isinstance(last_used, datetime):
        why = last_used.why if isinstance(last_used, Unknown) else "no time of last use"
        return Answer(NAME, Verdict.UNKNOWN, f"when it was last used is unknown ({why})")
    reason = f"{size_words(subject)}, unused for {in_words(now - last_used)}"
    if unused is None:
        return Answer(NAME, Verdict.REPORT, reason + "; the policy only reports build cache", since=last_used)
    due = last_used + unused
    reason += f", kept for {in_words(unused)}"
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, last_used)


RULE = Rule(
    name=NAME,
    summary="Build cache that no build used for build_cache.unused is removed; without that setting it is reported.",
    shapes=(Shape.CACHE,),
    acts=True,
    turn=Turn.STORAGE,
    evaluate=evaluate,
)

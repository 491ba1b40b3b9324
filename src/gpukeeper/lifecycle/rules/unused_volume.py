"""Volumes that no workload refers to, running or stopped. Their files exist nowhere else: nothing is removed unless
the policy sets an age, and never a volume that somebody gave a name."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.lifecycle.rule import Rule, Turn
from gpukeeper.lifecycle.rules.unused_image import unused_since
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "unused_volume"

_NOT_ONE = Answer(NAME, Verdict.SILENT, "not a volume")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    if view.subject.shape is not Shape.VOLUME:
        return _NOT_ONE
    return unused(NAME, view, settings.policy.volumes.anonymous_unused, now)


RULE = Rule(
    name=NAME,
    summary=(
        "A volume without a name that no workload refers to for volumes.anonymous_unused is removed; without that "
        "setting it is reported. A volume with a name is only reported."
    ),
    shapes=(Shape.VOLUME,),
    acts=True,
    turn=Turn.STORAGE,
    evaluate=evaluate,
)


def unused(rule: str, view: View, limit: timedelta | None, now: datetime) -> Answer:
    """Of what workloads refer to. `limit`: how long it is kept without one; None: it is only reported."""
    subject = view.subject
    if isinstance(subject.in_use, Unknown):
        return Answer(rule, Verdict.UNKNOWN, f"whether it is in use is unknown ({subject.in_use.why})")
    if subject.in_use or subject.state is not State.ENDED:
        return Answer(rule, Verdict.PROTECT, "a workload refers to it")
    since = unused_since(view)
    if isinstance(since, Unknown):
        return Answer(rule, Verdict.UNKNOWN, since.why)
    reason = f"unused for {in_words(now - since)}"
    if limit is None or subject.kept is not None:
        why = f"the policy only reports unused {subject.shape}s" if subject.kept is None else subject.kept
        return Answer(rule, Verdict.REPORT, f"{reason}; {why}", since=since)
    due = since + limit
    reason += f", kept for {in_words(limit)}"
    if now < due:
        return Answer(rule, Verdict.WAIT, reason, due=due)
    return Answer(rule, Verdict.DUE, reason, Action.REMOVE, due, since)

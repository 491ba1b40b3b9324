"""A finished root whose children still run and hold GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from gpukeeper.lifecycle.rule import Evaluator, Rule, finish_of, suspended_by
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import AtFinish
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "live_children"

SETTLE = timedelta(minutes=5)  # controllers need a moment to tidy up by themselves
_NONE = Answer(NAME, Verdict.SILENT, "no running children")


def evaluator(rules: Sequence[Rule]) -> Evaluator:
    return partial(evaluate, suspends=suspended_by(NAME, rules))


def evaluate(view: View, settings: Settings, now: datetime, suspends: frozenset[str] = frozenset()) -> Answer:
    subject = view.subject
    if subject.state is not State.ENDED:
        return _NONE
    if subject.live_children == 0:
        return _dead_ones(view, settings, now)
    if isinstance(subject.live_children, Unknown):
        why = f"whether its children still run is unknown ({subject.live_children.why})"
        return Answer(NAME, Verdict.UNKNOWN, why, suspends=suspends)
    ended = finish_of(view, now)
    condition = (
        f"finished {in_words(now - ended)} ago, but {subject.live_children} of its children still run and hold GPUs"
    )
    if settings.policy.at_finish is AtFinish.NONE:
        return Answer(NAME, Verdict.REPORT, condition + "; at_finish is None, so they are reported only", since=ended)
    if subject.children_go_with_it:
        return Answer(NAME, Verdict.REPORT, condition + "; they are removed with it", since=ended)
    due = ended + SETTLE
    if now < due:
        # They are ended first. A removal announced meanwhile would name a later time than that.
        return Answer(NAME, Verdict.WAIT, condition, due=due, suspends=suspends)
    return Answer(NAME, Verdict.DUE, condition, Action.TRIM, due, ended)


RULE = Rule(
    name=NAME,
    summary="Children that still run after their root has finished are reported, and ended if at_finish is set so.",
    shapes=(Shape.WORKLOAD,),
    states=(State.ENDED,),
    acts=True,
    yields_to=("keep_alive",),
    evaluate=evaluate,
    evaluator=evaluator,
)


def _dead_ones(view: View, settings: Settings, now: datetime) -> Answer:
    """Children that ended are kept with their root, unless at_finish is All."""
    dead = view.subject.dead_children
    if settings.policy.at_finish is not AtFinish.ALL or dead == 0 or view.subject.children_go_with_it:
        return _NONE
    if isinstance(dead, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"whether ended children are still kept is unknown ({dead.why})")
    ended = finish_of(view, now)
    condition = f"finished {in_words(now - ended)} ago; {dead} of its ended children are still kept, at_finish is All"
    if now < ended + SETTLE:
        return Answer(NAME, Verdict.WAIT, condition, due=ended + SETTLE)
    return Answer(NAME, Verdict.DUE, condition, Action.TRIM, ended + SETTLE, ended)

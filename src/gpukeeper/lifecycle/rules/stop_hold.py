"""After a stop by its owner the GPU stays reserved for a while, so that a restart finds it free.

The same applies after a stop at the maximum runtime: the work was in use until then. An idle stop releases the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from gpukeeper.lifecycle.rule import Evaluator, Rule, suspended_by
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Answer, Verdict, View
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "stop_hold"

_NOT_STOPPED = Answer(NAME, Verdict.SILENT, "it was not stopped outside gpukeeper")
_OURS_THAT_COUNT = {"max_runtime": "stopped at its maximum runtime", "request": "stopped on request"}


def evaluator(rules: Sequence[Rule]) -> Evaluator:
    return partial(evaluate, suspends=suspended_by(NAME, rules))


def evaluate(view: View, settings: Settings, now: datetime, suspends: frozenset[str] = frozenset()) -> Answer:
    stopped = view.memory.stopped
    if view.subject.state is not State.ENDED or stopped is None:
        return _NOT_STOPPED
    how = _OURS_THAT_COUNT.get(stopped.rule) if stopped.by == "gpukeeper" else "stopped outside gpukeeper"
    if how is None:
        return _NOT_STOPPED
    if isinstance(settings.limits, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, settings.limits.why, suspends=suspends)
    until = stopped.at + settings.limits.hold_after_stop
    if now >= until or view.subject.devices == ():
        return _NOT_STOPPED
    reason = (
        f"{how} {in_words(now - stopped.at)} ago; its GPU stays reserved for its owner for {in_words(until - now)} more"
    )
    return Answer(NAME, Verdict.PROTECT, reason, due=until, suspends=suspends)


RULE = Rule(
    name=NAME,
    summary=(
        "Work stopped by its owner or at its maximum runtime keeps its GPU for hold_after_stop (15m); then retention."
    ),
    shapes=(Shape.WORKLOAD,),
    states=(State.ENDED,),
    acts=False,
    yields_to=("keep_alive",),
    evaluate=evaluate,
    evaluator=evaluator,
)

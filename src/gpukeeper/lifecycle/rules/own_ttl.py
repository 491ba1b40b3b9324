"""The workload's own time to live after its finish. It outranks the policy's retention, up to retention.max."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from gpukeeper.lifecycle.rule import Evaluator, Rule, comes_back, ended_in_words, finish_of, suspended_by
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.lifecycle.warnings import remove_with_children
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "own_ttl"

MARGIN = timedelta(minutes=1)  # a TTL that the platform keeps itself is left to it; after this it is late
_NOT_ENDED = Answer(NAME, Verdict.SILENT, "it has not ended")
_NONE = Answer(NAME, Verdict.SILENT, "it has no TTL of its own")
_IGNORED = Answer(NAME, Verdict.SILENT, "the policy ignores the TTLs of workloads")


def evaluator(rules: Sequence[Rule]) -> Evaluator:
    return partial(evaluate, suspends=suspended_by(NAME, rules))


def evaluate(view: View, settings: Settings, now: datetime, suspends: frozenset[str] = frozenset()) -> Answer:
    if view.subject.state is not State.ENDED:
        return _NOT_ENDED
    ttl = view.subject.marks.ttl
    if ttl is None:
        return _NONE
    if not settings.policy.own_ttl:
        return _IGNORED
    if isinstance(ttl, Unknown):
        why = f"its TTL cannot be read ({ttl.why}); kept until it is fixed"
        return Answer(NAME, Verdict.UNKNOWN, why, suspends=suspends, complaint=why)
    if isinstance(settings.retention, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, settings.retention.why, suspends=suspends)
    ended = finish_of(view, now)
    ttl /= settings.divisor
    allowed = min(ttl, settings.retention.max)
    capped = f" (requested {in_words(ttl)}, limited by retention.max)" if ttl > allowed else ""
    by = f" after its end, by {view.subject.marks.ttl_by}" if view.subject.marks.ttl_by else ""
    word = "failed" if view.subject.ended_with else "ended"
    reason = f"{ended_in_words(view.subject, word, ended, now)}, its own TTL is {in_words(allowed)}{by}{capped}"
    due = ended + allowed
    if view.subject.marks.ttl_elsewhere:
        due += MARGIN
        reason += "; the platform has not removed it" if now >= due else "; then the platform removes it"
    if now < due:
        again = comes_back(view)
        return Answer(NAME, Verdict.WAIT, f"{reason}{again}", due=None if again else due, suspends=suspends)
    answer = Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, ended, suspends=suspends)
    return remove_with_children(NAME, view, settings, now, answer)


RULE = Rule(
    name=NAME,
    summary="A finished workload with its own TTL is removed when that expires, whatever the policy's retention is.",
    shapes=(Shape.WORKLOAD,),
    states=(State.ENDED,),
    acts=True,
    yields_to=("stop_hold", "keep_alive", "live_children"),
    evaluate=evaluate,
    evaluator=evaluator,
)

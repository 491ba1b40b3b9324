"""The decision about one subject. Pure. Called once when planning and again just before acting.

The order of RULES is the precedence: an answer may suspend rules after it (a hold suspends idle, a workload's own TTL
outranks retention); the first rule that is due and not suspended decides.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.rule import Evaluator, Rule, not_holdable
from gpukeeper.lifecycle.rules import (
    build_cache,
    exemption,
    hold,
    idle,
    keep_alive,
    leftover_tree,
    live_children,
    max_runtime,
    never_started,
    orphan,
    own_ttl,
    restart_loop,
    retention,
    stop_hold,
    stuck_removal,
    taken_gpu,
    target,
    temporary_tree,
    unused_image,
    unused_network,
    unused_volume,
)
from gpukeeper.lifecycle.settings import Rulebook, Settings
from gpukeeper.lifecycle.warnings import not_before_announced
from gpukeeper.model.decision import Action, Answer, Decision, Step, Verdict, View
from gpukeeper.model.subject import Category, Hold, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

RULES: tuple[Rule, ...] = (
    target.RULE,
    exemption.RULE,
    hold.RULE,
    stuck_removal.RULE,
    stop_hold.RULE,
    max_runtime.RULE,
    keep_alive.RULE,
    restart_loop.RULE,
    live_children.RULE,
    taken_gpu.RULE,
    idle.RULE,
    never_started.RULE,
    own_ttl.RULE,
    retention.RULE,
    orphan.RULE,
    leftover_tree.RULE,
    temporary_tree.RULE,
    unused_image.RULE,
    build_cache.RULE,
    unused_volume.RULE,
    unused_network.RULE,
)
EVALUATORS = {rule.name: rule.among(RULES) for rule in RULES}
NOT_HELD = not_holdable(RULES)  # a user's hold does not suspend these


def _rules_for(shape: Shape, state: State | None) -> tuple[tuple[str, Evaluator], ...]:
    """In their order. None: in whatever state."""
    return tuple(
        (rule.name, EVALUATORS[rule.name])
        for rule in RULES
        if shape in rule.shapes and (state is None or state in rule.states)
    )


def _article(word: str) -> str:
    return "an" if word[0] in "aeio" else "a"


_APPLICABLE = {(shape, state): _rules_for(shape, state) for shape in Shape for state in (*State, None)}
_NOT_FOR = {
    shape: tuple((rule.name, Answer(rule.name, Verdict.SILENT, f"not for {_article(shape)} {shape}")) for rule in RULES)
    for shape in Shape
}
_NOTHING = Answer("none", Verdict.SILENT, "no rule applies to it")
NO_GRACE = timedelta()
REQUEST = "request"  # the rule of a step that a user requested
_RUNNING = (State.RUNNING, State.PAUSED)
_ENDS_CHILDREN = (Action.REMOVE, Action.TRIM)
_SILENT, _DUE, _WAIT, _REPORT = Verdict.SILENT, Verdict.DUE, Verdict.WAIT, Verdict.REPORT  # globals are read faster
_RANKS = {category: rank for rank, category in enumerate(Category)}
# When nothing is due, the decision names the most informative answer.
_WEIGHT = {Verdict.UNKNOWN: 4, Verdict.REPORT: 3, Verdict.PROTECT: 2, Verdict.WAIT: 1}


def decide(view: View, book: Rulebook, now: datetime) -> Decision:
    settings = book.settings(view.subject)
    subject = view.subject
    state = subject.state if isinstance(subject.state, State) else None
    suspended: frozenset[str] = frozenset()
    spared: frozenset[str] | None = None  # when every rule but these is suspended
    complaints: tuple[str, ...] = ()
    begins: Hold | None = None
    best = _NOTHING
    for name, evaluate in _APPLICABLE[subject.shape, state]:
        if name in suspended or (spared is not None and name not in spared):
            continue
        answer = evaluate(view, settings, now)
        verdict = answer.verdict
        if verdict is _SILENT:
            continue
        if answer.complaint is not None:
            complaints += (answer.complaint,)
        if verdict is _DUE:
            answer = not_before_announced(view, answer, now)
            if answer.verdict is _DUE:
                return _decision(subject, answer, complaints, settings)
        best = _with_due(_weightier(best, answer), answer)
        begins = answer.begins or begins
        if answer.suspends:
            if "*" not in answer.suspends:
                suspended |= answer.suspends
            elif answer.spares:
                spared = answer.spares if spared is None else spared & answer.spares
            else:
                break
    return _decision(subject, best, complaints, settings, begins)


def answers(view: View, book: Rulebook, now: datetime, but: str = "") -> tuple[Answer, ...]:
    """The answers of all rules, suspended or not; `explain` shows them. `but`: this rule is not asked."""
    settings, shape = book.settings(view.subject), view.subject.shape
    given = {
        name: not_before_announced(view, evaluate(view, settings, now), now)
        for name, evaluate in _APPLICABLE[shape, None]
        if name != but
    }
    return tuple([given.get(name, silent) for name, silent in _NOT_FOR[shape]])


def still_holds(step: Step, fresh: View, book: Rulebook, now: datetime) -> str | None:
    """The condition for acting: a fresh read gives the same object, incarnation, rule and action.

    None when it holds, otherwise what changed, in words.
    """
    planned, seen = step.decision, fresh.subject.seen
    if seen.ref.key != planned.seen.ref.key:
        return "it is no longer the same object"
    if seen.incarnation != planned.seen.incarnation:
        return "it was restarted since the plan was made"
    if planned.rule == REQUEST:
        # A user requested it. No rule has to be due, but it must still be ours to act on.
        settings = book.settings(fresh.subject)
        standing = target.evaluate(fresh, settings, now)
        if standing.verdict is not Verdict.SILENT:
            return standing.reason
        return None if step.uid is None else why_not_yet(fresh, settings, now)
    again = decide(fresh, book, now)
    if (again.rule, again.action, again.stage) != (planned.rule, planned.action, planned.stage):
        return again.reason if again.action is Action.KEEP else f"now {again.action} by {again.rule}: {again.reason}"
    return None


def why_not_yet(view: View, settings: Settings, now: datetime) -> str | None:
    """Why a tree is not removed at the request of its owner. A user may skip the mode and the threshold of the policy,
    but not its roots, ages and conditions. None: nothing prevents it, or it is no tree."""
    if view.subject.shape is not Shape.TREE:
        return None
    rule = temporary_tree if view.subject.category is Category.TEMPORARY else leftover_tree
    answer = rule.on_request(view, settings, now)
    return None if answer.verdict is Verdict.DUE else f"the policy does not allow its removal yet: {answer.reason}"


def _weightier(best: Answer, answer: Answer) -> Answer:
    if best is _NOTHING:
        return answer
    if answer.verdict is _WAIT and best.verdict is _WAIT:
        return answer if answer.due and best.due and answer.due < best.due else best
    return answer if _WEIGHT[answer.verdict] > _WEIGHT[best.verdict] else best


def _with_due(best: Answer, answer: Answer) -> Answer:
    """What is only reported may still be due by another rule, and is decided again then."""
    if best.verdict is _REPORT and best.due is None and answer.verdict is _WAIT:
        return msgspec.structs.replace(best, due=answer.due)
    return best


def _decision(
    subject: Subject, answer: Answer, complaints: tuple[str, ...], settings: Settings, begins: Hold | None = None
) -> Decision:
    devices, limits = subject.devices, settings.limits
    return Decision(
        seen=subject.seen,
        action=answer.action,
        rule=answer.rule,
        reason=answer.reason if settings.divisor == 1 else f"{answer.reason} (times divided by {settings.divisor})",
        verdict=answer.verdict,
        due=answer.due,
        since=answer.since,
        stage=answer.stage,
        limit=answer.limit,
        then=answer.then,
        grace=NO_GRACE if isinstance(limits, Unknown) else limits.stop_grace,
        running=subject.state in _RUNNING or (answer.action in _ENDS_CHILDREN and subject.live_children != 0),
        owner=subject.owner if isinstance(subject.owner, str) else None,
        gpus=devices if isinstance(devices, Unknown) else len(devices),
        size=subject.size,
        complaints=complaints,
        begins=begins,
        rank=_RANKS[subject.category],
        disk=subject.disk_name if answer.pressed else "",
        owner_verified=subject.owner_verified,
        class_=settings.class_name,
        announced=answer.announced,
        unheard=answer.unheard,
    )

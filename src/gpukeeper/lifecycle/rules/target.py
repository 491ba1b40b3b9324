"""Whether gpukeeper may act on it at all: in scope, a root, in a known state, not managed by another tool."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache, partial

from gpukeeper.lifecycle.rule import Evaluator, Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import EVERY_RULE, Answer, Verdict, View
from gpukeeper.model.policy import WITHOUT_GPU, Policy
from gpukeeper.model.subject import Ref, Shape, State
from gpukeeper.model.unknown import Unknown

NAME = "target"

_ONLY_SHOWN = (Shape.DEVICE, Shape.NODE, Shape.REMNANT)
_FINE = Answer(NAME, Verdict.SILENT, "in scope, a root, and not managed by another tool")


def evaluator(rules: Sequence[Rule]) -> Evaluator:
    return partial(evaluate, while_removed=frozenset(rule.name for rule in rules if rule.while_removed))


def evaluate(view: View, settings: Settings, now: datetime, while_removed: frozenset[str] = frozenset()) -> Answer:
    subject = view.subject
    if settings.kept or not in_scope(settings.policy, subject.ref):
        return _leave(settings.kept or "outside the policy's scope")
    if subject.shape in _ONLY_SHOWN:
        return _leave(f"a {subject.shape} is shown, never acted on")
    if subject.root is not None:
        if isinstance(subject.root, Unknown):
            return _unknown(f"its root is unknown ({subject.root.why})")
        return _leave(f"part of {subject.root}; only the root is acted on")
    if subject.marks.managed_elsewhere is not None:
        return _leave(f"managed by {subject.marks.managed_elsewhere}")
    if isinstance(subject.state, Unknown):
        return _unknown(f"its state is unknown ({subject.state.why})")
    if isinstance(settings.untouchable, Unknown):
        return _unknown(f"its class is unknown ({settings.untouchable.why}), and some classes are never touched")
    if settings.untouchable:
        if settings.class_name == WITHOUT_GPU:
            return _leave("it uses no GPU; its class is never touched")
        return _leave(f"class {settings.class_name} is never touched")
    if subject.state is State.REMOVING:
        return Answer(
            NAME, Verdict.PROTECT, "its removal is already in progress", suspends=EVERY_RULE, spares=while_removed
        )
    if isinstance(subject.needed, Unknown):
        return _unknown(subject.needed.why)
    if subject.needed is not None:
        return _leave(subject.needed)
    return _FINE


RULE = Rule(
    name=NAME,
    summary="Only roots inside the policy's scope are acted on; what another tool manages or needs is skipped.",
    shapes=tuple(Shape),
    acts=False,
    evaluate=evaluate,
    evaluator=evaluator,
)


def in_scope(policy: Policy, ref: Ref) -> bool:
    scope = policy.scope.get(ref.platform)
    if scope is None or not _fits_any(ref.place, scope.places):
        return False
    return not ref.namespace or _fits_any(ref.namespace, scope.namespaces)


@lru_cache(maxsize=4096)
def _fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _leave(reason: str) -> Answer:
    return Answer(NAME, Verdict.PROTECT, reason, suspends=EVERY_RULE)


def _unknown(reason: str) -> Answer:
    return Answer(NAME, Verdict.UNKNOWN, reason, suspends=EVERY_RULE)

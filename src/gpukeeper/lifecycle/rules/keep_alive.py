"""A keep-alive file inside a workload requests a lease. gpukeeper sets its end: touching the file changes nothing.

The lease begins when another rule is due, lasts as long as a hold may, and counts as one. A second lease requires
measured GPU use after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from gpukeeper.lifecycle.activity import active_minutes
from gpukeeper.lifecycle.rule import Evaluator, Rule, yielding
from gpukeeper.lifecycle.rules import exemption, hold
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import EVERY_RULE, Action, Answer, Verdict, View
from gpukeeper.model.policy import ClassSettings
from gpukeeper.model.subject import KEEP_ALIVE, Hold, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

NAME = "keep_alive"

RENEWED_BY = timedelta(minutes=30)  # of measured GPU use after the last lease
WARNED_BEFORE = (timedelta(minutes=60), timedelta(minutes=10))
UNOWNED = "unknown"  # the class of what has no known owner
Others = tuple[tuple[str, Evaluator], ...]
_ENDED = (State.CREATED, State.ENDED)
_NONE = Answer(NAME, Verdict.SILENT, "no keep-alive file")
_NOT_YET = Answer(NAME, Verdict.SILENT, "a keep-alive file exists; its lease begins when a rule is due")
_NOBODYS = Answer(NAME, Verdict.SILENT, "a keep-alive file exists, but the workload has no known owner")


def evaluator(rules: Sequence[Rule]) -> Evaluator:
    return partial(evaluate, others=tuple((rule.name, rule.among(rules)) for rule in yielding(rules, NAME)))


def evaluate(view: View, settings: Settings, now: datetime, others: Others = ()) -> Answer:
    """`others`: what it protects from, in their order, behind what may suspend them. Never the maximum runtime."""
    mark = view.subject.marks.keep_alive
    if mark is None and not view.memory.holds:
        return _NONE  # nearly everything, and quickly
    lease = running_lease(view, settings, now)
    if lease is not None:
        return _protect(lease, view, settings, now, others)
    if mark is None or mark is False:
        return _NONE
    if view.subject.owner is None or settings.class_ == UNOWNED:
        return _NOBODYS
    if not _would_be_due(view, settings, now, others):
        return _NOT_YET
    begins = _begin(view, settings, now)
    if isinstance(begins, str):
        return Answer(NAME, Verdict.SILENT, f"the keep-alive file is ignored: {begins}")
    if isinstance(mark, Unknown):
        return _unknown(f"whether a keep-alive file exists is unknown ({mark.why}); kept until it is fixed")
    if isinstance(view.subject.owner, Unknown):
        return _unknown(
            f"a keep-alive file exists, and the owner of the workload is unknown ({view.subject.owner.why})"
        )
    reason = f"kept by a keep-alive file for {in_words(begins.until - now)} from now on"
    return Answer(NAME, Verdict.PROTECT, reason, due=begins.until, suspends=EVERY_RULE, begins=begins)


RULE = Rule(
    name=NAME,
    summary="A keep-alive file requests a hold (24h), never beyond max runtime; another one needs measured GPU use.",
    shapes=(Shape.WORKLOAD,),
    acts=False,
    evaluate=evaluate,
    evaluator=evaluator,
)


def running_lease(view: View, settings: Settings, now: datetime) -> Hold | None:
    return next((h for h in view.memory.holds if h.by == KEEP_ALIVE and now < hold.end_of(h, settings)), None)


def _protect(lease: Hold, view: View, settings: Settings, now: datetime, others: Others) -> Answer:
    ends = hold.end_of(lease, settings)
    reason = f"kept by a keep-alive file for {in_words(ends - now)} more"
    length = ends - lease.at
    sent = [w for w in view.memory.warnings if w.rule == NAME and w.limit == length and lease.at <= w.at <= now]
    stage = max((w.stage for w in sent), default=0)
    near = stage < len(WARNED_BEFORE) and now >= ends - WARNED_BEFORE[stage]
    if near and _would_be_due(view, settings, now, others):
        then = Action.REMOVE if view.subject.state in _ENDED else Action.STOP
        words = f"{reason}; then the usual limits apply again. A new lease needs {in_words(RENEWED_BY)} of GPU use"
        at = ends - WARNED_BEFORE[stage]
        return Answer(NAME, Verdict.DUE, words, Action.WARN, at, lease.at, stage=stage + 1, limit=length, then=then)
    return Answer(NAME, Verdict.PROTECT, reason, due=ends, suspends=EVERY_RULE)


def _would_be_due(view: View, settings: Settings, now: datetime, others: Others) -> bool:
    suspended = exemption.evaluate(view, settings, now).suspends
    for name, other in others:
        if name in suspended or "*" in suspended:
            continue
        answer = other(view, settings, now)
        if answer.verdict is Verdict.DUE:
            return True
        suspended |= answer.suspends
    return False


def _begin(view: View, settings: Settings, now: datetime) -> Hold | str:
    """The lease that begins now, or why none does."""
    left = hold.left_to_hold(view, settings.policy, now)
    if isinstance(left, str):
        return left
    devices = view.subject.devices if isinstance(view.subject.devices, tuple) else ()
    last = max((h.until for h in view.memory.holds if h.by == KEEP_ALIVE), default=None)
    if last is not None:
        used = active_minutes(view.series, devices, settings.policy.activity, last)
        if used < RENEWED_BY:
            return (
                f"its last lease ended {in_words(now - last)} ago, and a new one needs {in_words(RENEWED_BY)} of "
                f"measured GPU use since then; {in_words(used)} measured. Use it, or ask an admin"
            )
    longest = ClassSettings().hold if isinstance(settings.limits, Unknown) else settings.limits.hold
    return Hold(KEEP_ALIVE, now, now + min(longest, left), "a keep-alive file", devices=devices)


def _unknown(why: str) -> Answer:
    return Answer(NAME, Verdict.UNKNOWN, why, suspends=EVERY_RULE, complaint=why)

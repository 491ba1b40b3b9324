"""Somebody asked to keep it: through `workload hold` or a mark on the workload. Within a limit, never for ever."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import EVERY_RULE, Answer, Verdict, View
from gpukeeper.model.durations import in_words
from gpukeeper.model.memory import KEEP_ALIVE, Hold
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown, is_known

NAME = "hold"
SAYS = "A user's hold suspends idle and every removal, never max runtime; an admin's hold names what it suspends."
FOR = tuple(Shape)
ACTS = False

YEAR = timedelta(days=365)
NOT_SUSPENDED = frozenset({"max_runtime"})  # a hold must not make work immortal
_NONE = Answer(NAME, Verdict.SILENT, "nobody holds it")


def ask(view: View, settings: Settings, now: datetime) -> Answer:
    mark = view.subject.marks.hold_until
    if mark is None and not view.memory.holds:
        return _NONE
    # A keep-alive lease has a rule of its own, which warns before its end.
    held = [hold for hold in view.memory.holds if hold.by != KEEP_ALIVE and end_of(hold, settings) > now]
    if isinstance(mark, datetime) and (until := min(mark, _latest(view.subject, settings))) > now:
        held.append(Hold("its own mark", now, until))
    if isinstance(mark, Unknown):
        why = f"its hold mark cannot be read ({mark.why}); kept until somebody mends it"
        suspends, spares = _suspended([*held, Hold("its own mark", now, now)])
        return Answer(NAME, Verdict.UNKNOWN, why, suspends=suspends, spares=spares, complaint=why)
    if not held:
        return _NONE
    suspends, spares = _suspended(held)
    longest = max(held, key=lambda hold: hold.until)
    left = end_of(longest, settings) - now
    reason = f"held by {longest.by} " + (f"for {in_words(left)} more" if left < YEAR else "until that is taken off")
    reason += f": {longest.reason}" if longest.reason else ""
    return Answer(NAME, Verdict.PROTECT, reason, suspends=suspends, spares=spares)


def end_of(hold: Hold, settings: Settings) -> datetime:
    """A user's hold never outlasts the class's limit, whatever was written."""
    if hold.admin or isinstance(settings.limits, Unknown):
        return hold.until
    return min(hold.until, hold.at + settings.limits.hold) if hold.by != "its own mark" else hold.until


def _suspended(held: list[Hold]) -> tuple[frozenset[str], frozenset[str]]:
    """What all holds together suspend, and what they spare. Only an admin's hold can name rules."""
    named = frozenset(rule for hold in held if hold.admin for rule in hold.suspends)
    if "*" in named:
        return EVERY_RULE, frozenset()
    if all(hold.admin and hold.suspends for hold in held):
        return named, frozenset()
    if named >= NOT_SUSPENDED:
        return EVERY_RULE, frozenset()
    return EVERY_RULE, NOT_SUSPENDED


def _latest(subject: Subject, settings: Settings) -> datetime:
    """A mark on the object can be renewed by anyone who may write it; retention.max after its end bounds it."""
    longest = settings.retention.max if is_known(settings.retention) else timedelta(days=3650)
    begun = next((at for at in (subject.ended, subject.started, subject.created) if at is not None), None)
    # The time that bounds it is not known, so nothing bounds it.
    return begun + longest if isinstance(begun, datetime) else datetime.max.replace(tzinfo=subject.seen.at.tzinfo)

"""What happens next to one workload, when and on which condition, in words. Every page, command, reply uses it; pure.

Times in words are UTC; where people read them, they are shown in a zone of theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

import msgspec

from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.forecast import STAYS_IDLE, Opens, UpcomingAction, ahead
from gpukeeper.lifecycle.rules import idle
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Verdict, View
from gpukeeper.model.durations import SOON, due_in_words, in_words
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown

NOT_UNATTENDED = "The policy's mode is plan: nothing is warned about, stopped or removed unattended."
_DONE = {
    "": "checked again",
    Action.WARN: "warned",
    Action.STOP: "stopped",
    Action.TRIM: "trimmed",
    Action.REMOVE: "deleted",
    Action.RELEASE: "released",
}


class NextStep(msgspec.Struct, frozen=True):
    """`action`: empty where only the rule is known. `at`: None: at the next pass. `provided` and `would`: as in
    UpcomingAction."""

    action: str
    at: datetime | None
    rule: str
    provided: str = ""
    would: bool = False


class NextActions(msgspec.Struct, frozen=True):
    """`reason`: what the rule of these steps answers now; empty if there are none."""

    class_: str | Unknown
    steps: tuple[NextStep, ...]
    reason: str = ""


def next_actions(view: View, book: Rulebook, now: datetime, offered: Collection[Action], opens: Opens) -> NextActions:
    coming, decision = ahead(view, book, now, offered, opens), decide(view, book, now)
    return as_next(coming, decision, view.subject.class_, now, would=book.policy.mode is Mode.PLAN)


def as_next(
    coming: Sequence[UpcomingAction],
    decision: Decision,
    class_: str | Unknown,
    now: datetime,
    *,
    would: bool,
    offered: bool = False,
) -> NextActions:
    """`class_`: as its platform recognized it. What another rule could not determine is named, too. Without a forecast
    the decision is what is known. `offered`: its place can do what was decided."""
    act = next((one for one in coming if one.action is not Action.WARN), coming[-1] if coming else None)
    unknown = decision.verdict is Verdict.UNKNOWN and act is not None and decision.rule != act.rule
    reason = f"{act.currently}{f'; {decision.reason}' if unknown else ''}" if act is not None else ""
    steps = next_steps(coming, now)
    if not steps and (offered or decision.action is Action.KEEP):
        steps = steps_of(decision, now, would=would)
        reason = decision.reason if steps else ""
    return NextActions(decision.class_ or class_, steps, reason)


def steps_of(decision: Decision, now: datetime, *, would: bool) -> tuple[NextStep, ...]:
    """As far as it follows from a decision alone: what it does, and what a warning announces."""
    provided = STAYS_IDLE if decision.rule == idle.NAME and decision.running else ""
    if decision.action is not Action.KEEP:
        first = NextStep(decision.action.value, None, decision.rule, provided, would)
        if decision.action is not Action.WARN or decision.then is Action.KEEP:
            return (first,)
        return (first, NextStep(decision.then.value, decision.announced, decision.rule, provided, would))
    if decision.verdict is Verdict.WAIT and decision.due is not None and decision.due > now:
        return (NextStep("", decision.due, decision.rule),)
    return ()


def next_steps(coming: Iterable[UpcomingAction], now: datetime) -> tuple[NextStep, ...]:
    return tuple(
        NextStep(one.action.value, one.at if one.at > now else None, one.rule, one.provided, one.would)
        for one in coming
    )


class Phrase(msgspec.Struct, frozen=True):
    """One step as a part of a sentence: what joins it, what is done, and when (None: at the next pass)."""

    join: str
    words: str
    at: datetime | None


def phrases(steps: Sequence[NextStep]) -> list[Phrase]:
    """The first step and the acts, as one sentence. A condition comes first, so that it is not what is cut off."""
    found: list[Phrase] = []
    before: NextStep | None = None
    for one in (*steps[:1], *(one for one in steps[1:] if one.action != Action.WARN)):
        known = "" if before is None else before.provided
        condition = "" if one.provided == known else f"if {one.provided}, " if one.provided else "in any case "
        begin = "" if found else "would be " if one.would and one.action else "will be "
        if before is not None and (before.action, before.at) == (Action.STOP, one.at):
            found[-1] = msgspec.structs.replace(found[-1], words=f"{found[-1].words}, then {done_word(one.action)}")
        else:
            found.append(Phrase((", then " if found else "") + condition, begin + done_word(one.action), one.at))
        before = one
    return found


def act_of(steps: Sequence[NextStep]) -> NextStep | None:
    """What the warnings are about. None: nothing comes."""
    return next((one for one in steps if one.action != Action.WARN), steps[-1] if steps else None)


def done_word(action: str) -> str:
    """ "stopped" of "stop"."""
    return _DONE[action]


def coming_in_words(steps: Sequence[NextStep], now: datetime) -> str:
    """ "if it stays idle, will be warned at 2026-03-02 09:30 UTC (in 1h), then stopped at …". Empty: nothing comes."""
    return "".join(f"{one.join}{one.words} {due_in_words(one.at or now, now)}" for one in phrases(steps))


def coming_in_brief(steps: Sequence[NextStep], now: datetime) -> str:
    """With distances alone, for a picture that changes while it is read."""
    return "".join(
        f"{one.join}{one.words} {SOON if one.at is None or one.at <= now else f'in {in_words(one.at - now)}'}"
        for one in phrases(steps)
    )

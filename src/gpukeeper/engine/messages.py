"""Messages about what a pass records and reports, for owners and for admins. Pure: composes messages, sends none."""

from __future__ import annotations

import shlex

import msgspec

from gpukeeper.engine.ports import place_name
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.lifecycle.decide import REQUEST
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Complaint, Event, GpuChecked, NodeTested, Passed, Quarantined, WarningSent
from gpukeeper.model.gpu import CheckResult, Grade
from gpukeeper.model.policy import Mode
from gpukeeper.model.ports import Message, MessageKind

AFTER_REMOVAL = "Once it was deleted, it comes back without what was written inside it; mounted volumes stay."


def stopped_message(line: Event) -> Message | None:
    """Its running work was stopped, and how to bring it back. None: it was not, or the owner requested the stop."""
    match line:
        case Closed(action=Action.STOP, result=Result.RECLAIMED, ref=ref) if ref is not None and _is_news(line):
            back = f"To bring it back: gpukeeper restore {shlex.quote(ref.path)}. {AFTER_REMOVAL}"
            return Message(
                kind=MessageKind.STOPPED,
                about=ref.path,
                text=f"{ref.path} was stopped: {line.reason}. {back}",
                at=line.at,
                key=line.step,
                owner=line.owner,
                ref=ref,
            )
        case _:
            return None


def _is_news(line: Closed) -> bool:
    """Lines of earlier versions do not contain who requested a step."""
    return line.rule != REQUEST or line.requested_by not in (line.owner, msgspec.UNSET)


def notice_again(line: WarningSent) -> Message:
    """Of a notice that was recorded and not sent."""
    about = "" if line.ref is None else line.ref.path
    return Message(kind=MessageKind.NOTICE, about=about, text=line.message, at=line.at, owner=line.owner, ref=line.ref)


def for_admins(line: Event) -> Message | None:
    """None: this line is nothing for admins."""
    match line:
        case Complaint(ref=None):
            return Message(kind=MessageKind.FAILURE, about="", text=line.what, at=line.at, key=line.what)
        case Complaint(ref=ref) if ref is not None:
            key = f"{ref.key} {line.what}"
            text = f"{ref.path}: {line.what}"
            return Message(kind=MessageKind.COMPLAINT, about=ref.path, text=text, at=line.at, key=key, ref=ref)
        case Quarantined(ref=ref) if ref is not None:
            text = f"{ref.path} is quarantined: {line.reason}"
            return Message(kind=MessageKind.GPU, about=ref.path, text=text, at=line.at, key=ref.key)
        case GpuChecked(ref=ref, result=CheckResult.DIRTY | CheckResult.RESET_FAILED) if ref is not None:
            text = f"{ref.path} is not clean: {line.reason}"
            return Message(kind=MessageKind.GPU, about=ref.path, text=text, at=line.at, key=f"{ref.key} dirty")
        case NodeTested(ref=ref, verdict=Grade.FAIL) if ref is not None:
            text = f"{ref.path} failed its acceptance run {line.run}: {line.reason}"
            return Message(kind=MessageKind.ACCEPTANCE, about=ref.path, text=text, at=line.at, key=line.run)
        case Passed(breaker=str()):
            place = f"{line.platform}/{line.place}"
            text = f"{place}: the breaker is open and nothing is touched there. {line.breaker}"
            return Message(kind=MessageKind.BREAKER, about=place, text=text, at=line.at, key=place)
        case _:
            return None


def breaker_closed(line: Event) -> str | None:
    """The place where it is closed: the next time it opens is news."""
    return f"{line.platform}/{line.place}" if isinstance(line, Passed) and line.breaker is None else None


def overdue_message(report: PassReport, mode: Mode) -> Message | None:
    """In mode plan due work stays where it is, and an admin may believe that it is being handled."""
    found = report.survey
    number = sum(one.action is not Action.WARN for one in found.due)
    if mode is not Mode.PLAN or not found.whole or not number or report.stopped is not None:
        return None
    place = place_name(found.platform)
    then = "Details: gpukeeper plan. To apply: gpukeeper apply."
    text = f"{place}: {number} due, not applied because the mode is plan. {then}"
    return Message(kind=MessageKind.OVERDUE, about=place, text=text, at=found.at, key=place)

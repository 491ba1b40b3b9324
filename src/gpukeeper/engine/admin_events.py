"""Events for admins, from what a pass records and reports. Pure: composes messages, sends none."""

from __future__ import annotations

from gpukeeper.engine.reclaim import PassReport
from gpukeeper.model.condition import CheckResult
from gpukeeper.model.decision import Action
from gpukeeper.model.event import Complaint, Event, GpuChecked, NodeTested, Passed, Quarantined
from gpukeeper.model.grade import Grade
from gpukeeper.model.message import Message, MessageKind
from gpukeeper.model.policy import Mode


def message_of(line: Event) -> Message | None:
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


def overdue(report: PassReport, mode: Mode) -> Message | None:
    """In mode plan due work stays where it is, and an admin may believe that it is being handled."""
    found = report.survey
    number = sum(one.action is not Action.WARN for one in found.due)
    if mode is not Mode.PLAN or not found.whole or not number or report.stopped is not None:
        return None
    place = f"{found.platform.name}/{found.platform.place}"
    then = "Details: gpukeeper plan. To apply: gpukeeper apply."
    text = f"{place}: {number} due, not applied because the mode is plan. {then}"
    return Message(kind=MessageKind.OVERDUE, about=place, text=text, at=found.at, key=place)

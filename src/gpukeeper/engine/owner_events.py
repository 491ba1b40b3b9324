"""Events for owners, from what a pass records. Pure: composes messages, sends none."""

from __future__ import annotations

import shlex

import msgspec

from gpukeeper.lifecycle.decide import REQUEST
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, WarningSent
from gpukeeper.model.message import Message, MessageKind

AFTER_REMOVAL = "Once it was deleted, it comes back without what was written inside it; mounted volumes stay."


def stopped(line: Event) -> Message | None:
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

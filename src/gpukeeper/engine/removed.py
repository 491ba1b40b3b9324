"""The message about something that gpukeeper removed: when, why, and how to restore it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event


def not_there(problem: str, lines: Sequence[Event], book: Rulebook, now: datetime) -> str:
    """`problem`, or the more exact reason from the ledger."""
    gone = [
        one
        for one in lines
        if isinstance(one, Closed) and one.result is Result.RECLAIMED and one.action is Action.REMOVE and one.ref
    ]
    if not gone:
        return problem
    last = gone[-1]
    assert last.ref is not None
    kept = last.at + book.policy.capture.keep
    back = f"Restore it: gpukeeper restore {last.ref.path} (until {kept:%Y-%m-%d %H:%M} UTC, as far as it was captured)"
    was = f"{last.ref.path} was removed by gpukeeper at {last.at:%Y-%m-%d %H:%M} UTC: {last.reason}"
    return f"{was}. {back}" if kept > now else was

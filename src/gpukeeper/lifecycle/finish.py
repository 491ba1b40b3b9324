"""When a workload ended (as reported by its platform, else when it was first observed as ended), and how, in words."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.model.decision import View
from gpukeeper.model.durations import in_words
from gpukeeper.model.subject import Subject

AGAIN = 2  # ends under one identity
REMOVE = "gpukeeper workload remove"


def comes_back(view: View) -> str:
    """A clause about what ends and runs again under one identity: each end starts a new count, so no time can be
    given."""
    ends = view.memory.ends_seen
    if not view.subject.ends_for_good or ends < AGAIN:
        return ""
    what = f"it ended {ends} times and was restarted, so this time may never come"
    return f"; {what}. Remove it: {REMOVE} {view.subject.ref.path}"


def finish_of(view: View, now: datetime) -> datetime:
    if isinstance(view.subject.ended, datetime):
        return view.subject.ended
    return view.memory.first_seen_ended or now


def ended_in_words(subject: Subject, word: str, ended: datetime, now: datetime) -> str:
    """succeeded 2d ago; failed with exit code 137, out of memory, 2d ago"""
    how = f" with {subject.ended_with}," if subject.ended_with else ""
    return f"{word}{how} {in_words(now - ended)} ago"

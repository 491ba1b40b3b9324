"""When a workload ended (as its platform says, else when we first saw it ended, which is later), and how, in words."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.model.decision import View
from gpukeeper.model.durations import in_words
from gpukeeper.model.subject import Subject


def finish_of(view: View, now: datetime) -> datetime:
    if isinstance(view.subject.ended, datetime):
        return view.subject.ended
    return view.memory.first_seen_ended or now


def ended_in_words(subject: Subject, word: str, ended: datetime, now: datetime) -> str:
    """succeeded 2d ago; failed with exit code 137, out of memory, 2d ago"""
    how = f" with {subject.ended_with}," if subject.ended_with else ""
    return f"{word}{how} {in_words(now - ended)} ago"

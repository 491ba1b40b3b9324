"""Whether an object has ended, its outcome, and when. Pure; `now` is the time of the server.

Read from the condition that its controller writes last, never from counts or age: a Job that succeeded after retries
has failed pods, and SuccessCriteriaMet and FailureTarget come before the end. An implausible time is Unknown; then the
rules count from when it was first seen ended, which is later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.subject import Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.wire import EPOCH, Meta, Root, StatusCondition, when

SKEW = timedelta(minutes=5)  # clocks of a cluster differ; beyond this a time is wrong
REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")


class Ending(msgspec.Struct, frozen=True):
    """`at` None: ended, and no time is recorded."""

    over: bool | Unknown = False
    outcome: Outcome | Unknown | None = None
    at: datetime | Unknown | None = None
    how: str = ""  # a short cause of a failure


NOT_ENDED = Ending()


def by_conditions(root: Root, succeeded: Sequence[str], failed: Sequence[str], now: datetime) -> Ending:
    """By the condition types that mark the end if their status is True."""
    conditions = [one for one in root.status.conditions or () if one.type in failed or one.type in succeeded]
    over = [one for one in conditions if one.status == "True"]
    if not over:
        odd = next((one for one in conditions if one.status != "False"), None)
        return NOT_ENDED if odd is None else Ending(Unknown(f"its condition {odd.type} is {odd.status[:20]!r}"))
    written = latest(one.last_transition_time for one in over)
    return Ending(
        over=True,
        # Both at once: it counts as what is kept longer.
        outcome=Outcome.FAILED if any(one.type in failed for one in over) else Outcome.SUCCEEDED,
        at=first_usable((written, when(root.status.completion_time)), root.metadata, now),
        how=next((_reason(one) for one in over if one.type in failed), ""),
    )


def _reason(condition: StatusCondition) -> str:
    """The reason that the controller gives, such as BackoffLimitExceeded; not one that only repeats the failure."""
    word = condition.reason
    return word if REASON.fullmatch(word) and not word.endswith("Failed") else ""


def usable(at: datetime | Unknown | None, meta: Meta, now: datetime) -> datetime | Unknown | None:
    """A plausible time: not in the future, and not before the creation."""
    if not isinstance(at, datetime):
        return at
    if at < EPOCH:
        return Unknown(f"{at.isoformat()} is not a plausible time")
    if at > now + SKEW:
        return Unknown(f"{at.isoformat()} is in the future")
    created = when(meta.creation_timestamp)
    if isinstance(created, datetime) and at < created - SKEW:
        return Unknown(f"{at.isoformat()} is before its creation")
    return at


def latest(times: Iterable[str | None]) -> datetime | Unknown | None:
    """Unknown if one of them cannot be read: it may be the latest."""
    found: datetime | None = None
    for text in times:
        at = when(text)
        if isinstance(at, Unknown):
            return at
        if at is not None and (found is None or at > found):
            found = at
    return found


def first_usable(times: Iterable[datetime | Unknown | None], meta: Meta, now: datetime) -> datetime | Unknown | None:
    """Otherwise, why the first recorded time is not usable."""
    why: Unknown | None = None
    for time in times:
        at = usable(time, meta, now)
        if isinstance(at, datetime):
            return at
        if why is None:
            why = at
    return why

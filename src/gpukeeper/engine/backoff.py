"""Steps that came to nothing are not tried again at once: what is refused now is refused in five minutes, too, and must
not keep everything behind it waiting. What is refused again for the same reason waits twice as long, up to a day.

Bounded: by the steps of the last two days.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpukeeper.model.decision import ACTING, Action, Decision, Result, Verdict
from gpukeeper.model.durations import in_words
from gpukeeper.model.event import Closed

BACK_OFF = timedelta(minutes=20)
LONGEST = timedelta(days=1)
_WITHOUT_EFFECT = (Result.REFUSED, Result.STILL_THERE, Result.NOT_CAPTURED)


class FailedStep(NamedTuple):
    """`wait`: before it is tried again."""

    at: datetime
    wait: timedelta
    refused: str  # why; empty: it was not refused


@dataclass
class BackOff:
    _failed: dict[str, FailedStep] = field(default_factory=dict)  # by key: the last step on it that came to nothing

    def note(self, line: Closed) -> None:
        assert line.ref is not None
        last = self._failed.pop(line.ref.key, None)
        if line.result in _WITHOUT_EFFECT:
            refused = line.reason if line.result is Result.REFUSED else ""
            again = last is not None and last.refused != "" and last.refused == refused
            again = again and last is not None and line.at - last.at < 2 * last.wait
            wait = min(2 * last.wait, LONGEST) if last is not None and again else BACK_OFF
            self._failed[line.ref.key] = FailedStep(line.at, wait, refused)

    def failed(self, key: str, now: datetime) -> FailedStep | None:
        """The step on it that came to nothing, while it is too early to try again."""
        last = self._failed.get(key)
        return last if last is not None and timedelta() <= now - last.at < last.wait else None

    def postponed(self, decision: Decision, now: datetime) -> Decision | None:
        """When it is tried again, and why not now. None: it is not postponed."""
        tried = self.failed(decision.seen.ref.key, now) if decision.action in ACTING else None
        if tried is None:
            return None
        how = f"was refused {in_words(now - tried.at)} ago ({tried.refused})" if tried.refused else ""
        how = how or f"failed {in_words(now - tried.at)} ago"
        return msgspec.structs.replace(
            decision,
            action=Action.KEEP,
            reason=f"{decision.reason}; a step on it {how}, retried after {in_words(tried.wait)}",
            verdict=Verdict.REPORT,
            stage=0,
            due=tried.at + tried.wait,
        )

    def forget(self, now: datetime) -> None:
        """A refusal is remembered for as long again as it waits: the next one may be the same."""
        self._failed = {
            key: one
            for key, one in self._failed.items()
            if timedelta() <= now - one.at < one.wait * (2 if one.refused else 1)
        }

    def keys(self) -> Iterable[str]:
        return self._failed.keys()

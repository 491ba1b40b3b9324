"""Steps that came to nothing are not tried again at once: what is refused now is refused in five minutes, too, and must
not keep everything behind it waiting.

Bounded: by the steps of the last BACK_OFF.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.model.decision import Result
from gpukeeper.model.event import Closed

BACK_OFF = timedelta(minutes=20)
_WITHOUT_EFFECT = (Result.REFUSED, Result.STILL_THERE, Result.NOT_CAPTURED)


@dataclass
class BackOff:
    _failed: dict[str, datetime] = field(default_factory=dict)  # by key: when a step on it last came to nothing

    def note(self, line: Closed) -> None:
        assert line.ref is not None
        self._failed.pop(line.ref.key, None)
        if line.result in _WITHOUT_EFFECT:
            self._failed[line.ref.key] = line.at

    def failed_at(self, key: str, now: datetime) -> datetime | None:
        """When a step on it came to nothing, while it is too early to try again."""
        at = self._failed.get(key)
        return at if at is not None and _is_recent(at, now) else None

    def forget(self, now: datetime) -> None:
        self._failed = {key: at for key, at in self._failed.items() if _is_recent(at, now)}

    def keys(self) -> Iterable[str]:
        return self._failed.keys()


def _is_recent(at: datetime, now: datetime) -> bool:
    return timedelta() <= now - at < BACK_OFF

"""Which messages to admins are sent: not the same one all the time, and not too many of all. Pure: `now` is given."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec

from gpukeeper.model.message import Message

AGAIN = timedelta(days=1)  # what repeats is sent again after this
HOUR = timedelta(hours=1)
PER_HOUR = 30
REMEMBERED = 1000  # kinds and keys


@dataclass
class Repeats:
    _sent: dict[tuple[str, str], float] = field(default_factory=dict)  # by kind and key: when; in that order
    _lately: deque[float] = field(default_factory=deque)
    _left_out: int = 0

    def admit(self, message: Message, now: float) -> Message | None:
        """The message as it is sent; None: not now. `now` in seconds of a steady clock."""
        what = (message.kind.value, message.key)
        last = self._sent.get(what)
        if last is not None and now - last < AGAIN.total_seconds():
            return None
        while self._lately and now - self._lately[0] >= HOUR.total_seconds():
            self._lately.popleft()
        if len(self._lately) >= PER_HOUR:
            self._left_out += 1  # not noted as sent: it may come later
            return None
        self._lately.append(now)
        self._sent.pop(what, None)
        self._sent[what] = now
        while len(self._sent) > REMEMBERED:
            del self._sent[next(iter(self._sent))]
        left_out, self._left_out = self._left_out, 0
        if not left_out:
            return message
        more = f" ({left_out} other messages were not sent; see `gpukeeper ledger list`.)"
        return msgspec.structs.replace(message, text=message.text + more)

    def note(self, kind: str, key: str, at: float) -> None:
        """Sent at this time, by an earlier process."""
        self._sent.setdefault((kind, key), at)

    def over(self, kind: str, key: str) -> None:
        """It is not so any more: the next time is news."""
        self._sent.pop((kind, key), None)

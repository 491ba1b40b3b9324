"""Whether a daemon runs, and since when it has watched without interruption."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass
class Uptime:
    serving: bool = False  # a daemon: checks of GPUs go on beside the next pass
    watched_from: float | None = None  # steady time of its start, or of when it last stood still
    measured_apart: float | None = None  # seconds between the last two measurements of running work

    def begin(self, steady: float) -> None:
        self.serving, self.watched_from = True, steady

    def watched_since(self, now: datetime) -> datetime | None:
        """By the steady clock, so that a wrong clock at the start of a daemon makes no warning valid again."""
        if self.watched_from is None:
            return None
        return now - timedelta(seconds=asyncio.get_running_loop().time() - self.watched_from)

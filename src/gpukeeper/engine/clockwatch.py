"""Can the clock be trusted? Every age is wrong after a jump, so nothing is acted on for a while.

The wall clock is compared with the steady one of the event loop at every question: at the beginning of a pass, before
each step, and once more just before acting. A jump while gpukeeper did not run shows only as a long silence of the
ledger, which is therefore distrusted at the start, too.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from gpukeeper.engine.ports import Ledger
from gpukeeper.model.durations import in_words

JUMP = timedelta(minutes=2)
SETTLE = timedelta(minutes=15)  # after a jump, or after a long silence
SILENCE = timedelta(hours=1)
BEHIND = timedelta(minutes=2)


class ClockWatch:
    def __init__(self) -> None:
        self._wall: datetime | None = None
        self._steady = 0.0
        self._until = float("-inf")

    def doubt(self, wall: datetime) -> str | None:
        """Why ages cannot be trusted now; None when they can. `wall`: the time of the clock."""
        steady = asyncio.get_running_loop().time()
        if self._wall is not None:
            jumped = (wall - self._wall) - timedelta(seconds=steady - self._steady)
            if abs(jumped) > JUMP:
                self._until = steady + SETTLE.total_seconds()
        self._wall, self._steady = wall, steady
        if steady < self._until:
            left = timedelta(seconds=self._until - steady)
            return f"The clock jumped, so ages are not trusted for {in_words(left)} more"
        return None

    async def settle_in(self, wall: datetime, ledger: Ledger) -> None:
        """For a daemon that starts: was it stopped, or is the clock wrong? That is unknown, so it waits a moment.

        A gap that ended a moment ago counts, too: the daemon that detected the jump may have crashed since.
        """
        self._wall, self._steady = wall, asyncio.get_running_loop().time()  # a jump from now on shows
        recent = wall - SETTLE
        before = await ledger.last_line_at(recent)
        if before is not None and recent - before > SILENCE:
            self._until = self._steady + SETTLE.total_seconds()


def behind_the_ledger(now: datetime, last_line: datetime | None) -> str | None:
    """A clock behind our own ledger has jumped."""
    if last_line is not None and now < last_line - BEHIND:
        return f"The clock shows {now:%Y-%m-%d %H:%M}, but the newest ledger line is of {last_line:%Y-%m-%d %H:%M}"
    return None

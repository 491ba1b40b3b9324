"""Can the clock be trusted? Every age is wrong after a jump, so nothing is acted on for a while.

The wall clock is compared with the steady one of the event loop at every question: at the beginning of a pass, before
each step, and once more just before acting. The steady clock is the machine's, from its boot on: what is recorded in
the ledger lets the next process of the same boot see a jump that happened before it began, and continue a doubt.

After a reboot there is nothing to compare with. A doubt that was not over starts again. A machine that seems to
have been off for long is doubted: a clock that was set ahead looks the same.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from gpukeeper.engine.ports import Ports
from gpukeeper.model.durations import in_words
from gpukeeper.model.memory import ClockRecord

JUMP = timedelta(minutes=2)
SETTLE = timedelta(minutes=15)  # after a jump, or after a long silence
SILENCE = timedelta(minutes=30)
BEHIND = timedelta(minutes=2)
DRIFT = timedelta(seconds=30)  # many small corrections are no jump: the record follows them


class ClockWatch:
    def __init__(self) -> None:
        self._zero: datetime | None = None  # what the clock showed when the steady one was 0
        self._until = float("-inf")
        self._recorded: ClockRecord | None = None  # of this boot
        self._recalled = False
        self._rebooted = False
        self._watched = False

    def doubt(self, wall: datetime) -> str | None:
        """Why ages cannot be trusted now; None when they can. `wall`: the time of the clock."""
        steady = asyncio.get_running_loop().time()
        zero = wall - timedelta(seconds=steady)
        if self._zero is not None and abs(zero - self._zero) > JUMP:
            self._begin(steady)
        self._zero = zero
        if steady < self._until:
            left = timedelta(seconds=self._until - steady)
            return f"The clock jumped, so ages are not trusted for {in_words(left)} more"
        return None

    async def recall(self, ports: Ports) -> None:
        """Once, before the first question: what earlier processes recorded."""
        if self._recalled:
            return
        records, steady = await ports.ledger.clock_records(), asyncio.get_running_loop().time()
        mine = self._recorded = records.get(ports.boot) if ports.boot else None
        self._rebooted = bool(ports.boot) and any(boot != ports.boot for boot in records)
        if mine is not None:
            if self._zero is not None and abs(self._zero - mine.zero) > JUMP:
                self._begin(steady)  # it was asked before it knew this
            self._zero = self._zero or mine.zero
            self._watched = mine.watched
            if mine.doubted_until is not None:
                # Not more than a whole time: a machine that was reset to a snapshot has an older steady clock.
                self._until = max(self._until, min(mine.doubted_until, steady + SETTLE.total_seconds()))
        elif records and list(records.values())[-1].doubted_until is not None:
            self._begin(steady)
        self._recalled = True

    async def settle_in(self, ports: Ports) -> None:
        """For a daemon that begins, the first one of this boot: was the machine off, or is the clock wrong? That is
        unknown, so it waits a moment. Reads only; the next pass records it."""
        await self.recall(ports)
        wall = ports.clock.now()
        self.doubt(wall)
        if self._watched or self._zero is None:
            return
        # Without a record of an earlier boot only the newest lines can show it: not those of a process that crashed
        # a moment ago.
        began = self._zero if self._rebooted else wall - SETTLE
        before = await ports.ledger.last_line_at(began)
        if before is not None and began - before > SILENCE:
            self._begin(asyncio.get_running_loop().time())
        self._watched = True

    async def record(self, ports: Ports) -> None:
        """Durable when it returns, so that a crash does not end a doubt. Writes only what is new."""
        if not ports.boot or self._zero is None:
            return
        doubted = asyncio.get_running_loop().time() < self._until
        now = ClockRecord(zero=self._zero, doubted_until=self._until if doubted else None, watched=self._watched)
        if self._recorded is None or _differs(now, self._recorded):
            await ports.ledger.record_clock(ports.boot, now)
            self._recorded = now

    def _begin(self, steady: float) -> None:
        self._until = steady + SETTLE.total_seconds()


def _differs(one: ClockRecord, other: ClockRecord) -> bool:
    same = (one.doubted_until, one.watched) == (other.doubted_until, other.watched)
    return not same or abs(one.zero - other.zero) > DRIFT


def behind_the_ledger(now: datetime, last_line: datetime | None) -> str | None:
    """A clock behind our own ledger has jumped."""
    if last_line is not None and now < last_line - BEHIND:
        return f"The clock shows {now:%Y-%m-%d %H:%M}, but the newest ledger line is of {last_line:%Y-%m-%d %H:%M}"
    return None

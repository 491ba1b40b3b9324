"""CPU use of the programs of each node, between two readings of all processes. Reads only.

A process that ended between two readings is not counted: low use proves nothing, only high use vetoes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.processes import TICKS, Process

OLDEST = 30 * 60.0  # seconds: an older reading is not used
FRESH = 60.0  # seconds: a newer result is reused
NOT_YET = Unknown("the CPU use was not measured yet")


class Cpu:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, dict[tuple[int, int], int]] | None = None
        self._used: tuple[float, float, dict[tuple[int, int], int]] | None = None  # when, seconds, ticks by process

    def begin(self, everyone: Iterable[Process], window: timedelta) -> None:
        """The first of two readings, unless an earlier one will do."""
        now = self._clock()
        if self._first is None or not window.total_seconds() <= now - self._first[0] <= OLDEST:
            self._first = now, _ticks(everyone)

    async def end(self, read: Callable[[], Sequence[Process]], window: timedelta) -> None:
        """The second one, once for all nodes, when the window is over."""
        assert self._first is not None, "begin() must be called first"
        began = self._first[0]
        left = window.total_seconds() - (self._clock() - began)
        if left > 0:
            await asyncio.sleep(left)
        self.take(read())

    def take(self, everyone: Iterable[Process]) -> None:
        if self._first is None:
            return
        now, later = self._clock(), _ticks(everyone)
        began, earlier = self._first
        if now > began:
            spent = {key: ticks - earlier.get(key, 0) for key, ticks in later.items()}
            self._used = now, now - began, spent
        self._first = now, later

    @property
    def fresh(self) -> bool:
        return self._used is not None and self._clock() - self._used[0] <= FRESH

    def percent(self, processes: Iterable[Process]) -> float | Unknown:
        """In percent of one core, of these processes. One that was not in the last reading is new and counts with its
        own time.
        """
        if self._used is None:
            return NOT_YET
        _, seconds, spent = self._used
        ticks = sum(max(spent.get((one.pid, one.starttime), one.ticks), 0) for one in processes)
        return 100 * ticks / TICKS / seconds


def _ticks(everyone: Iterable[Process]) -> dict[tuple[int, int], int]:
    return {(one.pid, one.starttime): one.ticks for one in everyone}

"""Checks of GPUs that ended work gave back: those in progress, and which ends were checked already.

Bounded: one check for each GPU, and the ends of the last RECENT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.model.event import GpuChecked
from gpukeeper.model.identity import Ref

RECENT = timedelta(hours=1)  # what ended longer ago proves nothing about its GPUs of today


@dataclass
class GpuCheck:
    """A GPU that is being checked because work on it ended."""

    uuid: str
    began: datetime
    ended: dict[str, Ref] = field(default_factory=dict)  # by key; more may end while it is checked
    task: asyncio.Task[GpuChecked] | None = None  # ends with how it came out


@dataclass
class GpuChecks:
    under_way: dict[str, GpuCheck] = field(default_factory=dict)  # by uuid
    _proven: dict[tuple[str, str], datetime] = field(default_factory=dict)  # ended work (key, incarnation)

    def is_proven(self, key: str, incarnation: str) -> bool:
        return (key, incarnation) in self._proven

    def prove(self, key: str, incarnation: str, now: datetime) -> None:
        self._proven[key, incarnation] = now

    def forget(self, now: datetime) -> None:
        """What ended so long ago is not checked again anyway."""
        self._proven = {run: at for run, at in self._proven.items() if timedelta() <= now - at < RECENT}

    def take_finished(self) -> list[GpuCheck]:
        over = [check for check in self.under_way.values() if check.task is not None and check.task.done()]
        for check in over:
            del self.under_way[check.uuid]
        return over

    def keys(self) -> Iterable[str]:
        return [key for key, _ in self._proven]

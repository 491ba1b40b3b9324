"""The GPUs of this machine: which they are, and which fraction of a whole one each slice is. Reads only."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import TypeAlias

from gpukeeper.blocking import in_thread
from gpukeeper.devices.condition import condition
from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.inventory import inventory as read_inventory
from gpukeeper.devices.reset import reset_unheld
from gpukeeper.model.condition import Condition
from gpukeeper.model.decision import Accepted, Refused
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

Facts: TypeAlias = tuple[GpuFacts, ...] | Unknown

DEADLINE, A_MOMENT = timedelta(seconds=10), timedelta(seconds=2)
REMEMBERED_FOR = timedelta(seconds=30)
_PROFILE = re.compile(r"\bMIG (?:(\d+)c\.)?(\d+)g\.")
# Compute slices of a whole GPU, by its model name; all others that can be split have 7.
_SLICES = ((re.compile(r"\bA30\b"), 4), (re.compile(r"\bRTX PRO 6000\b"), 4), (re.compile(r"\bRTX PRO 5000\b"), 2))
_MOST_SLICES = 7


class LocalGpus:
    """The engine's port. A result is cached for half a minute; a failure is not."""

    def __init__(
        self,
        deadline: timedelta = DEADLINE,
        inventory: Callable[[timedelta], Facts] = read_inventory,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline, self._inventory, self._ticks = deadline, inventory, ticks
        self._remembered: tuple[float, tuple[GpuFacts, ...]] | None = None
        self.let_go: Callable[[], Awaitable[None]] | None = None  # how our own sampling of GPUs is interrupted

    async def inventory(self) -> Facts:
        if self._remembered is not None:
            at, remembered = self._remembered
            if self._ticks() - at < REMEMBERED_FOR.total_seconds():
                return remembered
        found = await self._query()
        self._remembered = None if isinstance(found, Unknown) else (self._ticks(), found)
        return found

    async def shares(self) -> Mapping[str, float] | Unknown:
        found = await self.inventory()
        return found if isinstance(found, Unknown) else shares_of(found)

    async def condition(self, uuid: str, since: datetime) -> Condition | Unknown:
        return await condition(uuid, since)

    async def reset(self, uuid: str) -> Accepted | Refused | Unknown:
        if self.let_go is not None:
            await self.let_go()
        return await reset_unheld(uuid)

    async def _query(self) -> Facts:
        try:
            return await in_thread(lambda: self._inventory(self._deadline), self._deadline + A_MOMENT)
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(self._deadline)}")


def shares_of(gpus: tuple[GpuFacts, ...]) -> Mapping[str, float] | Unknown:
    """Pure. One that has no known share makes the whole unknown: a sum without it would be wrong."""
    shares: dict[str, float] = {}
    for gpu in gpus:
        if isinstance(gpu.uuid, Unknown):
            return Unknown(f"GPU {gpu.index} does not report its uuid: {gpu.uuid.why}")
        if isinstance(gpu.slices, Unknown):
            return Unknown(f"the slices of GPU {gpu.index} are unknown: {gpu.slices.why}")
        if not gpu.slices:
            shares[gpu.uuid] = 1.0
        for part in gpu.slices:
            share = share_of(part, gpu)
            if isinstance(share, Unknown):
                return share
            shares[part.uuid] = share
    return shares


def share_of(part: SliceFacts, gpu: GpuFacts) -> float | Unknown:
    """Compute slices ÷ the maximum of its model: `MIG 1g.5gb` is 1 of 7 on an A100; in `1c.2g.10gb` the first
    counts.
    """
    if isinstance(part.name, Unknown):
        return Unknown(f"the profile of slice {part.uuid} is unknown: {part.name.why}")
    profile = _PROFILE.search(part.name)
    if profile is None:
        return Unknown(f"{part.name!r} does not contain the size of slice {part.uuid}")
    model = f"{part.name} {'' if isinstance(gpu.name, Unknown) else gpu.name}"
    most = next((count for words, count in _SLICES if words.search(model)), _MOST_SLICES)
    return min(int(profile[1] or profile[2]) / most, 1.0)

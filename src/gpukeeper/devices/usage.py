"""How busy each GPU is, read repeatedly through one process that keeps the driver open. Reads only.

A process that does not answer is abandoned, and a new one is started later, after a growing pause. While it runs the
driver has one client more, and no GPU can be reset: close() it before.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from gpukeeper.blocking import in_thread
from gpukeeper.devices import dcgm
from gpukeeper.devices.busy import Export, GpuUse, UsageJudge
from gpukeeper.devices.driver.client import CHILD, TO_OPEN, DriverClient
from gpukeeper.devices.driver.protocol import DriverReply
from gpukeeper.devices.inventory import LOADED, gpus_in
from gpukeeper.model.durations import in_words
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

DEADLINE = timedelta(seconds=10)
FIRST_PAUSE = timedelta(seconds=5)

Fetch: TypeAlias = Callable[[str, timedelta], Awaitable[Export | Unknown]]


class GpuUsage:
    def __init__(
        self,
        clock: Clock,
        *,
        exporter: str | None = None,  # address of a DCGM exporter
        deadline: timedelta = DEADLINE,
        child: Sequence[str] = CHILD,
        driver: str = LOADED,
        ticks: Callable[[], float] = time.monotonic,
        fetch: Fetch = dcgm.fetch,
    ) -> None:
        self._clock, self._exporter, self._deadline, self._fetch = clock, exporter, deadline, fetch
        self._driver = Path(driver)
        self._client = DriverClient(child, deadline, to_open=TO_OPEN, pause=FIRST_PAUSE, ticks=ticks)
        self._judge = UsageJudge()

    async def read(self) -> Mapping[str, GpuUse] | Unknown:
        """Since the previous reading, by uuid. A GPU or slice that is not included is unknown."""
        # The driver is queried last and nothing is awaited afterwards: so readings are judged in the order they were
        # made.
        exported = await self._exported()
        gpus = gpus_in(await self._query(), self._driver.exists())
        return gpus if isinstance(gpus, Unknown) else self._judge.judge(gpus, self._clock.now(), exported)

    def close(self) -> None:
        """Ends the process and so closes the driver. The next reading starts another."""
        self._client.close()

    async def _query(self) -> DriverReply | Unknown:
        longest = self._client.longest
        try:
            return await in_thread(lambda: self._client.query("usage"), longest)
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(longest)}")

    async def _exported(self) -> Export | Unknown | None:
        return None if self._exporter is None else await self._fetch(self._exporter, self._deadline)

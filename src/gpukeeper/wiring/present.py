"""The machine as of now: made once for the dashboard, for metrics and for the copy in the fleet database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from gpukeeper import __version__
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import STEP, STEPS
from gpukeeper.engine.loop import in_slices
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.model.subject import Memory
from gpukeeper.views.live import Delta, GpuTile, MachineView
from gpukeeper.views.live_rows import LiveRows

if TYPE_CHECKING:
    from gpukeeper.wiring.session import Session

REMEMBERED = 5.0  # seconds: then the ledger is read again though no pass was made
FORECASTS = 0.05  # seconds of each update for forecasts; those that are not made then are made by the next ones


class PresentView:
    """Costs what changed since it was read last, by whichever reader; `busy`: the seconds that this took."""

    def __init__(self, session: Session) -> None:
        self.busy = 0.0
        self._session = session
        self._rows = LiveRows(session.keeper.host)
        self._updating = asyncio.Lock()
        self._remembered: Mapping[str, Memory] = {}
        self._reads, self._read_at = -1, float("-inf")

    async def view(self) -> MachineView:
        async with self._updating:
            return self._rows.view(await self._head(await self._update()))

    async def gpus(self) -> tuple[GpuTile, ...]:
        async with self._updating:
            await self._update()
            return self._rows.gpus

    async def changes(self, since: int) -> tuple[Delta, int, bool]:
        """What changed after that generation, the generation after it, and whether this is everything: after 0, or if
        that generation is too old."""
        async with self._updating:
            head, rows = await self._head(await self._update()), self._rows
            return rows.delta(head, since), rows.generation, since < rows.oldest

    async def _update(self) -> datetime:
        """The rows, as of the time that it returns."""
        session, keeper, rows = self._session, self._session.keeper, self._rows
        await _recall(keeper)
        live, book, now = keeper.live, session.book, keeper.clock.now()
        self.busy = await in_slices(live.forecast(book, now), FORECASTS)
        self.busy += await in_slices(rows.update(live, book, now))
        self.busy += await in_slices(rows.update_gpus(live, now, await self._of_gpus()))
        return now

    async def _head(self, now: datetime) -> MachineView:
        """Everything but the rows."""
        session, keeper, policy = self._session, self._session.keeper, self._session.book.policy
        return MachineView(
            machine=keeper.host,
            at=now,
            version=__version__,
            policy=PolicyHead(session.loaded.source, policy.digest, policy.preset, policy.mode),
            paused=await keeper.ledger.paused(),
            places=tuple(place.state for _, place in sorted(keeper.live.places.items())),
            gpus=(),
            workloads=(),
            notes=self._rows.notes,
        )

    async def _of_gpus(self) -> Mapping[str, Memory]:
        """What the ledger remembers of each GPU; measurements do not change it."""
        loop, keeper = asyncio.get_running_loop(), self._session.keeper
        if keeper.live.reads != self._reads or loop.time() - self._read_at > REMEMBERED:
            self._reads, self._read_at = keeper.live.reads, loop.time()
            self._remembered = await keeper.ledger.memories(self._rows.devices)
        return self._remembered


async def _recall(keeper: Keeper) -> None:
    """Use that was recorded before this daemon started, or before the workload was first seen."""
    keys = keeper.live.unknown_history()
    if keys:
        now = keeper.clock.now()
        found = await keeper.signals.series(keys, now - STEPS * STEP, now)
        for key, series in found.items():
            keeper.live.recall(key, series)

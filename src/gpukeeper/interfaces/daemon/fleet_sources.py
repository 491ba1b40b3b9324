"""What a daemon copies to the fleet database besides its ledger: its present view, and the hours of its GPUs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime

import msgspec

from gpukeeper.engine.failures import bug_words
from gpukeeper.interfaces.daemon.present import PresentView
from gpukeeper.ledger.copy.ship import UsageRow
from gpukeeper.ledger.copy.shipper import View
from gpukeeper.ledger.copy.usage_rows import usage_rows
from gpukeeper.ledger.database import open_for_reading, translated
from gpukeeper.ledger.lines import storable
from gpukeeper.ledger.paths import usage_path
from gpukeeper.ledger.schema import USAGE
from gpukeeper.ledger.usage import UsageReader
from gpukeeper.model.errors import KeeperError, LedgerError
from gpukeeper.views.live import MachineView
from gpukeeper.wiring.session import Session

SOONEST = 3.0  # seconds between two views
SHARE = 20  # building views takes at most one part in so many of the time
RENEWED = 30.0  # seconds: a view is built that often though no pass changed anything
CURRENT = 120.0  # seconds; an older view is not copied any more
LARGEST = 32 * 2**20  # bytes of a view; a larger one is copied without workloads that have no GPU, then without all
ROWS = 20_000  # of usage at once, roughly


class FleetSources:
    """Implements Sources. `build` runs in the event loop, everything else in the shipper's thread."""

    def __init__(self, session: Session, log: Callable[[str], None]) -> None:
        self._session, self._log = session, log
        self._present = PresentView(session)
        self._view: View | None = None
        self._seq = int(time.time() * 1000)  # higher than all that this daemon used before it was started again
        self._built = float("-inf")  # steady time
        self._last: MachineView | None = None
        self._problem = self._usage_problem = ""  # logged last

    async def build(self) -> None:
        """For ever. What fails is logged, and tried again."""
        live = self._session.keeper.live
        live.enabled, live.gpus_only = True, False
        pause, version, due = SOONEST, -1, 0.0
        while True:
            begun = time.monotonic()
            if live.version != version or begun >= due:
                version, due = live.version, begun + RENEWED
                await self._try_build()
                pause = max(SOONEST, self._present.busy * SHARE)
            await asyncio.sleep(pause)

    async def _try_build(self) -> None:
        try:
            await self._build()
            self._problem = ""
        except Exception as problem:
            words = str(problem) if isinstance(problem, KeeperError) else bug_words(problem)
            if words != self._problem:
                self._log(f"the view of this machine is not copied: {words}")
            self._problem = words

    async def _build(self) -> None:
        if not self._session.keeper.live.places:
            return  # no pass was made yet
        view, last = await self._present.view(), self._last
        if last is None or msgspec.structs.replace(last, at=view.at) != view:
            body = await asyncio.to_thread(encoded, view)
            self._seq += 1
            self._view = View(self._seq, body)
        self._last, self._built = view, time.monotonic()

    def view(self) -> View | None:
        return self._view if time.monotonic() - self._built < CURRENT else None

    def usage(self, since: datetime | None) -> Sequence[UsageRow]:
        path = usage_path(self._session.ledger.path)
        try:
            with closing(open_for_reading(path, USAGE)) as connection, translated(path):
                return tuple(usage_rows(UsageReader(connection), since, datetime.now(UTC), ROWS))
        except LedgerError as problem:  # the ledger is copied in any case
            if str(problem) != self._usage_problem:
                self._log(f"how the GPUs are used is not copied: {problem}")
            self._usage_problem = str(problem)
            return ()


def encoded(view: MachineView, largest: int = LARGEST) -> bytes:
    """Never larger than that. Bytes of names that are no text are written as the journal writes them."""
    body = _json(view)
    if len(body) <= largest:
        return body
    for kept in (tuple(one for one in view.workloads if one.gpus != 0), ()):
        note = f"{len(view.workloads) - len(kept)} workloads are not in the copy of this machine: there are too many."
        smaller = msgspec.structs.replace(view, workloads=kept, notes=(note, *view.notes[:100]))
        body = _json(smaller)
        if len(body) <= largest:
            return body
    note = f"{len(view.gpus)} GPUs are not in the copy of this machine: there are too many."
    return _json(msgspec.structs.replace(view, workloads=(), gpus=(), notes=(note,)))


def _json(view: MachineView) -> bytes:
    try:
        return msgspec.json.encode(view)
    except UnicodeEncodeError:
        return msgspec.json.encode(storable(msgspec.to_builtins(view)))

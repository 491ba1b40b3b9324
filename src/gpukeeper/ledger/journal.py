"""The ledger on disk: journal and state in one SQLite file. `append` returns when the lines are durable.

One thread does all the work on the connection, so that a slow disk never stops the event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from gpukeeper.ledger import queries, state
from gpukeeper.ledger.database import (
    damage,
    full_sentence,
    is_full,
    open_for_reading,
    open_for_writing,
    transaction,
    translated,
)
from gpukeeper.ledger.lease import Lease, take_lease
from gpukeeper.ledger.lines import COLUMNS, begins, fit, row
from gpukeeper.ledger.queries import Totals
from gpukeeper.ledger.recent_acts import RecentActs
from gpukeeper.ledger.reserve import Reserve
from gpukeeper.model.condition import GpuMemory
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Event, Intended
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import ClockRecord, Hold, Memory

T = TypeVar("T")
_INSERT = f"INSERT INTO journal ({', '.join(COLUMNS)}) VALUES ({', '.join('?' for _ in COLUMNS)})"  # noqa: S608


def open_ledger(path: Path, *, write: bool) -> SqliteLedger:
    """For reading nothing is created or changed; a ledger that is not there reads as an empty one."""
    if not write:
        return SqliteLedger(path, open_for_reading(path), write=False)
    try:
        return SqliteLedger(path, open_for_writing(path), write=True)
    except LedgerError as error:
        # Opening takes a few KiB. After a restart on a full disk the reserve gives them.
        full = isinstance(error.__cause__, sqlite3.Error) and is_full(error.__cause__)
        if not (full and Reserve(path.parent).release()):
            raise
    return SqliteLedger(path, open_for_writing(path), write=True)


class SqliteLedger:
    """Made by `open_ledger`. Keeps the Ledger port; the rest is for the command line and the daemon."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, write: bool) -> None:
        self.path = path
        self.writable = write
        self.on_append: Callable[[Sequence[Event]], None] = lambda lines: None  # called when they are durable
        self._connection = connection
        self._recent_acts = RecentActs()
        self._reserve = Reserve(path.parent)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        if write:
            self._reserve.ensure()

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    # The port.

    async def append(self, lines: Sequence[Event]) -> None:
        if lines:
            taken = tuple(lines)
            acts = any(map(begins, taken))
            await self.change(lambda c: append(c, taken), acts=acts)
            self.on_append(taken)

    async def memories(self, keys: Iterable[str]) -> Mapping[str, Memory]:
        wanted = tuple(keys)
        return await self.read(lambda c: state.memories(c, wanted))

    async def present(self, platform: str, place: str) -> Mapping[str, Ref]:
        return await self.read(lambda c: state.present(c, platform, place))

    async def decided(self, keys: Iterable[str]) -> Mapping[str, str]:
        wanted = tuple(keys)
        return await self.read(lambda c: state.decided(c, wanted))

    async def open_intents(self, platform: str, place: str) -> Sequence[Intended]:
        return await self.read(lambda c: state.open_intents(c, platform, place, str(self.path)))

    async def acts_since(self, since: datetime, rules: frozenset[str], *, but: bool = False) -> int:
        return await self.read(lambda c: self._recent_acts.count(c, since, rules, but=but))

    async def holds_of(self, owner: str, since: datetime) -> Mapping[str, tuple[Hold, ...]]:
        return await self.read(lambda c: queries.holds_of(c, owner, since, str(self.path)))

    async def about(self, words: str) -> Sequence[Event]:
        return [line for _, line in await self.lines(last=None, workload=words)]

    async def next_pass(self) -> int:
        return await self.change(state.next_pass)

    async def last_line_at(self, before: datetime | None = None) -> datetime | None:
        return await self.read(lambda c: queries.last_line_at(c, before))

    async def clock_records(self) -> Mapping[str, ClockRecord]:
        return await self.read(state.clock_records)

    async def record_clock(self, boot: str, record: ClockRecord) -> None:
        await self.change(lambda c: state.record_clock(c, boot, record))

    async def paused(self) -> str | None:
        return await self.read(state.paused)

    @asynccontextmanager
    async def lease(self, platform: str, place: str) -> AsyncIterator[None]:
        self._must_write()
        future = self._thread.submit(self._take_lease, platform, place)
        try:
            held = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The thread may get the lease after the caller has stopped waiting.
            future.add_done_callback(_let_go)
            raise
        try:
            yield
        finally:
            held.release()

    # Beyond the port.

    async def lines(
        self,
        *,
        last: int | None = 100,
        types: Sequence[str] = (),
        owner: str | None = None,
        workload: str | None = None,
        errors_only: bool = False,
        since: datetime | None = None,
        search: str | None = None,
        before: int | None = None,
    ) -> list[tuple[int, Event]]:
        """The newest `last` lines (None: all) that fit, oldest first. `workload`: any ending of its path, or a uid."""
        wanted = queries.LineFilter(last, tuple(types), owner, workload, errors_only, since, search, before)
        return await self.read(lambda c: queries.lines(c, wanted, str(self.path)))

    async def follow(self, after: int, *, poll: float = 0.5) -> AsyncIterator[tuple[int, Event]]:
        """Lines with a higher number than `after`, for ever: those there are and those that come, from any process."""
        seen = after
        while True:
            page = await self.read(lambda c: queries.lines_after(c, seen, str(self.path)))  # noqa: B023 (awaited here)
            for number, line in page:
                yield number, line
                seen = number
            if not page:
                await asyncio.sleep(poll)

    async def totals(self, since: datetime) -> Totals:
        """What was reclaimed since then, per owner, rule and platform. Unknown figures are counted apart."""
        return await self.read(lambda c: queries.totals(c, since, str(self.path)))

    async def gpus(self, place: str) -> dict[str, GpuMemory]:
        """By uuid: baseline, last check and quarantine of each GPU of that machine."""
        return await self.read(lambda c: state.gpus(c, place))

    async def rebuild(self) -> int:
        """Rebuild the state from the journal, in one transaction. Returns the number of lines folded."""
        return await self.change(lambda c: state.rebuild(c, str(self.path)))

    async def damage(self) -> list[str]:
        """What is wrong with the file; empty when it is whole. Reads all of it."""
        return await self.read(damage)

    async def lines_by_type(self, since: datetime) -> dict[str, int]:
        """How many lines of each type were written since then; types without any have 0."""
        return await self.read(lambda c: queries.lines_by_type(c, since))

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def do() -> T:
            with translated(self.path):
                return work(self._connection)

        return await asyncio.wrap_future(self._thread.submit(do))

    async def change(self, work: Callable[[sqlite3.Connection], T], *, acts: bool = False) -> T:
        """In one transaction, durable when it returns. `acts`: something new begins, which a full disk forbids."""
        self._must_write()
        return await asyncio.wrap_future(self._thread.submit(self._with_reserve, work, acts))

    def _with_reserve(self, work: Callable[[sqlite3.Connection], T], acts: bool) -> T:
        """On a full disk the reserve makes room for what is in progress; nothing new begins until it is back."""
        with translated(self.path):
            if not self._reserve.ensure() and acts:
                raise LedgerError(full_sentence(self.path))
            try:
                return self._once(work)
            except sqlite3.OperationalError as error:
                if not (is_full(error) and self._reserve.release()):
                    raise
            return self._once(work)

    def _once(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with transaction(self._connection) as connection:
            return work(connection)

    def _take_lease(self, platform: str, place: str) -> Lease:
        with translated(self.path):
            return take_lease(self.path.parent / "leases", platform, place)

    def _must_write(self) -> None:
        if not self.writable:
            raise LedgerError(f"The ledger {self.path} was opened for reading. Nothing was written.")


def append(c: sqlite3.Connection, lines: Sequence[Event]) -> int:
    """Within a transaction. The last number given."""
    last = 0
    for fitted, stored in map(fit, lines):
        last = c.execute(_INSERT, row(fitted, stored)).lastrowid or 0
        state.take(c, fitted)
    return last


def _let_go(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()

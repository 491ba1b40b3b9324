"""The ledger on disk: journal and state in one SQLite file. `append` returns when the lines are durable.

One thread does all the work on the connection, so that a slow disk never stops the event loop. One pass at a time on
one place, across processes: the kernel lets go of a lease when its holder dies, however it dies. A file is given up
when the disk is full, so that an outcome can still be written; it is created again as soon as there is room.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import sqlite3
import sys
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from gpukeeper.ledger import tables
from gpukeeper.ledger.database import (
    damage,
    full_sentence,
    is_full,
    open_for_reading,
    open_for_writing,
    transaction,
    translated,
)
from gpukeeper.ledger.lines import COLUMNS, begins, fit, micros, row
from gpukeeper.ledger.tables import Totals
from gpukeeper.model.errors import LeaseHeld, LedgerError
from gpukeeper.model.event import Event, Intended
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.subject import ClockRecord, Hold, Memory, Ref

NAME_BYTES = 200
DAEMON = "daemon"  # the lease of `serve` itself, held as long as it runs


class Lease:
    """A lock that is held until `release`. The file stays: deleting a lock file lets two hold it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def take_lease(directory: Path, platform: str, place: str) -> Lease:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _take(directory / lease_name(platform, place), platform, place)


@contextmanager
def no_pass(directory: Path) -> Iterator[None]:
    """No daemon and no pass runs meanwhile: the lease of every place that ever had one is held. Raises LeaseHeld."""
    with ExitStack() as held:
        held.callback(take_lease(directory, DAEMON, "serve").release)
        own = lease_name(DAEMON, "serve")
        for path in sorted(directory.glob("*.lock")):
            if path.name != own:
                platform, _, place = (unquote(part) for part in path.name.removesuffix(".lock").partition("~"))
                held.callback(_take(path, platform, place).release)
        yield


def _take(path: Path, platform: str, place: str) -> Lease:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sign(fd)
    except BlockingIOError as error:
        holder = _holder(fd)
        os.close(fd)
        if platform == DAEMON:
            raise LeaseHeld(f"gpukeeper serve is already running: {holder}. Nothing was touched.") from error
        raise LeaseHeld(
            f"Another pass is running on {platform}/{place}: {holder}. Nothing was touched there. "
            "Wait until it is done, or end that program."
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return Lease(fd)


def lease_name(platform: str, place: str) -> str:
    """A file name for any two names: slashes, dots and ~ of theirs are escaped, so that two places never share one."""
    name = "~".join(quote(part, safe="", errors="surrogatepass").replace("~", "%7E") for part in (platform, place))
    if len(name) > NAME_BYTES:
        name = name[:NAME_BYTES] + "~" + hashlib.sha256(name.encode()).hexdigest()[:16]
    return name + ".lock"


def _sign(fd: int) -> None:
    """The holder, for messages to others. Only text: the lock itself is the kernel's."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} ({command})".encode("utf-8", "backslashreplace"), 0)


def _holder(fd: int) -> str:
    words = os.pread(fd, 400, 0).decode("utf-8", "replace")
    since = datetime.fromtimestamp(os.fstat(fd).st_mtime, UTC)
    shown = "".join(ch if ch.isprintable() else "?" for ch in words)
    return f"{shown} since {since:%Y-%m-%d %H:%M:%S} UTC" if shown else "an unknown program"


RESERVE_BYTES = 8 * 2**20
# Created again only well above its own size; else it would come and go with every line on a nearly full disk.
ROOM_BYTES = 4 * RESERVE_BYTES


class Reserve:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "reserve"

    def ensure(self) -> bool:
        """Whether it is there, after making it if there is room."""
        return self.is_there() or (self._has_room() and self._make())

    def is_there(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        return found.st_size >= RESERVE_BYTES

    def release(self) -> bool:
        """Give its room to the journal. False: it was not there to be given."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True

    def _has_room(self) -> bool:
        try:
            disk = os.statvfs(self.path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize >= ROOM_BYTES

    def _make(self) -> bool:
        made = self.path.with_name("reserve.new")
        try:
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _allocate(fd)
            finally:
                os.close(fd)
            made.rename(self.path)
        except OSError:  # full after all, over a quota, or another process was faster
            with suppress(OSError):
                made.unlink()
        return self.is_there()


def _allocate(fd: int) -> None:
    try:
        os.posix_fallocate(fd, 0, RESERVE_BYTES)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise
        # Filesystems without allocation: bytes that do not compress away.
        os.pwrite(fd, os.urandom(RESERVE_BYTES), 0)


_FIRST = "SELECT rule, at FROM journal WHERE type = 'intent' AND at >= ? AND seq <= ? ORDER BY at"
# The plus keeps SQLite from reading the whole hour again by the index of types.
_NEWER = "SELECT seq, rule, at FROM journal WHERE seq > ? AND +type = 'intent'"


SLACK = 60_000_000  # microseconds: concurrent steps do not call in the order of their times


class RecentActs:
    """Of one connection. Keeps the intents since the time of the last call; for an earlier time it reads them again.

    How many steps were begun lately, by rule: needed before every step, so each line is read only once. Other
    processes write to the same journal (`apply` beside a daemon), so what is new is read from it, not counted here.
    """

    def __init__(self) -> None:
        self._at: dict[str, list[int]] = {}  # by rule, sorted
        self._since: int | None = None
        self._seq = 0

    def count(self, c: sqlite3.Connection, since: datetime, rules: frozenset[str], *, but: bool) -> int:
        """Intents since then of these rules, or of all but these."""
        first = micros(since)
        if self._since is None or first < self._since:
            self._read(c, first - SLACK)
        else:
            self._read_newer(c, first - SLACK)
        counted = [times for rule, times in self._at.items() if (rule in rules) is not but]
        return sum(len(times) - bisect_left(times, first) for times in counted)

    def _read(self, c: sqlite3.Connection, first: int) -> None:
        """An error leaves everything as it was: what was read in part would count as nothing was done."""
        last, found = _last(c), dict[str, list[int]]()
        for rule, at in c.execute(_FIRST, (first, last)):
            found.setdefault(rule, []).append(at)
        self._at, self._since, self._seq = found, first, last

    def _read_newer(self, c: sqlite3.Connection, first: int) -> None:
        last, newer = _last(c), c.execute(_NEWER, (self._seq,)).fetchall()
        for seq, rule, at in newer:
            insort(self._at.setdefault(rule, []), at)
            last = max(last, seq)
        self._seq = last
        if self._since is not None and first > self._since:
            self._since = first
            for times in self._at.values():
                del times[: bisect_left(times, first)]


def _last(c: sqlite3.Connection) -> int:
    return int(c.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()[0])


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
        return await self.read(lambda c: tables.memories(c, wanted))

    async def present(self, platform: str, place: str) -> Mapping[str, Ref]:
        return await self.read(lambda c: tables.present(c, platform, place))

    async def decided(self, keys: Iterable[str]) -> Mapping[str, str]:
        wanted = tuple(keys)
        return await self.read(lambda c: tables.decided(c, wanted))

    async def open_intents(self, platform: str, place: str) -> Sequence[Intended]:
        return await self.read(lambda c: tables.open_intents(c, platform, place, str(self.path)))

    async def acts_since(self, since: datetime, rules: frozenset[str], *, but: bool = False) -> int:
        return await self.read(lambda c: self._recent_acts.count(c, since, rules, but=but))

    async def holds_of(self, owner: str, since: datetime) -> Mapping[str, tuple[Hold, ...]]:
        return await self.read(lambda c: tables.holds_of(c, owner, since, str(self.path)))

    async def about(self, words: str) -> Sequence[Event]:
        return [line for _, line in await self.lines(tables.LineFilter(last=None, workload=words))]

    async def next_pass(self) -> int:
        return await self.change(tables.next_pass)

    async def last_line_at(self, before: datetime | None = None) -> datetime | None:
        return await self.read(lambda c: tables.last_line_at(c, before))

    async def clock_records(self) -> Mapping[str, ClockRecord]:
        return await self.read(tables.clock_records)

    async def record_clock(self, boot: str, record: ClockRecord) -> None:
        await self.change(lambda c: tables.record_clock(c, boot, record))

    async def paused(self) -> str | None:
        return await self.read(tables.paused)

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

    async def lines(self, wanted: tables.LineFilter | None = None) -> list[tuple[int, Event]]:
        """The newest lines that fit, oldest first."""
        return await self.read(lambda c: tables.read_lines(c, wanted or tables.LineFilter(), str(self.path)))

    async def follow(self, after: int, *, poll: float = 0.5) -> AsyncIterator[tuple[int, Event]]:
        """Lines with a higher number than `after`, for ever: those there are and those that come, from any process."""
        seen = after
        while True:
            page = await self.read(lambda c: tables.lines_after(c, seen, str(self.path)))  # noqa: B023 (awaited here)
            for number, line in page:
                yield number, line
                seen = number
            if not page:
                await asyncio.sleep(poll)

    async def totals(self, since: datetime) -> Totals:
        """What was reclaimed since then, per owner, rule and platform. Unknown figures are counted apart."""
        return await self.read(lambda c: tables.totals(c, since, str(self.path)))

    async def gpus(self, place: str) -> dict[str, GpuMemory]:
        """By uuid: baseline, last check and quarantine of each GPU of that machine."""
        return await self.read(lambda c: tables.gpus(c, place))

    async def rebuild(self) -> int:
        """Rebuild the state from the journal, in one transaction. Returns the number of lines folded."""
        return await self.change(lambda c: tables.rebuild(c, str(self.path)))

    async def damage(self) -> list[str]:
        """What is wrong with the file; empty when it is whole. Reads all of it."""
        return await self.read(damage)

    async def lines_by_type(self, since: datetime) -> dict[str, int]:
        """How many lines of each type were written since then; types without any have 0."""
        return await self.read(lambda c: tables.lines_by_type(c, since))

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
        tables.take(c, fitted)
    return last


def _let_go(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()

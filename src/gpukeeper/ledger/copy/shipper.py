"""The shipper: one thread that keeps the fleet database up to date beside the passes, and waits for none of them.

It has its own connections to the ledger (read-only) and to the database, and bounded batches. Whatever fails, it waits,
connects again and continues with the cursor that the database has then.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from gpukeeper import __version__
from gpukeeper.ledger.copy import inbox
from gpukeeper.ledger.copy.admin import CopyState, check_schema
from gpukeeper.ledger.copy.connect import connect, disconnect, first_line, load_driver
from gpukeeper.ledger.copy.inbox import Answer
from gpukeeper.ledger.copy.ship import (
    Batch,
    Outbox,
    Position,
    UsageRow,
    begin,
    confirm_view,
    replacement,
    report_alive,
    ship_lines,
    ship_signals,
    ship_usage,
    ship_view,
)
from gpukeeper.ledger.lines import moment
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.event import NodeTested

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

PAUSE = 1.0  # seconds between two rounds in which nothing was to be done
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the next attempt to connect
REQUESTS_EVERY, VIEW_EVERY, SIGNALS_EVERY, USAGE_EVERY, ALIVE_EVERY = 5.0, 5.0, 30.0, 300.0, 30.0
PARTITIONS_EVERY = 6 * 3600.0
CONFIRMED_EVERY = 30.0  # seconds: a view that did not change is marked as current that often
SETTLED = 3  # minutes after which a bucket is shipped: late samples still change younger ones
SIGNAL_ROWS = 20_000  # of one batch, roughly
RECOMPUTED = timedelta(hours=3)  # usage of the last hours may be computed again
CURRENT = timedelta(hours=2)  # usage that is older than this has more after it
BATCHES_AT_ONCE = 10  # before requests and the view get their turn
STUCK = 120.0  # seconds after which an answer of the database is no longer waited for


class CopySettings(msgspec.Struct, frozen=True, kw_only=True):
    """As in the policy, with the machine's name filled in."""

    address: str
    machine: str
    password_file: str | None = None
    signals: bool = True


class View(msgspec.Struct, frozen=True):
    """The present view of this machine as JSON. The same number: nothing changed."""

    seq: int
    body: bytes


class Sources(Protocol):
    """What is shipped besides the ledger's own tables. Called in the shipper's thread; must not block."""

    def view(self) -> View | None:
        """None: there is no view, or it is not current any more."""
        ...

    def usage(self, since: datetime | None) -> Iterable[UsageRow]:
        """The first rows since then, in whole hours; the next call asks for what follows."""
        ...


class NoSources:
    """A daemon without a live view and without usage."""

    def view(self) -> View | None:
        return None

    def usage(self, since: datetime | None) -> Iterable[UsageRow]:
        return ()


def _refuse(document: str, signature: str) -> Future[Answer]:
    refused: Future[Answer] = Future()
    refused.set_result(Answer("refused", b'{"done": false, "words": "no requests are accepted here", "exit_code": 2}'))
    return refused


class Shipper:
    """`on_request` begins to answer a request and returns at once."""

    def __init__(
        self,
        settings: CopySettings,
        ledger: Path,
        *,
        sources: Sources | None = None,
        on_request: Callable[[str, str], Future[Answer]] = _refuse,
        log: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._settings, self._path, self._log = settings, ledger, log
        self._sources = sources or NoSources()
        self._inbox = inbox.Inbox(settings.machine, on_request)
        self._stop = threading.Event()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-copy-reader")
        self._thread = threading.Thread(target=self._run, name="fleet-copy", daemon=True)
        self._state = CopyState(machine=settings.machine)
        self._due: dict[str, float] = {}  # steady time, by kind of work
        self._view_seq: int | None = None
        self._confirmed = 0.0  # steady time at which the view was written, or marked as current
        self._position: Position | None = None
        self._connection: Connection | None = None
        self._working_since: float | None = None
        self._behind = False  # since a failure that was logged

    @property
    def state(self) -> CopyState:
        """A value; replaced as a whole."""
        return self._state

    def start(self) -> None:
        self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        """What was not shipped is shipped after the next start."""
        self._stop.set()
        self._thread.join(within)
        if self._thread.is_alive():
            self.disconnect()
        self._reader.shutdown(wait=False)

    def check_stuck(self) -> None:
        """Called from outside now and then: a server that stopped answering does not end a wait by itself."""
        since = self._working_since
        if since is not None and time.monotonic() - since > STUCK:
            self.disconnect()

    def disconnect(self) -> None:
        connection = self._connection
        if connection is not None:
            disconnect(connection)

    def _run(self) -> None:
        wait = FIRST_WAIT
        while not self._stop.is_set():
            try:
                self._connected()
            except Exception as problem:
                self._failed(problem)
            finally:
                self._connection = self._working_since = None
            if self._state.failures <= 1:
                wait = FIRST_WAIT
            # A fleet must not return in step when its database does.
            self._stop.wait(wait * random.uniform(0.5, 1.0))  # noqa: S311
            wait = min(2 * wait, LONGEST_WAIT)

    def _connected(self) -> None:
        """One connection, from beginning to end."""
        settings = self._settings
        self._working_since = time.monotonic()
        with (
            closing(
                connect(settings.address, settings.password_file, name=f"gpukeeper {settings.machine}")
            ) as connection,
            closing(Outbox(self._path)) as outbox,
        ):
            self._connection = connection
            check_schema(connection)
            self._keep_partitions(connection)
            self._position = begin(connection, settings.machine, outbox)
            connection.execute("LISTEN gpukeeper_requests")
            self._due, self._view_seq = {"partitions": time.monotonic() + PARTITIONS_EVERY}, None
            self._set(connected=True, connected_since=datetime.now(UTC), ledger=self._position.ledger)
            while not self._stop.is_set():
                self._working_since = time.monotonic()
                if not self._round(connection, outbox):
                    self._working_since = None
                    self._wait_for_work(connection)

    def _round(self, connection: Connection, outbox: Outbox) -> bool:
        """One of everything that is due. Whether more lines are waiting."""
        more = self._ship_lines(connection, outbox)
        if self._is_due("requests", REQUESTS_EVERY) or self._inbox.busy:
            self._inbox.turn(connection)
        if self._is_due("view", VIEW_EVERY):
            self._ship_view(connection)
        if self._settings.signals and self._is_due("signals", SIGNALS_EVERY):
            more = self._ship_signals(connection, outbox) or more
        if self._is_due("usage", USAGE_EVERY):
            self._ship_usage(connection)
        if self._is_due("alive", ALIVE_EVERY):
            report_alive(connection, self._settings.machine, __version__)
        if self._is_due("partitions", PARTITIONS_EVERY):
            self._keep_partitions(connection)
        return more

    def _wait_for_work(self, connection: Connection) -> None:
        for _ in connection.notifies(timeout=PAUSE, stop_after=1):
            self._due.pop("requests", None)

    def _is_due(self, kind: str, every: float) -> bool:
        now = time.monotonic()
        if self._due.get(kind, 0.0) > now:
            return False
        self._due[kind] = now + every
        return True

    def _ship_lines(self, connection: Connection, outbox: Outbox) -> bool:
        """While the database works on one batch, the next one is read."""
        batch = outbox.batch(self._known_position().shipped)
        for _ in range(BATCHES_AT_ONCE):
            if not batch.rows or self._stop.is_set():
                break
            runs = outbox.runs(self._known_position().shipped, batch.last)
            following = self._reader.submit(outbox.batch, batch.last) if batch.full else None
            try:
                self._ship_batch(connection, batch, runs)
            finally:  # the outbox is used by one thread at a time
                batch = Batch() if following is None else following.result()
        self._note_progress(outbox, bool(batch.rows))
        return bool(batch.rows)

    def _ship_batch(self, connection: Connection, batch: Batch, runs: Sequence[tuple[int, NodeTested]]) -> None:
        """A line that the database refuses must not hold up the others: it is found by halving."""
        psycopg = load_driver()
        position = self._known_position()
        try:
            here = [run for line, run in runs if position.shipped < line <= batch.last]
            self._position = ship_lines(connection, position, batch, here)
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            if len(batch.rows) > 1:
                middle = len(batch.rows) // 2
                for rows in (batch.rows[:middle], batch.rows[middle:]):
                    self._ship_batch(connection, Batch(rows, int(rows[-1].partition("\t")[0])), runs)
                return
            row = replacement(batch.rows[0], first_line(error))
            self._position = ship_lines(connection, position, Batch((row,), batch.last), ())
            self._set(refused_lines=self._state.refused_lines + 1)
            self._log(f"line {batch.last} was copied without its content: the database refused it: {first_line(error)}")

    def _note_progress(self, outbox: Outbox, more: bool) -> None:
        position, now = self._known_position(), datetime.now(UTC)
        waiting = outbox.next_after(position.shipped) if more else None
        self._set(
            shipped=position.shipped,
            unsent=outbox.newest() - position.shipped if more else 0,
            lag=0.0 if waiting is None else max((now - waiting[1]).total_seconds(), 0.0),
            last_shipped_at=now,
            failures=0,
        )
        if self._behind and not more:
            self._behind = False
            self._log("the fleet database is up to date again: every line is copied")

    def _ship_view(self, connection: Connection) -> None:
        view, now = self._sources.view(), time.monotonic()
        if view is None:
            return
        if view.seq != self._view_seq:
            self._write_view(connection, view)
            self._view_seq, self._confirmed = view.seq, now
        elif now - self._confirmed >= CONFIRMED_EVERY:
            confirm_view(connection, self._settings.machine)
            self._confirmed = now

    def _write_view(self, connection: Connection, view: View) -> None:
        psycopg = load_driver()
        try:
            ship_view(connection, self._settings.machine, view.seq, view.body)
        except psycopg.DataError as error:  # the next one may be accepted
            self._log(f"the view of this machine was not copied: the database refused it: {first_line(error)}")

    def _ship_signals(self, connection: Connection, outbox: Outbox) -> bool:
        """Whether there is more that is old enough."""
        position, end = self._known_position(), int(time.time()) // 60 - SETTLED
        known = 0 if position.signals_until is None else int(position.signals_until.timestamp()) // 60
        since = outbox.first_minute(known)
        if since is None or since >= end:
            return False
        until = min(end, since + max(1, SIGNAL_ROWS // max(outbox.series_since(since), 1)))
        rows = outbox.signals(since, until)
        psycopg = load_driver()
        try:
            self._position = ship_signals(connection, position, rows, moment(until * 60_000_000))
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            self._log(f"signals of {until - since} minutes were not copied: {first_line(error)}")
            self._position = ship_signals(connection, position, (), moment(until * 60_000_000))
        self._set(signals_until=moment(until * 60_000_000))
        if until < end:
            self._due.pop("signals", None)
        return until < end

    def _ship_usage(self, connection: Connection) -> None:
        position = self._known_position()
        since = None if position.usage_until is None else position.usage_until - RECOMPUTED
        rows = tuple(self._sources.usage(since))
        if not rows:
            return
        until = max(one.hour for one in rows)
        self._position = ship_usage(connection, position, rows, until)
        advanced = position.usage_until is None or until > position.usage_until
        if advanced and until < datetime.now(UTC) - CURRENT:
            self._due.pop("usage", None)

    def _keep_partitions(self, connection: Connection) -> None:
        psycopg = load_driver()
        try:
            connection.execute("SELECT gpukeeper.keep_partitions()")
        except psycopg.OperationalError as error:
            if connection.closed:
                raise
            self._log(f"the partitions of the fleet database were not renewed: {first_line(error)}")

    def _known_position(self) -> Position:
        assert self._position is not None
        return self._position

    def _failed(self, problem: Exception) -> None:
        words = first_line(problem) if _is_expected(problem) else f"this is a bug in gpukeeper: {problem!r}"
        if words != self._state.last_error or self._state.failures == 0:
            self._log(f"the fleet database is not up to date: {words}. Lines are kept and sent later.")
            self._behind = True
        unsent, lag = self._unsent()
        self._set(
            connected=False,
            connected_since=None,
            unsent=unsent,
            lag=lag,
            last_error=words,
            last_error_at=datetime.now(UTC),
            failures=self._state.failures + 1,
        )

    def _unsent(self) -> tuple[int | None, float | None]:
        """While the database is away: how much waits here, by the last cursor, or by the one before a restart."""
        try:
            with closing(Outbox(self._path)) as outbox:
                shipped = outbox.remembered() if self._position is None else self._position.shipped
                waiting = outbox.next_after(shipped)
                if waiting is None:
                    return 0, 0.0
                lag = max((datetime.now(UTC) - waiting[1]).total_seconds(), 0.0)
                return outbox.newest() - shipped, lag
        except KeeperError:
            return None, None

    def _set(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)


def _is_expected(problem: Exception) -> bool:
    return isinstance(problem, KeeperError | OSError | load_driver().Error)

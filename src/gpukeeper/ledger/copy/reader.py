"""Reading the fleet database, for the web server: what it holds about machines (which may have other versions of
gpukeeper: what this one cannot decode is left out), asked over a few connections, in threads, each with a deadline;
and the views of all machines as they change, for which one thread listens and polls.

Whatever fails is reported with its reason, and nothing else stops. What was read before stays, and gets older.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.ledger.copy.admin import check_schema
from gpukeeper.ledger.copy.connect import connect, disconnect, first_line, load_driver
from gpukeeper.ledger.copy.ship import recorded_hours, storable
from gpukeeper.ledger.lines import decode, says
from gpukeeper.ledger.tables import HIGHEST, LineFilter
from gpukeeper.model.errors import KeeperError, LedgerError
from gpukeeper.model.event import Closed, Event
from gpukeeper.model.series import RecordedHour

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection


PAGE = 500
_NEWEST = "ledger = (SELECT max(ledger) FROM gpukeeper.ledgers g WHERE g.machine = l.machine)"
_LEDGER = """
SELECT g.shipped, l.at FROM gpukeeper.machines m
LEFT JOIN LATERAL (SELECT ledger, shipped FROM gpukeeper.ledgers g WHERE g.machine = m.name
    ORDER BY ledger DESC LIMIT 1) g ON true
LEFT JOIN gpukeeper.lines l ON l.machine = m.name AND l.ledger = g.ledger AND l.line = g.shipped
WHERE m.name = %s
"""
_OUTCOMES = """
SELECT l.machine || '/' || l.ledger, l.body::text FROM gpukeeper.lines l
WHERE l.machine = ANY(%(machines)s) AND l.at >= %(since)s AND l.at < %(until)s AND (l.type IN ('outcome', 'restore')
    OR l.type = 'noticed' AND (l.machine, l.key) IN (
        SELECT o.machine, o.key FROM gpukeeper.lines o
        WHERE o.machine = ANY(%(machines)s) AND o.at >= %(since)s AND o.type = 'outcome' AND o.result = 'reclaimed'))
ORDER BY l.at, l.machine, l.ledger, l.line
"""
_USAGE = """
SELECT hour, machine || '/' || device, body::text FROM gpukeeper.usage
WHERE machine = ANY(%(machines)s) AND hour > %(since)s - interval '1 hour' AND hour < %(until)s ORDER BY hour, 2
"""
_SIGNALS = """
SELECT s.signal, s.device, v.minute, v.mean FROM gpukeeper.series s
JOIN gpukeeper.signals v ON v.machine = s.machine AND v.series = s.series
WHERE s.machine = %s AND left(s.key, 200) = left(%s, 200) AND s.key = %s
    AND v.minute >= %s AND v.minute < now() + interval '1 hour'
ORDER BY s.signal, s.device, v.minute LIMIT 200000
"""


class CopiedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The journal of one machine as far as it is here. `newest`: time of its last line."""

    lines: int
    newest: datetime | None


class SignalMinute(msgspec.Struct, frozen=True):
    signal: str
    device: str
    minute: datetime
    mean: float | None


def copied_lines(connection: Connection, machine: str, wanted: LineFilter) -> list[tuple[int, Event]]:
    """The newest that fit, oldest first; of the machine's present ledger."""
    conditions, values = _conditions(wanted)
    question = (
        f"SELECT l.line, l.body::text FROM gpukeeper.lines l WHERE l.machine = %s AND l.{_NEWEST}"  # noqa: S608
        f"{''.join(f' AND {one}' for one in conditions)} ORDER BY l.line DESC"
    )
    most, found = wanted.last or PAGE, list[tuple[int, Event]]()
    with connection.transaction(), connection.cursor(name="lines") as cursor:
        cursor.itersize = PAGE if wanted.search else min(most, PAGE)
        cursor.execute(question.encode(), (machine, *values))
        for number, line in _decoded(cursor):
            if wanted.search is None or says(line, wanted.search):
                found.append((number, line))
            if len(found) >= most:
                break
    return found[::-1]


def copied_ledger(connection: Connection, machine: str) -> CopiedLedger:
    found = connection.execute(_LEDGER, (machine,)).fetchone()
    shipped, newest = found or (None, None)
    return CopiedLedger(lines=shipped or 0, newest=newest)


def outcomes(connection: Connection, machines: Sequence[str], since: datetime, until: datetime) -> Iterator[Event]:
    """Steps and their reversal, oldest first. Numbers of steps are made unique: each machine counts its own."""
    values = {"machines": list(machines), "since": since, "until": until}
    with connection.transaction(), connection.cursor(name="outcomes") as cursor:
        cursor.itersize = PAGE
        cursor.execute(_OUTCOMES, values)
        for where, line in _decoded(cursor):
            yield msgspec.structs.replace(line, step=f"{where}/{line.step}") if isinstance(line, Closed) else line


def hours(connection: Connection, machines: Sequence[str], since: datetime, until: datetime) -> Iterator[RecordedHour]:
    values = {"machines": list(machines), "since": since, "until": until}
    with connection.transaction(), connection.cursor(name="hours") as cursor:
        cursor.itersize = 5 * PAGE
        cursor.execute(_USAGE, values)
        yield from recorded_hours((hour, device, body) for hour, device, body in cursor)


def oldest_hour(connection: Connection, machines: Sequence[str]) -> int | None:
    """Hours since 1970."""
    found = connection.execute(
        "SELECT min(hour) FROM gpukeeper.usage WHERE machine = ANY(%s)", (list(machines),)
    ).fetchone()
    return None if found is None or found[0] is None else int(found[0].timestamp()) // 3600


def signal_minutes(connection: Connection, machine: str, key: str, since: datetime) -> list[SignalMinute]:
    return [SignalMinute(*row) for row in connection.execute(_SIGNALS, (machine, key, key, since)).fetchall()]


def _conditions(wanted: LineFilter) -> tuple[list[str], list[object]]:
    conditions: list[str] = []
    values: list[object] = []

    def add(condition: str, *more: object) -> None:
        conditions.append(condition)
        values.extend(more)

    if wanted.types:
        add("l.type = ANY(%s)", list(wanted.types))
    if wanted.owner is not None:
        add("l.owner = %s", storable(wanted.owner))
    if wanted.workload is not None:
        named = storable(wanted.workload)
        ending = _pattern(named.strip("/").lower())
        uid = "substr(l.key, length(l.platform) + length(l.place) + 3) = %s"
        add(f"(lower(l.workload) LIKE %s OR lower(l.workload) LIKE %s OR {uid})", ending, f"%/{ending}", named)
    if wanted.errors_only:
        add("l.error")
    if wanted.since is not None:
        add("l.at >= %s", wanted.since)
    if wanted.before is not None:
        add("l.line < %s", min(wanted.before, HIGHEST))
    if wanted.search is not None:
        text = storable(wanted.search)
        inside = f"%{_pattern(msgspec.json.encode(text).decode()[1:-1])}%"
        add("(l.body::text ILIKE %s OR l.workload ILIKE %s)", inside, f"%{_pattern(text)}%")
    return conditions, values


def _pattern(words: str) -> str:
    return words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _decoded(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, Event]]:
    for name, body in rows:
        try:
            yield name, decode(body, f"Line {name}")
        except LedgerError:
            continue


AT_ONCE = 6  # connections
READING = timedelta(seconds=20)
TESTED_AFTER = 5.0  # seconds without use after which a connection is tested first: the server may have been restarted
T = TypeVar("T")


class CopyUnavailable(KeeperError):
    """`begun`: the question may have reached the database."""

    def __init__(self, why: str, *, begun: bool) -> None:
        super().__init__(why)
        self.begun = begun


class CopyReader:
    def __init__(self, address: str, password_file: str | None, name: str) -> None:
        self._address, self._password_file, self._name = address, password_file, name
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Connection]] = []  # with the steady time of their last use
        self._turns = asyncio.Semaphore(AT_ONCE)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    async def ask(self, work: Callable[[Connection], T]) -> T:
        """Raises CopyUnavailable."""
        psycopg = load_driver()
        used: list[Connection] = []

        def run() -> T:
            connection = self._take()
            used.append(connection)
            try:
                found = work(connection)
            except BaseException:
                connection.close()
                raise
            with self._lock:
                self._idle.append((time.monotonic(), connection))
            return found

        async with self._turns:
            try:
                return await in_thread(run, READING, purpose="fleet database")
            except TimeoutError as error:
                for connection in used:
                    disconnect(connection)
                words = f"it did not reply within {READING.total_seconds():g} s"
                raise CopyUnavailable(words, begun=bool(used)) from error
            except (psycopg.Error, OSError) as error:
                raise CopyUnavailable(first_line(error), begun=bool(used)) from error

    def _take(self) -> Connection:
        psycopg = load_driver()
        while True:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
            if time.monotonic() - since < TESTED_AFTER and not connection.closed:
                return connection
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:
                connection.close()
            else:
                return connection
        return self._connect()

    def _connect(self) -> Connection:
        connection = connect(self._address, self._password_file, name=self._name)
        try:
            limit = f"{READING.total_seconds() - 2:g}s"
            connection.execute("SELECT set_config('statement_timeout', %s, false)", (limit,))
        except BaseException:
            connection.close()
            raise
        return connection


POLL = 5.0  # seconds between two rounds if nothing is announced
TOGETHER = 0.3  # seconds: views that change within them are read in one round
FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0  # seconds before the next attempt to connect
STUCK = 30.0  # seconds after which an answer of the database is no longer waited for
LARGEST_VIEW = 64 * 2**20  # characters
_HEADS = """
SELECT m.name, m.version, extract(epoch FROM now() - m.seen), extract(epoch FROM now() - v.at), v.seq
FROM gpukeeper.machines m LEFT JOIN gpukeeper.views v ON v.machine = m.name ORDER BY m.name
"""
_BODY = """
SELECT CASE WHEN length(body::text) <= %s THEN body::text END, seq FROM gpukeeper.views WHERE machine = %s
"""


class MachineHead(msgspec.Struct, frozen=True, kw_only=True):
    """Ages in seconds by the clock of the database; None: never. `seq`: number of its view."""

    machine: str
    version: str | None
    seen_ago: float | None
    view_ago: float | None
    seq: int | None


class Observer(Protocol):
    """Called in the watcher's thread."""

    def on_round(self, heads: tuple[MachineHead, ...]) -> None:
        """Every machine of the fleet."""
        ...

    def on_view(self, machine: str, body: str | None) -> None:
        """A view that is new or changed. None: it is too large."""
        ...

    def on_reply(self, request: int) -> None: ...

    def on_problem(self, words: str) -> None:
        """Why nothing is read; empty: all is well again."""
        ...


class Watcher:
    def __init__(
        self, address: str, password_file: str | None, observer: Observer, log: Callable[[str], None], name: str
    ) -> None:
        self._address, self._password_file, self._name = address, password_file, name
        self._observer, self._log = observer, log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-watcher", daemon=True)
        self._known: dict[str, int] = {}  # by machine: the number of the view that was read
        self._problem = ""
        self._connection: Connection | None = None
        self._working_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        self._stop.set()
        if self._connection is not None:
            disconnect(self._connection)
        self._thread.join(within)

    def check_stuck(self) -> None:
        """Called from outside now and then: a server that stopped answering does not end a wait by itself."""
        since, connection = self._working_since, self._connection
        if since is not None and time.monotonic() - since > STUCK:
            self._report(f"it did not reply within {STUCK:g} s")
            if connection is not None:
                disconnect(connection)

    def _run(self) -> None:
        wait = FIRST_WAIT
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                self._connected()
            except Exception as problem:
                if self._stop.is_set():
                    return
                self._report(_words(problem))
            finally:
                self._connection = self._working_since = None
            wait = FIRST_WAIT if time.monotonic() - begun > LONGEST_WAIT else min(2 * wait, LONGEST_WAIT)
            self._stop.wait(wait * random.uniform(0.5, 1.0))  # noqa: S311 - web servers must not return in step

    def _connected(self) -> None:
        """One connection, from beginning to end."""
        self._working_since = time.monotonic()
        with closing(connect(self._address, self._password_file, name=self._name)) as connection:
            self._connection = connection
            check_schema(connection)
            connection.execute("LISTEN gpukeeper_views")
            connection.execute("LISTEN gpukeeper_replies")
            while not self._stop.is_set():
                self._working_since = time.monotonic()
                self._round(connection)
                self._report("")
                self._working_since = None
                self._wait(connection)

    def _round(self, connection: Connection) -> None:
        heads = tuple(
            MachineHead(machine=name, version=version, seen_ago=_seconds(seen), view_ago=_seconds(at), seq=seq)
            for name, version, seen, at, seq in connection.execute(_HEADS).fetchall()
        )
        for one in heads:
            if one.seq is None or self._known.get(one.machine) == one.seq:
                continue
            found = connection.execute(_BODY, (LARGEST_VIEW, one.machine)).fetchone()
            if found is not None:
                self._observer.on_view(one.machine, found[0])
                self._known[one.machine] = found[1]
        self._observer.on_round(heads)

    def _wait(self, connection: Connection) -> None:
        """Until a view changes, or it is time to poll. Replies are passed on meanwhile."""
        end = time.monotonic() + POLL
        while (left := end - time.monotonic()) > 0 and not self._stop.is_set():
            for notice in connection.notifies(timeout=left, stop_after=1):
                if notice.channel == "gpukeeper_replies" and notice.payload.isdecimal():
                    self._observer.on_reply(int(notice.payload))
                elif notice.channel == "gpukeeper_views":
                    end = min(end, time.monotonic() + TOGETHER)

    def _report(self, words: str) -> None:
        if words != self._problem:
            self._problem = words
            self._log(f"the fleet database cannot be read: {words}" if words else "the fleet database is read")
        self._observer.on_problem(words)


def _seconds(value: object) -> float | None:
    return None if value is None else max(float(str(value)), 0.0)


def _words(problem: Exception) -> str:
    if isinstance(problem, KeeperError | OSError | load_driver().Error):
        return first_line(problem)
    return f"this is a bug in gpukeeper: {problem!r}"

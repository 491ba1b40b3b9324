"""The views of all machines as they change: one thread that listens to the fleet database, and polls it as well.

Whatever fails, it reports why, waits and connects again. What was read before stays what it was, and gets older.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import msgspec

from gpukeeper.ledger.copy.connect import connect, disconnect, first_line, load_driver
from gpukeeper.ledger.copy.migrate import check_schema
from gpukeeper.model.errors import KeeperError

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

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

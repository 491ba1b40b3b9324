"""Questions to the fleet database: over a few connections, in threads, each with a deadline. For the web server.

The database may be away, slow or hanging. Then a question fails with a sentence, and nothing else stops.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from gpukeeper.blocking import in_thread
from gpukeeper.ledger.copy.connect import connect, disconnect, first_line, load_driver
from gpukeeper.model.errors import KeeperError

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

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

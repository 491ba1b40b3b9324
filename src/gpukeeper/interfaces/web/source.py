"""Where the dashboard gets what it shows, and whom it asks: one daemon over the link that it gave to this process,
or the copy of a fleet.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import cast

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import (
    LARGEST,
    Answer,
    Change,
    Condition,
    Credentials,
    FromDaemon,
    Question,
    Revocations,
    SourceSettings,
    TlsPair,
    Welcome,
    frame,
    read_frame,
)
from gpukeeper.views.live import Delta, MachineView, patched

Listener = Callable[[str, Delta, MachineView], None]


class SourceLost(Exception):
    """The daemon does not answer."""


class Source(ABC):
    """`machines`: the newest view of each, by name; empty until the first arrives."""

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.machines: dict[str, MachineView] = {}
        self.condition = Condition()
        self._listeners: set[Listener] = set()

    @property
    @abstractmethod
    def revocations(self) -> int:
        """Another number than before: a login was revoked since, and whose login it is must be asked again."""

    @abstractmethod
    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        """Raises SourceLost when no answer can come."""

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls it with every change, until the returned function is called."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def change(self, delta: Delta, after: MachineView) -> None:
        self.machines[after.machine] = after
        for listener in tuple(self._listeners):
            listener(after.machine, delta, after)


_ANY = cast(type[FromDaemon], FromDaemon)
SECONDS = 180.0  # a stop may take its grace


class LinkedDaemon(Source):
    """Made by `connect`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        revocations: Revocations,
        welcome: Welcome,
    ) -> None:
        super().__init__(welcome)
        self._reader, self._writer, self._revocations = reader, writer, revocations
        self.account, self.tls = welcome.account, welcome.tls
        self.on_tls: Callable[[TlsPair], None] = lambda pair: None  # called with a renewed certificate
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = count(1)
        self._reading = asyncio.create_task(self._read())

    @property
    def revocations(self) -> int:
        return self._revocations.count

    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        number = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            if self._reading.done():
                raise SourceLost("the daemon has ended")
            self._writer.write(frame(Question(id=number, credentials=credentials, request=request, machine=machine)))
            await self._writer.drain()
            return await asyncio.wait_for(future, SECONDS)
        except (TimeoutError, ConnectionError) as error:
            raise SourceLost("the daemon did not answer") from error
        finally:
            del self._waiting[number]

    async def closed(self) -> None:
        """Returns when nothing can come any more."""
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while (message := await read_frame(self._reader, _ANY, LARGEST)) is not None:
                if isinstance(message, Change):
                    machine = message.delta.head.machine
                    before = None if message.whole else self.machines.get(machine)
                    self.change(message.delta, patched(before, message.delta))
                elif isinstance(message, Condition):
                    self.condition = message
                elif isinstance(message, Answer):
                    self._answered(message)
                elif isinstance(message, TlsPair):
                    self.on_tls(message)
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(SourceLost("the daemon has ended"))

    def _answered(self, answer: Answer) -> None:
        future = self._waiting.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)


async def connect(link: socket.socket, revocations: Revocations) -> LinkedDaemon:
    reader, writer = await asyncio.open_connection(sock=link, limit=2**20)
    welcome = await read_frame(reader, Welcome, LARGEST)
    if welcome is None:
        raise SourceLost("the daemon has ended")
    return LinkedDaemon(reader, writer, revocations, welcome)

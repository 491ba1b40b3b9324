"""One read for all concurrent callers. A caller gets a read that began after its call, never an older one.

Many steps may run at the same time for the price of one: while a read runs, later callers wait for the next one and
share it. Nothing is cached.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
GATHER = 0.05  # seconds; callers of the last read soon request the next one


class _Read(Generic[T]):
    """One that may not have begun yet; then more may join."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: T
        self.error: BaseException | None = None

    def get(self) -> T:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class Shared(Generic[T]):
    """A blocking read, called by threads. Its result is shared and must not be changed. Reads with other arguments are
    separate."""

    def __init__(self, read: Callable[..., T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._next: dict[tuple[Hashable, ...], _Read[T]] = {}  # not begun
        self._turn: dict[tuple[Hashable, ...], threading.Lock] = {}  # one at a time; the others gather meanwhile

    def __call__(self, *about: Hashable) -> T:
        with self._lock:
            read = self._next.get(about)
            if read is not None:
                turn = None
            else:
                read = self._next[about] = _Read()
                turn = self._turn.setdefault(about, threading.Lock())
        if turn is not None:
            self._run(read, turn, about)
        return read.get()

    def _run(self, read: _Read[T], turn: threading.Lock, about: tuple[Hashable, ...]) -> None:
        waits = turn.locked()
        with turn:
            if waits:
                threading.Event().wait(GATHER)
            with self._lock:
                del self._next[about]  # later callers came after it began
            try:
                read.result = self._read(*about)
            except BaseException as error:  # every waiting caller gets it
                read.error = error
            finally:
                read.done.set()


class SharedQuestion(Generic[T]):
    """The same for awaited reads. A cancelled caller does not cancel the read for others."""

    def __init__(self, ask: Callable[..., Awaitable[T]]) -> None:
        self._ask = ask
        self._next: dict[tuple[Hashable, ...], asyncio.Task[T]] = {}
        self._under_way: dict[tuple[Hashable, ...], asyncio.Task[T]] = {}

    async def __call__(self, *about: Hashable) -> T:
        loop = asyncio.get_running_loop()
        question = self._next.get(about)
        if question is None or question.done() or question.get_loop() is not loop:  # else of a loop that has ended
            before = self._under_way.get(about)
            if before is not None and before.get_loop() is not loop:
                before = None
            question = self._next[about] = asyncio.create_task(self._run(before, about))
        return await asyncio.shield(question)

    async def _run(self, before: asyncio.Task[T] | None, about: tuple[Hashable, ...]) -> T:
        if before is not None:
            await asyncio.wait([before])
            await asyncio.sleep(GATHER)
        mine = self._under_way[about] = self._next.pop(about)
        try:
            return await self._ask(*about)
        finally:
            if self._under_way.get(about) is mine:
                del self._under_way[about]

"""Virtual time: an event loop that jumps to the next timer instead of waiting for it, and a clock that reads it."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
BEGIN = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)  # a Monday morning


class _JumpingSelector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.loop.skip(timeout)
        return super().select(None if timeout is None else 0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__(self._make_selector())

    def _make_selector(self) -> selectors.BaseSelector:
        selector = _JumpingSelector()
        selector.loop = self
        return selector

    def time(self) -> float:
        return self._virtual

    def skip(self, seconds: float) -> None:
        self._virtual += seconds


class _PacedSelector(selectors.DefaultSelector):
    loop: PacedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop.paced:
            return super().select(None if timeout is None else timeout / self.loop.pace)
        if timeout:
            self.loop.skip(timeout)
        return super().select(None if timeout is None else 0)


class PacedLoop(VirtualLoop):
    """Jumps until `keep_pace` is called; from then on `pace` of its seconds pass in a real one."""

    def __init__(self) -> None:
        self.pace = 1.0
        self.paced = False
        self._since = 0.0
        super().__init__()

    def keep_pace(self, pace: float) -> None:
        self.pace, self.paced, self._since = pace, True, time.monotonic()

    def time(self) -> float:
        return self._virtual + (time.monotonic() - self._since) * self.pace if self.paced else self._virtual

    def _make_selector(self) -> selectors.BaseSelector:
        selector = _PacedSelector()
        selector.loop = self
        return selector


class VirtualClock:
    """Reads the loop. `skew` is how wrong the clock is, which a simulated fault may change."""

    def __init__(self, loop: asyncio.AbstractEventLoop, begin: datetime = BEGIN) -> None:
        self._loop = loop
        self._begin = begin
        self.skew = timedelta()

    def true_now(self) -> datetime:
        return self._begin + timedelta(seconds=self._loop.time())

    def now(self) -> datetime:
        return self.true_now() + self.skew


def run_virtually(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run to the end in virtual time and close the loop."""
    try:
        return loop.run_until_complete(main)
    except KeyboardInterrupt:
        # Each task that it cancelled would be reported with a traceback when it is collected.
        loop.set_exception_handler(lambda loop, about: None)
        raise
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

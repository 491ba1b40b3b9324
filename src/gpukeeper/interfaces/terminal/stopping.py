"""Ctrl-C and SIGTERM while something runs: the first one asks it to end, a second one ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gpukeeper.interfaces.terminal.messages import print_message


@contextmanager
def until_stopped(stop: asyncio.Event, words: str) -> Iterator[None]:
    """Inside a running event loop. `words`: printed at the first one."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def ask() -> None:
        stop.set()
        print_message(words)
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

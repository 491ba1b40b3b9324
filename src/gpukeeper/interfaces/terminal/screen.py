"""The terminal as a full screen: single keys, resizes and signals; its mode is restored however the program ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from gpukeeper.interfaces.terminal.colours import colours

QUIT, INTERRUPTED, ENDED, RESIZED = "quit", "interrupted", "ended", "resized"
_SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: ENDED, signal.SIGHUP: ENDED, signal.SIGWINCH: RESIZED}
_KEYS = {
    b"q": QUIT,
    b"Q": QUIT,
    b"\x03": INTERRUPTED,
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b" ": "page down",
    b"\x1b[H": "home",
    b"g": "home",
}


class Screen:
    """Draws, and waits for the next key or signal. `wake` may be called from another thread."""

    def __init__(self) -> None:
        self._console = Console(no_color=not colours(sys.stdout))
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False)
        self._in, self._out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def size(self) -> tuple[int, int]:
        return self._console.size.width, self._console.size.height

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it is woken anyway
            os.write(self._out, b"\0")

    def wait(self, seconds: float) -> list[str]:
        """Keys and signals since the last call, by name; after that time none."""
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([stdin, self._in], [], [], max(0.0, seconds))
        events: list[str] = []
        if self._in in ready:
            received = os.read(self._in, 1024)
            events += (name for number, name in _SIGNALS.items() if number in received)
        if stdin in ready:
            keys = _read(stdin)
            events += _named(keys) if keys else [ENDED]  # the terminal is gone
        return events

    @contextmanager
    def opened(self) -> Iterator[Screen]:
        """Without echo and line editing. Ctrl-Z is off: a stopped program would leave the terminal in this mode."""
        stdin = sys.stdin.fileno()
        with ExitStack() as undo:
            undo.callback(os.close, self._in)
            undo.callback(os.close, self._out)
            before = termios.tcgetattr(stdin)
            undo.callback(_restore, stdin, before)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._out, warn_on_full_buffer=False))
            for number in _SIGNALS:
                undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            tty.setcbreak(stdin)
            mode = termios.tcgetattr(stdin)
            mode[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
            undo.callback(self._leave)
            self._live.start()
            yield self

    def _leave(self) -> None:
        with suppress(OSError):  # a terminal that is gone
            self._live.stop()


def _read(stdin: int) -> bytes:
    try:
        return os.read(stdin, 64)
    except OSError:
        return b""


def _restore(stdin: int, mode: list[Any]) -> None:
    with suppress(termios.error):  # a terminal that is gone
        termios.tcsetattr(stdin, termios.TCSADRAIN, mode)


def _named(keys: bytes) -> list[str]:
    """Of one read: a key that sends several bytes comes whole; others one by one."""
    if keys in _KEYS:
        return [_KEYS[keys]]
    if keys.startswith(b"\x1b"):
        return []
    return [_KEYS.get(bytes([one]), chr(one)) for one in keys]

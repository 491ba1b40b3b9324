"""The real command on a terminal of its own: a pseudo-terminal, as wide as a test wants it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Mapping

from tests import forked
from tests.patience import PATIENCE

SIZE = struct.Struct("HHHH")


def on_terminal(words: list[str], env: Mapping[str, str], columns: int = 60) -> tuple[int, str]:
    """The exit code, and what stood on the screen. Messages on stderr go to the same terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, SIZE.pack(50, columns, 0, 0))
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # line ends as the program wrote them
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    nothing = os.open(os.devnull, os.O_RDONLY)
    process = forked.start("gpukeeper", words, env, (nothing, theirs, theirs))
    os.close(nothing)
    os.close(theirs)
    shown = read_all(ours)
    code = process.wait(timeout=PATIENCE)
    os.close(ours)
    return code, shown


def read_all(terminal: int) -> str:
    """Until whoever writes there has gone; Linux reports that as an error."""
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            part = b""
        if not part:
            return found.decode()
        found += part

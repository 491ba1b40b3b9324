"""Writes to the terminals that given processes sit at, those inside a workload included. No file is made anywhere.

A terminal is reached through what the process itself has open, never by a name inside the workload: a link planted
there would be followed on the host. Whose processes these are is the caller's business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from gpukeeper.notify.terminals import TERMINAL_MAJORS, as_written

STANDARD = (0, 1, 2)  # input, output, errors: where a person sits


def notify_inside(pids: Sequence[int], message: str, proc: str = "/proc") -> int:
    """How many terminals took the whole message. Never blocks: one that is full or stopped does not get it."""
    text = as_written(message)
    notified: set[tuple[int, int, int]] = set()
    taken = 0
    for pid in pids:
        for number in STANDARD:
            taken += _write(f"{proc}/{pid}/fd/{number}", text, notified)
    return taken


def _write(path: str, text: bytes, notified: set[tuple[int, int, int]]) -> bool:
    try:
        # Checked before opening, too: opening some devices acts on them.
        if not _is_terminal(os.stat(path)):  # noqa: PTH116 - a link of /proc, resolved by the kernel
            return False
        fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        facts = os.fstat(fd)
        # Every workload may have terminals of its own with the same number; the filesystem distinguishes them.
        terminal = (facts.st_dev, facts.st_ino, facts.st_rdev)
        if terminal in notified or not _is_terminal(facts) or not os.isatty(fd):
            return False
        notified.add(terminal)
        return os.write(fd, text) == len(text)
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_terminal(facts: os.stat_result) -> bool:
    return stat.S_ISCHR(facts.st_mode) and os.major(facts.st_rdev) in TERMINAL_MAJORS

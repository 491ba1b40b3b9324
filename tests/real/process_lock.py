"""Tests that hide what processes have open, and tests that need to know it, do not run at the same time.

Several workers of pytest run on one machine, and each test of a host sees the processes of all others.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FILE = f"gpukeeper-tests-{os.getuid()}-processes"
_TURN, _LOCK = (Path(tempfile.gettempdir()) / f"{_FILE}.{name}" for name in ("turn", "lock"))


@contextmanager
def seeing_processes() -> Iterator[None]:
    """Together with others that only read them."""
    with _held(fcntl.LOCK_SH):
        yield


@contextmanager
def hiding_processes() -> Iterator[None]:
    """Alone."""
    with _held(fcntl.LOCK_EX):
        yield


@contextmanager
def _held(how: int) -> Iterator[None]:
    """Whoever waits has the turn, so that no stream of readers keeps it waiting."""
    with _LOCK.open("a") as lock:
        with _TURN.open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(lock, how)
        yield

"""How long a test waits for what must happen."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

PATIENCE = 300.0
"""Seconds until a test gives up on something that it expects: an answer, the end of a program, a state.

Long enough for a machine that is busy with something else, since a deadline that load can reach makes a test fail for
no fault of the code. It costs nothing if all is well, and a hang is still found. It is below the `timeout` of pytest in
pyproject.toml, so that the test itself reports what did not happen. A time limit that is the behaviour under test is
not this one: it is virtual, or so short that it always passes.
"""

PATIENT = timedelta(seconds=PATIENCE)
"""The same, for what takes a timedelta."""


def growing(first: float) -> Iterator[float]:
    """Seconds, each time four times as many, for a time limit that must end something that has begun: how long a
    program takes to begin depends on the machine. The test stops at the first with which it had begun.
    """
    seconds = first
    while seconds < PATIENCE:
        yield seconds
        seconds *= 4

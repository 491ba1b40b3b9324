"""`pause` stops all acting at once: no step begins between a pause and its resume."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.event import Intended, Paused, Resumed
from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    """Asked before each step and again after its evidence: no intent is written while paused."""
    paused = False
    for entry in run.world.log:
        match entry.line:
            case Paused():
                paused = True
            case Resumed():
                paused = False
            case Intended() if paused:
                yield f"step {entry.step} began while everything was paused"
            case _:
                pass

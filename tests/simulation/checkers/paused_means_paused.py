"""`pause` stops all acting at once: no step begins between a pause and its resume."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.event import Intended, Paused, Resumed
from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    """The pause is asked before each step; a step that had begun (its evidence, its intent) may end."""
    paused_at: int | None = None
    begun = 0
    for i, entry in enumerate(run.world.log):
        match entry.line:
            case Paused():
                paused_at, begun = i, 0
            case Resumed():
                paused_at = None
            case Intended() if paused_at is not None:
                begun += 1
                if begun > 1:
                    yield f"step {entry.step} began while everything was paused"
            case _:
                pass

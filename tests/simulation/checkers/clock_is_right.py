"""Nothing is acted on by a clock that jumped, also not by a process that began after the jump."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    """The clock is asked after the last look, so a jump before that look is known. It is right again within 10 minutes,
    and doubted for 15."""
    jumped: int | None = None
    for number, entry in enumerate(run.world.log):
        if entry.effect == "clock jumps":
            jumped = number if jumped is None else jumped
        elif entry.effect == "clock is right":
            jumped = None
        elif entry.kind == "act" and jumped is not None:
            look = run.last_look(entry.uid, number)
            if look is not None and look[0] > jumped:
                since = run.world.log[jumped].at
                yield f"step {entry.step} was taken at {entry.at:%H:%M:%S} by a clock that jumped at {since:%H:%M:%S}"

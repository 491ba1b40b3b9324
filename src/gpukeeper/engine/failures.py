"""How failures are described, and how often an identical line is logged."""

from __future__ import annotations

import traceback
from datetime import timedelta
from pathlib import Path

from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import KeeperError

QUIET = timedelta(minutes=15)  # for this long an identical line is counted instead of logged
LINES_KEPT = 200
LONGEST = 300  # characters of a foreign exception


def bug_words(problem: Exception) -> str:
    """One line: what it is, and where in the code it came from."""
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    text = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    return f"this is a bug in gpukeeper, please report it: {text[:LONGEST]}{where}"


def pass_stopped(place: str, problem: Exception) -> str:
    why = str(problem) if isinstance(problem, KeeperError) else bug_words(problem)
    return f"the pass on {place} stopped: {why}. Nothing more was touched there; the next pass continues."


class LogThrottle:
    """Lets an identical line through once in a while, with the number of times it was held back."""

    def __init__(self) -> None:
        self._admitted: dict[str, tuple[float, int]] = {}  # by line: when it was last let through, and how often since

    def admit(self, line: str, steady: float) -> str | None:
        """The line to log now; None: it was logged a moment ago."""
        last, held_back = self._admitted.pop(line, (None, 0))
        quiet = QUIET.total_seconds()
        if last is not None and steady - last < quiet:
            self._admitted[line] = (last, held_back + 1)
            return None
        self._admitted[line] = (steady, 0)
        if len(self._admitted) > LINES_KEPT:
            del self._admitted[next(iter(self._admitted))]
        if last is None or not held_back:
            return line
        span = in_words(timedelta(seconds=round(steady - last)))
        return f"{line} ({held_back + 1} times in the last {span})"

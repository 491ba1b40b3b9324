"""Waits for what an engine does by itself, and shows what there is if it does not happen."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], shown: Callable[[], object], seconds: float = 60) -> None:
    late = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < late, shown()
        time.sleep(0.1)

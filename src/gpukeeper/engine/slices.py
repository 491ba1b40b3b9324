"""Long work of the event loop in slices: passes, measurements and requests run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from gpukeeper.blocking import real_seconds

SLICE = 0.01  # seconds


async def in_slices(work: Iterator[None], most: float = float("inf")) -> float:
    """Until it ends, or has taken so many seconds. Returns the seconds that it took, without those of others."""
    clock, spent = asyncio.get_running_loop().time, 0.0
    slice_, most = real_seconds(SLICE), real_seconds(most)
    begun = clock()
    for _ in work:
        now = clock()
        if now - begun >= slice_:
            spent += now - begun
            if spent >= most:
                return spent
            await asyncio.sleep(0)
            begun = clock()
    return spent + clock() - begun

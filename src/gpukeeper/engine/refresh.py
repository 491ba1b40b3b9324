"""Shows the effect of a request in the live view at once, without waiting for the next pass."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gpukeeper.engine.find import read_subject
from gpukeeper.engine.keeper import Keeper
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Gone

MOST = 5  # objects that one request may be about
DEADLINE = 5.0  # seconds: the reply to the request waits for this


async def refresh(keeper: Keeper, book: Rulebook, words: str) -> None:
    """Reads what a request was about again. If that fails in any way, the next pass shows it: the request was executed,
    and its reply must report that."""
    if not keeper.live.enabled or not words:
        return
    with suppress(Exception):
        async with asyncio.timeout(DEADLINE):
            for ref in keeper.live.named(words)[:MOST]:
                await _read_again(keeper, book, ref)


async def _read_again(keeper: Keeper, book: Rulebook, ref: Ref) -> None:
    found = await read_subject(keeper, book, ref)
    if found is not None:
        now = keeper.clock.now()
        keeper.live.renew(found.platform, found.view, decide(found.view, book, now), book, now)
        return
    platform = keeper.platform_at(ref)
    if platform is not None and isinstance(await platform.read(ref), Gone):
        keeper.live.remove(ref)

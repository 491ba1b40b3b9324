"""Shows the effect of a request in the live view at once, without waiting for the next pass."""

from __future__ import annotations

from contextlib import suppress

from gpukeeper.engine.find import read_subject
from gpukeeper.engine.keeper import Keeper
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.subject import Gone

MOST = 5  # objects that one request may be about


async def refresh(keeper: Keeper, book: Rulebook, words: str) -> None:
    """Reads what a request was about again. If that fails, the next pass shows it."""
    if not keeper.live.enabled or not words:
        return
    for ref in keeper.live.named(words)[:MOST]:
        with suppress(KeeperError):
            found = await read_subject(keeper, book, ref)
            if found is None:
                platform = keeper.platform_at(ref)
                if platform is not None and isinstance(await platform.read(ref), Gone):
                    keeper.live.remove(ref)
            else:
                now = keeper.clock.now()
                keeper.live.renew(found.platform, found.view, decide(found.view, book, now), book, now)

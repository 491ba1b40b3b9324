"""Live updates: server-sent events with the tiles that changed, rendered.

A change wakes every open page. Which tiles a page shows follows from its address, so that it is sent only those; what
pages with the same address and the same rights have in common is made once. A reader that is too slow misses states in
between, never the newest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.fleet import counted, groups, readable, selection_of
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.interfaces.web.selection import Selection, choose
from gpukeeper.interfaces.web.source import SourceLost
from gpukeeper.views.live import Delta, GpuTile, MachineView

SOONEST = 0.3  # seconds between two events of one page
QUIET = 20.0  # seconds: then a comment, so that a proxy keeps the connection and a dead one is noticed
MOST, MOST_EACH = 1000, 30  # open pages; of one person or address


class Snapshot(msgspec.Struct, frozen=True):
    """What one page shows."""

    order: tuple[str, ...]  # ids of its tiles
    tiles: dict[str, GpuTile]
    counts: tuple[tuple[str, int], ...]


class Feed:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._version = 0
        self._changed = asyncio.Event()
        self._made: dict[tuple[Selection, str, bool], Snapshot] = {}  # of this version
        self._rendered: dict[GpuTile, str] = {}
        self._open: Counter[str] = Counter()
        site.source.listen(self._on_change)

    def _on_change(self, machine: str, delta: Delta, view: MachineView) -> None:
        self._version += 1
        self._made.clear()
        self._rendered.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def events(self, request: HttpRequest) -> Response:
        site = self._site
        visitor = await site.visitor(request)
        if not visitor.logged_in and not site.source.settings.anonymous:
            raise HTTPException(401, "Log in first.")
        who = visitor.person.name or visitor.credentials.address
        if self._open[who] >= MOST_EACH or self._open.total() >= MOST:
            raise HTTPException(429, "Too many open pages. Close some of them.")
        wanted = selection_of(request)
        return StreamingResponse(
            self._stream(visitor, wanted, who),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _stream(self, visitor: Visitor, wanted: Selection, who: str) -> AsyncIterator[str]:
        self._open[who] += 1
        try:
            shown, version = self._snapshot(visitor, wanted), self._version
            yield "retry: 3000\n\n"
            while True:
                changed = self._changed
                if version == self._version:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), QUIET)
                if not await self._is_still(visitor):
                    return  # logged out, or with other rights: the page connects again
                if version == self._version:
                    yield ": nothing changed\n\n"
                    continue
                version = self._version
                before, shown = shown, self._snapshot(visitor, wanted)
                event = self._event(before, shown)
                if event:
                    yield event
                await asyncio.sleep(SOONEST)
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]

    async def _is_still(self, visitor: Visitor) -> bool:
        try:
            return await self._site.person(visitor.credentials) == visitor.person
        except SourceLost:
            return False

    def _snapshot(self, visitor: Visitor, wanted: Selection) -> Snapshot:
        person = visitor.person
        key = (wanted, "" if person.admin else person.name, person.admin)
        found = self._made.get(key)
        if found is None:
            views = readable(self._site, visitor)
            tiles = [one for _, _, some in groups(choose(views, wanted), wanted) for one in some]
            counts = tuple(counted([one for view in views for one in view.gpus]))
            found = Snapshot(tuple(one.id for one in tiles), {one.id: one for one in tiles}, counts)
            self._made[key] = found
        return found

    def _event(self, before: Snapshot, after: Snapshot) -> str:
        if before.order != after.order:
            return "event: list\ndata: {}\n\n"
        changed = [one for id_, one in after.tiles.items() if before.tiles[id_] != one]
        if not changed and before.counts == after.counts:
            return ""
        body = {"tiles": {one.id: self._tile(one) for one in changed}, "counts": dict(after.counts)}
        return f"event: tiles\ndata: {msgspec.json.encode(body).decode()}\n\n"

    def _tile(self, one: GpuTile) -> str:
        found = self._rendered.get(one)
        if found is None:
            template = self._site.templates.get_template("tile.html")
            found = self._rendered[one] = template.render(one=one)
        return found

"""Live updates: server-sent events with the tiles that changed, rendered.

A change wakes every open page. Which tiles a page shows follows from its address, so that it is sent only those; what
pages with the same address and the same rights have in common is made once. A reader that is too slow misses states in
between, never the newest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from gpukeeper.interfaces.link import Person
from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.fleet import counted, is_summary, selection_of, summary_html
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.interfaces.web.selection import Selection, choose
from gpukeeper.interfaces.web.source import SourceLost
from gpukeeper.views.live import Delta, GpuTile, MachineView

SOONEST = 0.3  # seconds between two events of one page
QUIET = 20.0  # seconds: then a comment, so that a proxy keeps the connection and a dead one is noticed
MOST, MOST_EACH = 1000, 30  # open pages; of one person or address


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """What one page shows, before anything is removed that its reader may not see. `rows`: the summary by place, which
    has no tiles."""

    order: tuple[str, ...]  # ids of its tiles
    tiles: dict[str, GpuTile]
    counts: tuple[tuple[str, int], ...]
    rows: str = ""


class Feed:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._version = 0
        self._changed = asyncio.Event()
        self._made: dict[Selection, Snapshot] = {}  # of this version
        self._events: dict[tuple[Snapshot, Snapshot, str], bytes] = {}  # to this version, by reader
        self._open: Counter[str] = Counter()
        site.source.listen(self._on_change)

    def _on_change(self, machine: str, delta: Delta, view: MachineView) -> None:
        self._version += 1
        self._made.clear()
        self._events.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def events(self, request: HttpRequest) -> Response:
        site = self._site
        visitor = await site.visitor(request)
        if not site.may_read(visitor):
            raise HTTPException(401, "Log in first.")
        who = visitor.who
        site.limit(site.reads, who, "Too many requests.")
        if self._open[who] >= MOST_EACH or self._open.total() >= MOST:
            site.refused["open pages"] += 1
            raise HTTPException(429, "Too many open pages. Close some of them.", headers={"retry-after": "30"})
        wanted = selection_of(request)
        return StreamingResponse(
            self._stream(visitor, wanted, who),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _stream(self, visitor: Visitor, wanted: Selection, who: str) -> AsyncIterator[bytes]:
        self._open[who] += 1
        try:
            shown, version = self._snapshot(wanted), self._version
            yield b"retry: 3000\n\n"
            while True:
                changed = self._changed
                if version == self._version:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), QUIET)
                if not await self._is_still(visitor):
                    return  # logged out, or with other rights: the page connects again
                if version == self._version:
                    yield b": nothing changed\n\n"
                    continue
                version = self._version
                before, shown = shown, self._snapshot(wanted)
                event = self._event(before, shown, visitor.person)
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

    def _snapshot(self, wanted: Selection) -> Snapshot:
        """Which tiles are shown, and in which order, does not depend on who reads them."""
        found = self._made.get(wanted)
        if found is None:
            machines = self._site.source.machines
            views = [machines[name] for name in sorted(machines)]
            everything = [one for view in views for one in view.gpus]
            counts = tuple(counted(everything))
            if is_summary(len(everything), wanted):
                found = Snapshot((), {}, counts, summary_html(self._site, views, wanted))
            else:
                tiles = {one.id: one for _, one in choose(views, wanted).gpus}
                found = Snapshot(tuple(tiles), tiles, counts)
            self._made[wanted] = found
        return found

    def _event(self, before: Snapshot, after: Snapshot, person: Person) -> bytes:
        """Made once for all pages that show the same before and after, and whose readers may see the same of it."""
        if before.order != after.order or bool(before.rows) != bool(after.rows):
            return b"event: list\ndata: {}\n\n"
        changed = [one for id_, one in after.tiles.items() if (was := before.tiles[id_]) is not one and was != one]
        if not changed and (before.counts, before.rows) == (after.counts, after.rows):
            return b""
        reader = _reader(changed, person)
        found = self._events.get((before, after, reader))
        if found is None:
            readers = self._site.readers
            tiles = {one.id: str(readers.html(readers.tile(one, person))) for one in changed}
            body = {"tiles": tiles, "counts": dict(after.counts), "rows": after.rows}
            found = b"event: tiles\ndata: " + msgspec.json.encode(body) + b"\n\n"
            self._events[before, after, reader] = found
        return found


def _reader(changed: Sequence[GpuTile], person: Person) -> str:
    """Readers of which none may see more of these tiles than the others have the same name here."""
    if person.admin:
        return "admin\0"
    return person.name if person.name and any(one.owner == person.name for one in changed) else ""

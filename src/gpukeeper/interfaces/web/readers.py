"""What readers may see, made once: rows without what others may not see, and tiles as HTML.

What a row becomes depends on the row, and on whether its reader may see all of it. So it is made once for all readers,
and kept until the row changes.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Template
from markupsafe import Markup

from gpukeeper.interfaces.link import Person
from gpukeeper.views.live import GpuTile, MachineView, WorkloadLine, for_reader, reduced, reduced_line

VIEWS = 64  # of readers that are kept
ROWS = 100_000


class Readers:
    def __init__(self, tile: Template) -> None:
        self._tile = tile
        self._views: dict[tuple[str, str], tuple[MachineView, MachineView]] = {}  # by machine and person
        self._tiles: dict[str, tuple[GpuTile, GpuTile]] = {}  # by id: a tile, and what others see of it
        self._lines: dict[str, tuple[WorkloadLine, WorkloadLine]] = {}
        self._html: dict[tuple[str, bool], tuple[GpuTile, Markup]] = {}

    def view(self, view: MachineView, person: Person) -> MachineView:
        if person.admin:
            return view
        key = (view.machine, person.name)
        source, found = self._views.pop(key, (None, None))
        if found is None or source is not view:
            found = for_reader(view, person.name or "\0", admin=False, less=self._less, less_line=self._less_line)
        self._views[key] = (view, found)
        if len(self._views) > VIEWS:
            del self._views[next(iter(self._views))]
        return found

    def tile(self, tile: GpuTile, person: Person) -> GpuTile:
        return tile if person.admin or (person.name and tile.owner == person.name) else self._less(tile)

    def html(self, tile: GpuTile) -> Markup:
        """Of a tile that its reader may see."""
        known = self._tiles.get(tile.id)
        key = (tile.id, known is not None and known[1] is tile)
        source, found = self._html.get(key, (None, Markup()))
        if source is not tile:
            _bound(self._html)
            found = Markup(self._tile.render(one=tile))  # noqa: S704 - a template that escapes
            self._html[key] = (tile, found)
        return found

    def _less(self, tile: GpuTile) -> GpuTile:
        source, found = self._tiles.get(tile.id, (None, tile))
        if source is not tile:
            _bound(self._tiles)
            found = reduced(tile)
            self._tiles[tile.id] = (tile, found)
        return found

    def _less_line(self, line: WorkloadLine) -> WorkloadLine:
        source, found = self._lines.get(line.id, (None, line))
        if source is not line:
            _bound(self._lines)
            found = reduced_line(line)
            self._lines[line.id] = (line, found)
        return found


def _bound(rows: dict[Any, Any]) -> None:
    """Rows that are gone are forgotten with all others now and then."""
    if len(rows) >= ROWS:
        rows.clear()

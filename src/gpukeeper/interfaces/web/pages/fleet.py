"""Every GPU of every machine: the first page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.interfaces.web.selection import SORTS, STATES, Chosen, Selection, choices, choose, read_selection
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuTile, MachineView

SUMMARY_FROM = 200  # GPUs; with more of them the first page is a summary by place


class PlaceSummary(msgspec.Struct, frozen=True):
    machine: str
    place: str
    counts: Counter[str]

    @property
    def total(self) -> int:
        return self.counts.total()


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    wanted = selection_of(request)
    views = readable(site, visitor)
    chosen = choose(views, wanted)
    wanted = msgspec.structs.replace(wanted, page=chosen.page)
    everything = [one for view in views for one in view.gpus]
    summarised = is_summary(len(everything), wanted)
    return site.page(
        request,
        visitor,
        "fleet.html",
        views=views,
        wanted=wanted,
        chosen=chosen,
        groups=() if summarised else groups(chosen, wanted),
        places=summaries(views) if summarised else (),
        counts=counted(everything),
        total=len(everything),
        unmeasured=sum(is_unmeasured(one) for one in everything),
        offered=choices(views),
        states=STATES,
        sorts=SORTS,
    )


async def rows(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """Only the tiles, or the summary, for a page that is open already."""
    wanted, views = selection_of(request), readable(site, visitor)
    if is_summary(sum(len(view.gpus) for view in views), wanted):
        body = summary_html(site, views, wanted)
    else:
        found = groups(choose(views, wanted), wanted)
        body = site.templates.get_template("tiles.html").render(groups=found, visitor=visitor, tile=site.readers.html)
    return HTMLResponse(body, headers={"cache-control": "no-store"})


def is_summary(total: int, wanted: Selection) -> bool:
    """Until a filter or an order is chosen."""
    return total > SUMMARY_FROM and not wanted.filtered and wanted.sort == SORTS[0]


def summary_html(site: Site, views: Sequence[MachineView], wanted: Selection) -> str:
    """The GPUs of each place by state; the same for every reader."""
    template = site.templates.get_template("places.html")
    return template.render(places=summaries(views), states=STATES, wanted=wanted)


def selection_of(request: HttpRequest) -> Selection:
    try:
        return read_selection(request.query_params)
    except ValueError as problem:
        raise HTTPException(400, f"The address of this page is not valid: {problem}.") from problem


def readable(site: Site, visitor: Visitor) -> list[MachineView]:
    """What this visitor may see, by name of the machine."""
    machines = site.source.machines
    return [site.readers.view(machines[name], visitor.person) for name in sorted(machines)]


def groups(chosen: Chosen, wanted: Selection) -> list[tuple[str, str, list[GpuTile]]]:
    """By machine and place, unless another order was asked for. An only machine is not named."""
    if wanted.sort != "place":
        return [("", "", [one for _, one in chosen.gpus])] if chosen.gpus else []
    several = len({machine for machine, _ in chosen.gpus}) > 1
    found = groupby(chosen.gpus, key=lambda pair: (pair[0], pair[1].place))
    return [(machine if several else "", place, [one for _, one in pairs]) for (machine, place), pairs in found]


def is_unmeasured(one: GpuTile) -> bool:
    """Held by a workload, and its use could not be measured."""
    return bool(one.key) and isinstance(one.use, Unknown) and one.as_of is None


def counted(gpus: Sequence[GpuTile]) -> list[tuple[str, int]]:
    found = Counter(one.state.value for one in gpus)
    return [(name, found[name]) for name in STATES if found[name]]


def summaries(views: Sequence[MachineView]) -> list[PlaceSummary]:
    found: dict[tuple[str, str], Counter[str]] = {}
    for view in views:
        for one in view.gpus:
            found.setdefault((view.machine, one.place), Counter())[one.state.value] += 1
    return [PlaceSummary(machine, place, counts) for (machine, place), counts in sorted(found.items())]

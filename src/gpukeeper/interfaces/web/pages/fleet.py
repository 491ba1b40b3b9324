"""Every GPU of every machine: the first page. And which GPUs and workloads any page shows: filters, order and
pages, from the query of its address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from urllib.parse import urlencode

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.lifecycle.forecast import act_of
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuState, GpuTile, MachineView, WorkloadLine

PAGE = 500
SORTS = ("place", "use", "owner", "next", "since")
WORKLOAD_SORTS = ("place", "owner", "next", "since")
STATES = tuple(one.value for one in GpuState)
UNKNOWN_OWNER = "unknown"


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Empty: no filter. An owner of `unknown` selects what has none."""

    machine: str = ""
    place: str = ""
    platform: str = ""
    owner: str = ""
    class_: str = ""
    state: str = ""
    text: str = ""
    sort: str = "place"
    page: int = 1

    @property
    def filtered(self) -> bool:
        return any((self.machine, self.place, self.platform, self.owner, self.class_, self.state, self.text))

    def query(self, **changes: object) -> str:
        """As a query string; what has its default is left out."""
        wanted = msgspec.structs.replace(self, **changes)
        found = {
            name: getattr(wanted, field)
            for field, name in _NAMES.items()
            if getattr(wanted, field) != getattr(_DEFAULT, field)
        }
        return f"?{urlencode(found)}" if found else "?"


_NAMES = {
    "machine": "machine",
    "place": "place",
    "platform": "platform",
    "owner": "owner",
    "class_": "class",
    "state": "state",
    "text": "q",
    "sort": "sort",
    "page": "page",
}
_DEFAULT = Selection()


def read_selection(query: Mapping[str, str]) -> Selection:
    """Raises ValueError with a sentence."""
    found = {field: query[name].strip()[:200] for field, name in _NAMES.items() if query.get(name, "").strip()}
    page = found.pop("page", "1")
    if not (page.isascii() and page.isdecimal() and 0 < int(page) < 100_000):
        raise ValueError(f'page "{page}" is not a positive number')
    if found.get("sort", "place") not in SORTS:
        raise ValueError(f'sort "{found["sort"]}" is not one of: {", ".join(SORTS)}')
    if found.get("state", "free") not in STATES:
        raise ValueError(f'state "{found["state"]}" is not one of: {", ".join(STATES)}')
    return Selection(**found, page=int(page))


def paged(wanted: Selection, total: int) -> tuple[Selection, slice, int]:
    """The page that there is: the last one for a number behind it, as from an old link. Its rows; how many pages."""
    pages = max(-(-total // PAGE), 1)
    page = min(wanted.page, pages)
    return msgspec.structs.replace(wanted, page=page), slice((page - 1) * PAGE, page * PAGE), pages


class Chosen(msgspec.Struct, frozen=True):
    """One page of what fits. `total`: of all pages; `page`: which one it is."""

    gpus: tuple[tuple[str, GpuTile], ...]  # with the name of the machine
    total: int
    pages: int
    page: int


def choose(views: Iterable[MachineView], wanted: Selection) -> Chosen:
    found = [
        (view.machine, one)
        for view in views
        if wanted.machine in ("", view.machine)
        for one in view.gpus
        if fits(one, wanted)
    ]
    if wanted.sort != "place":
        found.sort(key=lambda pair: _order(pair[1], wanted.sort))
    wanted, rows, pages = paged(wanted, len(found))
    return Chosen(tuple(found[rows]), len(found), pages, wanted.page)


def fits(one: GpuTile, wanted: Selection) -> bool:
    owner = one.owner if isinstance(one.owner, str) else (UNKNOWN_OWNER if one.key else "")
    return (
        wanted.place in ("", one.place)
        and wanted.platform in ("", one.platform)
        and wanted.owner in ("", owner)
        and wanted.class_ in ("", one.class_)
        and wanted.state in ("", one.state.value)
        and (not wanted.text or wanted.text.lower() in _text(one))
    )


def fits_workload(one: WorkloadLine, wanted: Selection) -> bool:
    owner = one.owner if isinstance(one.owner, str) else UNKNOWN_OWNER
    return (
        wanted.place in ("", one.place)
        and wanted.platform in ("", one.platform)
        and wanted.owner in ("", owner)
        and wanted.class_ in ("", one.class_)
        and (not wanted.text or wanted.text.lower() in f"{one.path} {owner} {one.class_} {one.next}".lower())
    )


def _text(one: GpuTile) -> str:
    return f"{one.name} {one.place} {one.holder} {one.owner} {one.class_} {one.model} {one.state}".lower()


def _order(one: GpuTile, by: str) -> tuple[float, str]:
    match by:
        case "use":
            return (-one.use if isinstance(one.use, float | int) else 1.0, one.name)
        case "owner":
            return (0.0, one.owner if isinstance(one.owner, str) else "\U0010ffff")
        case "since":
            return (_seconds(one.since), one.name)
        case _:
            act = act_of(one.steps)
            return (float("inf") if act is None else _seconds(act.at), one.name)


def workload_order(one: WorkloadLine, by: str) -> tuple[float, str, str]:
    """`next`: what is due first comes first."""
    match by:
        case "owner":
            return (0.0, one.owner if isinstance(one.owner, str) else "\U0010ffff", one.path)
        case "next":
            return (float("inf") if one.due is None else _seconds(one.due), "", one.path)
        case _:
            return (_seconds(one.since), "", one.path)


def _seconds(at: datetime | None) -> float:
    return 0.0 if at is None else at.timestamp()


class Choices(msgspec.Struct, frozen=True):
    """What the filters of a page offer."""

    machines: tuple[str, ...]
    owners: tuple[str, ...]
    classes: tuple[str, ...]
    platforms: tuple[str, ...]


def choices(views: Sequence[MachineView], *, workloads: bool = False) -> Choices:
    """Of what is on GPUs, or of all workloads."""
    rows = [one for view in views for one in (view.workloads if workloads else view.gpus)]
    owners = {one.owner if isinstance(one.owner, str) else UNKNOWN_OWNER for one in rows if one.key}
    return Choices(
        tuple(sorted(view.machine for view in views)),
        tuple(sorted(owners)),
        tuple(sorted({one.class_ for one in rows if not isinstance(one.class_, Unknown) and one.class_})),
        tuple(sorted({one.platform for one in rows if one.platform})),
    )


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

"""One workload: what each rule answers, what comes next, its history; and the buttons."""

from __future__ import annotations

from datetime import datetime, timedelta
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from gpukeeper.engine.outlook import Explanation
from gpukeeper.engine.requests import PREVIEWED, Request
from gpukeeper.interfaces.web.app import MOST_AT_ONCE, Site, form_of
from gpukeeper.interfaces.web.charts import signal_charts, timeline_chart
from gpukeeper.interfaces.web.pages.fleet import (
    WORKLOAD_SORTS,
    choices,
    fits_workload,
    paged,
    readable,
    selection_of,
    workload_order,
)
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.lifecycle.forecast import NOT_UNATTENDED
from gpukeeper.model import reading
from gpukeeper.views.explain import Timeline, evidence, facts, verdicts
from gpukeeper.views.history import line_row
from gpukeeper.views.live import MachineView, WorkloadLine

VERBS = ("hold", "release", "stop", "remove", "restore")
TICKS = 4  # of a chart
LONGEST_HOLD = timedelta(days=366)


async def listed(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    wanted, views = selection_of(request), readable(site, visitor)
    found = [
        (view, one)
        for view in views
        if wanted.machine in ("", view.machine)
        for one in view.workloads
        if fits_workload(one, wanted)
    ]
    if wanted.sort != "place":
        found.sort(key=lambda pair: workload_order(pair[1], wanted.sort))
    wanted, rows, pages = paged(wanted, len(found))
    return site.page(
        request,
        visitor,
        "workloads.html",
        wanted=wanted,
        rows=found[rows],
        total=len(found),
        pages=pages,
        offered=choices(views, workloads=True),
        sorts=WORKLOAD_SORTS,
        several=visitor.person.admin and not site.source.settings.fleet,
        actions=PREVIEWED,
        most=MOST_AT_ONCE,
        selected=request.query_params.get("select") == "all",
    )


async def find(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """Where links in messages lead: the page of a workload, or its lines in the history if it is gone."""
    uid, machine = (request.query_params.get(name, "").strip()[:500] for name in ("uid", "machine"))
    if not uid:
        raise HTTPException(400, "The address needs the uid of a workload: /find?uid=UID")
    for view in readable(site, visitor):
        for one in view.workloads:
            if one.uid == uid:
                return RedirectResponse(f"/workload/{one.id}", 303)
    known = {"machine": machine} if machine in site.source.machines else {}
    return RedirectResponse(f"/history?{urlencode({**known, 'workload': uid})}", 303)


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    view, line = _found(site, visitor, request.path_params["id"])
    answer = await site.ask(visitor, view.machine, Request(verb="explain", workload=line.uid))
    explained = reading.decode(answer.body, type=Explanation) if answer.done else None
    whole = explained is not None and explained.whole
    found = await _timeline(site, visitor, view.machine, line)
    return site.page(
        request,
        visitor,
        "workload.html",
        machine=view,
        line=line,
        tiles=[one for one in view.gpus if one.key == line.key],
        explained=explained,
        facts=facts(explained) if explained is not None and whole else [],
        evidence=evidence(explained) if explained is not None and whole else (),
        history=[line_row(0, one) for one in explained.history] if explained is not None else [],
        verdicts=[] if explained is None else list(verdicts(explained.answers)),
        unexplained=answer.words,
        timeline=found,
        ticks=[] if found is None else _ticks(found),
        chart=None if found is None else timeline_chart(found),
        signals=[] if found is None else signal_charts(found),
        not_unattended=NOT_UNATTENDED,
        restorable=bool(explained and explained.memory.stopped),
    )


async def _timeline(site: Site, visitor: Visitor, machine: str, line: WorkloadLine) -> Timeline | None:
    """None: not for this visitor."""
    if not visitor.may_change(line.owner):
        return None
    answer = await site.ask(visitor, machine, Request(verb="signals", workload=line.uid))
    return reading.decode(answer.body, type=Timeline) if answer.done else None


def _ticks(found: Timeline) -> list[datetime]:
    """The times below its chart."""
    return [found.since + number * (found.now - found.since) / TICKS for number in range(TICKS + 1)]


async def change(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    verb, form = request.path_params["verb"], await form_of(request)
    if verb not in VERBS:
        raise HTTPException(404, "There is no such action.")
    view, line = _found(site, visitor, request.path_params["id"])
    asked = Request(
        verb=verb,
        workload=line.uid,
        seconds=hold_seconds(form.get("hours", "")) if verb == "hold" else None,
        reason=form.get("reason", "")[:1000],
        confirm=verb in ("stop", "remove"),
        token=form.get("token", ""),
    )
    answer = await site.ask(visitor, view.machine, asked)
    if answer.token:
        return site.page(
            request,
            visitor,
            "confirm.html",
            machine=view,
            line=line,
            verb=verb,
            words=answer.words,
            token=answer.token,
            reason=asked.reason,
        )
    return site.page(
        request, visitor, "done.html", 200 if answer.done else 409, line=line, words=answer.words, done=answer.done
    )


def _found(site: Site, visitor: Visitor, id_: str) -> tuple[MachineView, WorkloadLine]:
    for view in readable(site, visitor):
        for one in view.workloads:
            if one.id == id_:
                return view, one
    raise HTTPException(
        404, "There is no such workload now. It may have been removed: search for it in the history by its name."
    )


def hold_seconds(hours: str) -> float | None:
    if not hours.strip():
        return None
    try:
        seconds = float(hours) * 3600
    except ValueError as problem:
        raise HTTPException(400, f'"{hours[:40]}" is not a number of hours. Nothing was done.') from problem
    if not 0 < seconds <= LONGEST_HOLD.total_seconds():
        raise HTTPException(400, "A hold lasts more than 0 and at most 8784 hours. Nothing was done.")
    return seconds

"""One workload: what each rule answers, what comes next, its history; and the buttons."""

from __future__ import annotations

from datetime import datetime, timedelta

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.explain import Explanation
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site, form_of
from gpukeeper.interfaces.web.charts import timeline_chart
from gpukeeper.interfaces.web.pages.fleet import readable, selection_of
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.interfaces.web.selection import choices, fits_workload
from gpukeeper.model import reading
from gpukeeper.views.explain import facts, verdicts
from gpukeeper.views.history import line_row
from gpukeeper.views.live import MachineView, WorkloadLine
from gpukeeper.views.timeline import Timeline, TimelineMark

VERBS = ("hold", "release", "stop", "remove", "restore")
PAGE = 500
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
    first = (wanted.page - 1) * PAGE
    return site.page(
        request,
        visitor,
        "workloads.html",
        wanted=wanted,
        rows=found[first : first + PAGE],
        total=len(found),
        pages=max(-(-len(found) // PAGE), 1),
        offered=choices(views),
    )


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    view, line = _found(site, visitor, request.path_params["id"])
    answer = await site.ask(visitor, view.machine, Request(verb="explain", workload=line.uid))
    explained = reading.decode(answer.body, type=Explanation) if answer.done else None
    chart, marks, ticks = await _timeline(site, visitor, view.machine, line)
    return site.page(
        request,
        visitor,
        "workload.html",
        machine=view,
        line=line,
        tiles=[one for one in view.gpus if one.key == line.key],
        explained=explained,
        facts=[] if explained is None or not explained.whole else facts(explained),
        verdicts=[] if explained is None else list(verdicts(explained.answers)),
        unexplained=answer.words,
        chart=chart,
        marks=marks,
        ticks=ticks,
        history=[line_row(0, one) for one in explained.history] if explained else [],
        restorable=bool(explained and explained.memory.stopped),
    )


async def _timeline(
    site: Site, visitor: Visitor, machine: str, line: WorkloadLine
) -> tuple[Markup | None, tuple[TimelineMark, ...], list[datetime]]:
    """The chart, its events and the times below it. None: not for this visitor."""
    if not visitor.may_change(line.owner):
        return None, (), []
    answer = await site.ask(visitor, machine, Request(verb="signals", workload=line.uid))
    if not answer.done:
        return None, (), []
    found = reading.decode(answer.body, type=Timeline)
    ticks = [found.since + number * (found.now - found.since) / TICKS for number in range(TICKS + 1)]
    return timeline_chart(found), found.marks, ticks


async def change(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    verb, form = request.path_params["verb"], await form_of(request)
    if verb not in VERBS:
        raise HTTPException(404, "There is no such action.")
    view, line = _found(site, visitor, request.path_params["id"])
    asked = Request(
        verb=verb,
        workload=line.uid,
        seconds=_seconds(form.get("hours", "")) if verb == "hold" else None,
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


def _seconds(hours: str) -> float | None:
    if not hours.strip():
        return None
    try:
        seconds = float(hours) * 3600
    except ValueError as problem:
        raise HTTPException(400, f'"{hours[:40]}" is not a number of hours. Nothing was done.') from problem
    if not 0 < seconds <= LONGEST_HOLD.total_seconds():
        raise HTTPException(400, "A hold lasts more than 0 and at most 8784 hours. Nothing was done.")
    return seconds

"""Hold, release or stop several workloads: select, preview, confirm. For admins; the daemon decides about each."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from gpukeeper.engine.requests import PREVIEWED, Request, RequestPreview
from gpukeeper.interfaces.link import Answer
from gpukeeper.interfaces.web.app import MOST_AT_ONCE, BulkItem, BulkRun, Site, form_pairs, is_old
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.pages.workload import hold_seconds
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading
from gpukeeper.views.live import WorkloadLine

TOGETHER = 4  # previews that are asked for at the same time


async def preview(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    _only_admins(visitor)
    pairs = await form_pairs(request)
    form = dict(pairs)
    verb = form.get("action", "")
    if verb not in PREVIEWED:
        raise HTTPException(400, f"Choose what to do: {', '.join(PREVIEWED)}. Nothing was done.")
    wanted = list(dict.fromkeys(value for name, value in pairs if name == "id"))
    if not wanted:
        raise HTTPException(400, "No workload is selected. Nothing was done.")
    if len(wanted) > MOST_AT_ONCE:
        raise HTTPException(
            400, f"{len(wanted)} workloads are selected; at most {MOST_AT_ONCE} at once. Nothing was done."
        )
    seconds = hold_seconds(form.get("hours", "")) if verb == "hold" else None
    asked = Request(verb="preview", action=verb, seconds=seconds, reason=form.get("reason", "")[:1000])
    run = site.bulk.add(visitor.person.name, verb, seconds, asked.reason, await _items(site, visitor, wanted, asked))
    return site.page(request, visitor, "bulk_preview.html", run=run)


async def confirm(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    _only_admins(visitor)
    run = site.bulk.of(visitor.person.name, request.path_params["token"])
    if run is None or run.confirmed or is_old(run):
        raise HTTPException(
            409, "This preview is unknown, was confirmed already or is older than 10 minutes. Nothing was done."
        )
    if not run.possible:
        raise HTTPException(409, "Every workload of this preview was refused. Nothing was done.")
    if site.bulk.busy(visitor.person.name):
        raise HTTPException(409, "Your last requests are still in progress. Nothing was done. Try again when they end.")

    async def ask(machine: str, asked: Request) -> Answer:
        return await site.ask(visitor, machine, asked)

    site.bulk.begin(run, ask)
    return RedirectResponse(f"/bulk/{run.token}", 303)


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    run = site.bulk.of(visitor.person.name, request.path_params["token"])
    if run is None or not run.confirmed:
        raise HTTPException(404, "These results are not kept any more. What was done is in the history.")
    return site.page(request, visitor, "bulk.html", run=run, summary=_summary(run))


def _only_admins(visitor: Visitor) -> None:
    if not visitor.person.admin:
        raise HTTPException(403, "Only admins may act on several workloads at once. Nothing was done.")


async def _items(site: Site, visitor: Visitor, wanted: list[str], asked: Request) -> tuple[BulkItem, ...]:
    known = {one.id: (view.machine, one) for view in readable(site, visitor) for one in view.workloads}
    turns = asyncio.Semaphore(TOGETHER)

    async def item(id_: str) -> BulkItem:
        if id_ not in known:
            return BulkItem("", "", id_[:40], "", "it does not exist any more", refused=True)
        async with turns:
            return await _item(site, visitor, *known[id_], asked)

    return tuple(await asyncio.gather(*(item(one) for one in wanted)))


async def _item(site: Site, visitor: Visitor, machine: str, line: WorkloadLine, asked: Request) -> BulkItem:
    """Asked for by its uid: another object may have its name by now."""
    owner = line.owner if isinstance(line.owner, str) else "unknown"
    answer = await site.ask(
        visitor,
        machine,
        Request(verb="preview", action=asked.action, workload=line.uid, seconds=asked.seconds, reason=asked.reason),
    )
    if not answer.done:
        return BulkItem(machine, line.id, line.path, owner, answer.words, refused=True)
    found = reading.decode(answer.body, type=RequestPreview)
    return BulkItem(machine, line.id, found.path, owner, found.words, found.uid, found.revision)


def _summary(run: BulkRun) -> str:
    counts = [(run.count(state), state) for state in ("done", "not done", "refused", "in progress", "waiting")]
    return ", ".join(f"{number} {state}" for number, state in counts if number)

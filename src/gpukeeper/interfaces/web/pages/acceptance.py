"""Acceptance runs, and one GPU over time by its serial number."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site, ask_for, machine_of
from gpukeeper.interfaces.web.charts import figure_lines
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.views.acceptance_history import GpuHistory, RunLines, gpu_history

MOST = 500


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    machine = machine_of(site, request)
    found = await ask_for(site, visitor, machine, RunLines, Request(verb="runs", last=MOST))
    gpus = sorted({gpu for run in found.runs for gpu in run.gpus if gpu != run.node})
    recent = found.runs[-12:]
    return site.page(
        request,
        visitor,
        "acceptance.html",
        machine=machine,
        runs=list(reversed(found.runs)),
        recent=recent,
        gpus=[(gpu, [run.gpus.get(gpu) for run in recent]) for gpu in gpus],
    )


async def gpu(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    machine, serial = machine_of(site, request), request.path_params["serial"]
    history = await history_of(site, visitor, machine, serial)
    figures = [(one, figure_lines(one)) for one in history.figures]
    return site.page(request, visitor, "gpu.html", machine=machine, history=history, figures=figures)


async def history_of(site: Site, visitor: Visitor, machine: str, serial: str) -> GpuHistory:
    found = await ask_for(site, visitor, machine, RunLines, Request(verb="runs", last=MOST))
    history = gpu_history(found.runs, serial, _model(site, visitor, machine, serial))
    if history is None:
        raise HTTPException(404, f'No acceptance run of {machine} tested a GPU "{serial[:60]}".')
    return history


def _model(site: Site, visitor: Visitor, machine: str, identity: str) -> str:
    """Of the inventory: of that uuid, or of all GPUs there if they are of one model. Empty: unknown."""
    gpus = [one for view in readable(site, visitor) if view.machine == machine for one in view.gpus if one.model]
    found = {one.model for one in gpus if one.device == identity} or {one.model for one in gpus}
    return found.pop() if len(found) == 1 else ""

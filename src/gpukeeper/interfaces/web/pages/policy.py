"""The policy in effect: the sentence, and every value with its origin."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.asking import ask_for, machine_of
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.views.policy import PolicyView


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    machine = machine_of(site, request)
    found = await ask_for(site, visitor, machine, PolicyView, Request(verb="policy"))
    wanted = request.query_params.get("q", "").strip()[:200]
    rows = [one for one in found.settings if wanted.lower() in f"{one.setting} {one.value} {one.origin}".lower()]
    return site.page(request, visitor, "policy.html", machine=machine, policy=found, rows=rows, wanted=wanted)

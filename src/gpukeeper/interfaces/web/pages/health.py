"""How gpukeeper itself is: places, passes, age of what is shown. And the two answers for probes."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.security import Visitor


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    return site.page(request, visitor, "health.html", views=readable(site, visitor), now=datetime.now(UTC))


async def alive(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    return PlainTextResponse("ok\n")


async def ready(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """Once there is something to show."""
    if site.source.machines:
        return PlainTextResponse("ok\n")
    return PlainTextResponse("no view of any machine yet\n", 503)

"""How gpukeeper itself is: places, passes, budget, channels, ledger and disk. And the two answers for probes."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import NOT_COPIED
from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading
from gpukeeper.views.own_state import HealthView

TOO_OLD = 120.0  # seconds; a daemon sends a view every 15 s, or more rarely if building one is slow


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """A machine that does not reply is shown with its last view; so is one of a fleet, whose copy holds no more."""
    found: list[tuple[object, HealthView | None, str, bool]] = []
    for view in readable(site, visitor):
        answer = await site.ask(visitor, view.machine, Request(verb="health"))
        own = reading.decode(answer.body, type=HealthView) if answer.done else None
        found.append((view, own, answer.words, answer.done or answer.exit_code == NOT_COPIED))
    return site.page(request, visitor, "health.html", found=found)


async def alive(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    return PlainTextResponse("ok\n")


async def ready(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """Once there is something to show, and while it is renewed."""
    problem = site.source.condition.problem
    if problem:
        return PlainTextResponse(f"the fleet database cannot be read: {problem}\n", 503)
    if not site.source.machines:
        return PlainTextResponse("no view of any machine yet\n", 503)
    age = time.monotonic() - site.changed_at
    if age > TOO_OLD and not site.source.settings.fleet:
        return PlainTextResponse(f"the last view was received {age:.0f} s ago; is the daemon overloaded?\n", 503)
    return PlainTextResponse("ok\n")

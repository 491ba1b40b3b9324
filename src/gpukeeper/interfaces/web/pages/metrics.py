"""Prometheus metrics: those of the daemon, and what the web process refused. Who may read pages may read them."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site, machine_of
from gpukeeper.interfaces.web.connections import Connections
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading

TEXT = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("address", "connections", "csrf", "host", "open pages", "origin", "proxy header", "rate", "size")
REFUSED, CONNECTIONS = "gpukeeper_web_refused_total", "gpukeeper_web_connections"
MEANING = {
    REFUSED: "Requests and connections that the dashboard refused, or whose proxy header it ignored, by reason.",
    CONNECTIONS: "Open connections to the dashboard.",
}


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """Over a fleet: the machines serve their own."""
    text, kind = ("", TEXT) if site.source.settings.fleet else await _of_daemon(site, request, visitor)
    found: Connections | None = getattr(request.app.state, "connections", None)
    closed, still_open = (0, 0) if found is None else (found.closed, len(found.open))
    text += own_series({**site.refused, "connections": closed}, still_open)
    return Response(text, media_type=kind, headers={"cache-control": "no-store"})


async def _of_daemon(site: Site, request: HttpRequest, visitor: Visitor) -> tuple[str, str]:
    answer = await site.ask(visitor, machine_of(site, request), Request(verb="metrics"))
    if not answer.done:
        raise HTTPException(503, f"{answer.words}.")
    return reading.decode(answer.body, type=str), answer.words


def own_series(refused: Mapping[str, int], connections: int) -> str:
    rows = "".join(f'{REFUSED}{{reason="{reason}"}} {refused.get(reason, 0)}\n' for reason in REASONS)
    heads = {name: f"# HELP {name} {words}\n# TYPE {name} " for name, words in MEANING.items()}
    return f"{heads[REFUSED]}counter\n{rows}{heads[CONNECTIONS]}gauge\n{CONNECTIONS} {connections}\n"

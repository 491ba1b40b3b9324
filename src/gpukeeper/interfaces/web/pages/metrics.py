"""Prometheus metrics: those of the daemon, and what the web process refused. Who may read pages may read them."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.asking import machine_of
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading

TEXT = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("address", "csrf", "host", "open pages", "origin", "proxy header", "rate", "size")
REFUSED, CONNECTIONS = "gpukeeper_web_refused_total", "gpukeeper_web_connections"
MEANING = {
    REFUSED: "Requests to the dashboard that were refused, or whose proxy header was ignored, by reason.",
    CONNECTIONS: "Open connections to the dashboard.",
}


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """Over a fleet: the machines serve their own."""
    text, kind = ("", TEXT) if site.source.settings.fleet else await _of_daemon(site, request, visitor)
    connections = getattr(request.app.state, "connections", None)
    text += own_series(site, 0 if connections is None else len(connections.open))
    return Response(text, media_type=kind, headers={"cache-control": "no-store"})


async def _of_daemon(site: Site, request: HttpRequest, visitor: Visitor) -> tuple[str, str]:
    answer = await site.ask(visitor, machine_of(site, request), Request(verb="metrics"))
    if not answer.done:
        raise HTTPException(503, f"{answer.words}.")
    return reading.decode(answer.body, type=str), answer.words


def own_series(site: Site, connections: int) -> str:
    refused = "".join(f'{REFUSED}{{reason="{reason}"}} {site.refused[reason]}\n' for reason in REASONS)
    heads = {name: f"# HELP {name} {words}\n# TYPE {name} " for name, words in MEANING.items()}
    return f"{heads[REFUSED]}counter\n{refused}{heads[CONNECTIONS]}gauge\n{CONNECTIONS} {connections}\n"

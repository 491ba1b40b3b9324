"""The dashboard as an ASGI application: its routes, and what every response has in common."""

from __future__ import annotations

import gzip
import hmac
from collections.abc import Awaitable, Callable
from importlib.resources import files
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from gpukeeper.interfaces.link import Credentials, Person
from gpukeeper.interfaces.web import live, routes
from gpukeeper.interfaces.web.app import LARGEST_FORM, Page, Site
from gpukeeper.interfaces.web.guard import Guard
from gpukeeper.interfaces.web.peers import Peers
from gpukeeper.interfaces.web.security import CSRF, Visitor
from gpukeeper.interfaces.web.source import Source, SourceLost

PACKED = ("application/json", "text/html", "text/plain", "text/css", "text/javascript", "image/svg+xml")
PACKED_FROM = 1024  # bytes: what is smaller fits into one packet
PACKED_LEVEL = 5  # a third of the time of the highest, for a few percent more bytes


def make_app(source: Source) -> Starlette:
    settings = source.settings.site
    site = Site(source, Peers(settings.proxy))
    static = {one.name: one.read_bytes() for one in files("gpukeeper.interfaces.web").joinpath("static").iterdir()}
    app = Starlette(
        routes=[
            *(Route(path, _handler(site, page), methods=[method]) for method, path, page in routes.ROUTES),
            Route("/events", live.Feed(site).events, methods=["GET"]),
            Route("/static/{name}", _static(static), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_problem(site), SourceLost: _lost(site), Exception: _bug(site)},
    )
    app.state.site = site
    app.add_middleware(Guard, settings=settings, peers=site.peers, refused=site.refused)
    return app


def _handler(site: Site, page: Page) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(request: HttpRequest) -> Response:
        visitor = await site.visitor(request)
        who = visitor.who
        site.limit(site.reads, who, "Too many requests.")
        if request.method == "POST":
            await _check_change(site, request, visitor, who)
        elif not (site.may_read(visitor) or _is_open(request.url.path)):
            raise HTTPException(401, "Log in first.")
        return _packed(request, await page(site, request, visitor), visitor.csrf)

    return handle


def _packed(request: HttpRequest, response: Response, csrf: str = "") -> Response:
    """With gzip where the caller accepts it. Never a page with a CSRF token, nor a reply to a login: they have a secret
    beside words of the request, and how well both are packed would tell the one by the other (BREACH)."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    body = response.body if type(response) in (Response, HTMLResponse, PlainTextResponse) else b""
    secret = kind == "text/html" and (csrf or request.url.path.startswith("/login"))
    if request.method != "GET" or secret or kind not in PACKED or len(body) < PACKED_FROM:
        return response
    response.headers.add_vary_header("accept-encoding")
    if _accepts_gzip(request.headers.get("accept-encoding", "")):
        response.body = gzip.compress(body, PACKED_LEVEL, mtime=0)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-encoding"] = "gzip"
        if "etag" in response.headers:
            response.headers["etag"] = "W/" + response.headers["etag"]  # other bytes with the same meaning
    return response


def _accepts_gzip(words: str) -> bool:
    for one in words.lower().split(","):
        name, _, quality = one.partition(";")
        if name.strip() in ("gzip", "*"):
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False


def _is_open(path: str) -> bool:
    """To everybody, wherever it is served."""
    return path in ("/healthz", "/readyz", "/login") or path.startswith("/login/")


async def _check_change(site: Site, request: HttpRequest, visitor: Visitor, who: str) -> None:
    """Before anything is asked of the daemon."""
    if int(request.headers.get("content-length") or "0") > LARGEST_FORM or "transfer-encoding" in request.headers:
        site.refused["size"] += 1
        raise HTTPException(413, f"The request is larger than {LARGEST_FORM:,} bytes. Nothing was done.")
    if request.url.path in ("/login", "/theme") or request.url.path.startswith("/login/"):
        site.limit(site.logins, who, "Too many logins.")
        return
    if not visitor.logged_in:
        raise HTTPException(401, "Log in first. Nothing was done.")
    if visitor.by_cookie:
        form = dict(parse_qsl((await request.body()).decode(errors="replace")))
        given = request.headers.get("x-csrf-token") or form.get(CSRF, "")
        if not visitor.csrf or not hmac.compare_digest(given.encode(), visitor.csrf.encode()):
            site.refused["csrf"] += 1
            raise HTTPException(403, "The form is too old or was not made by this page. Reload it. Nothing was done.")
    site.limit(site.changes, who, "Too many requests that change something.")


def _static(found: dict[str, bytes]) -> Callable[[HttpRequest], Awaitable[Response]]:
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}

    async def serve(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        body = found.get(name)
        if body is None:
            raise HTTPException(404, "There is no such file.")
        kind = kinds[name.rpartition(".")[2]]
        return _packed(request, Response(body, media_type=kind, headers={"cache-control": "max-age=300"}))

    return serve


def _http_problem(site: Site) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    async def handle(request: HttpRequest, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        programs = request.url.path.startswith("/api/") or request.url.path == "/metrics"
        if problem.status_code == 401 and request.method == "GET" and not programs:
            return RedirectResponse("/login", 303)
        sentence = problem.detail if problem.status_code not in (404, 405) or " " in problem.detail[10:] else ""
        default = {404: "There is no such page.", 405: "This address does not accept that method."}
        response = site.problem(
            request, _nobody(), problem.status_code, sentence or default.get(problem.status_code, problem.detail)
        )
        response.headers.update(problem.headers or {})
        return response

    return handle


def _lost(site: Site) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    async def handle(request: HttpRequest, problem: Exception) -> Response:
        sentence = (
            f"{str(problem).capitalize()}. Whether a request was executed is in the ledger: gpukeeper ledger list"
        )
        return site.problem(request, _nobody(), 503, sentence)

    return handle


def _bug(site: Site) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    async def handle(request: HttpRequest, problem: Exception) -> Response:
        return site.problem(request, _nobody(), 500, f"This is a bug in gpukeeper: {type(problem).__name__}.")

    return handle


def _nobody() -> Visitor:
    return Visitor(person=Person(), credentials=Credentials(), by_cookie=False, csrf="")

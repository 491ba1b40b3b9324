"""The dashboard as an ASGI application: its pages, live updates, and what every response has in common.

A change wakes every open page, which is sent only the tiles that its address shows; pages with the same address and
the same rights share them. A reader that is too slow misses states in between, never the newest.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from gpukeeper.interfaces.link import Credentials, Person
from gpukeeper.interfaces.web.api import API_ROUTES
from gpukeeper.interfaces.web.app import LARGEST_FORM, Page, Site
from gpukeeper.interfaces.web.pages import (
    acceptance,
    account,
    backtest,
    bulk,
    fleet,
    health,
    history,
    metrics,
    plan,
    policy,
    usage,
    workload,
)
from gpukeeper.interfaces.web.pages.fleet import Selection, choose, counted, is_summary, selection_of, summary_html
from gpukeeper.interfaces.web.peers import Peers
from gpukeeper.interfaces.web.security import CSRF, Guard, Visitor
from gpukeeper.interfaces.web.source import Source, SourceLost
from gpukeeper.views.live import Delta, GpuTile, MachineView

SOONEST = 0.3  # seconds between two events of one page
QUIET = 20.0  # seconds: then a comment, so that a proxy keeps the connection and a dead one is noticed
MOST, MOST_EACH = 1000, 30  # open pages; of one person or address


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """What one page shows, before anything is removed that its reader may not see. `rows`: the summary by place, which
    has no tiles."""

    order: tuple[str, ...]  # ids of its tiles
    tiles: dict[str, GpuTile]
    counts: tuple[tuple[str, int], ...]
    rows: str = ""


class Feed:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._version = 0
        self._changed = asyncio.Event()
        self._made: dict[Selection, Snapshot] = {}  # of this version
        self._events: dict[tuple[Snapshot, Snapshot, str], bytes] = {}  # to this version, by reader
        self._open: Counter[str] = Counter()
        site.source.listen(self._on_change)

    def _on_change(self, machine: str, delta: Delta, view: MachineView) -> None:
        self._version += 1
        self._made.clear()
        self._events.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def events(self, request: HttpRequest) -> Response:
        site = self._site
        visitor = await site.visitor(request)
        if not site.may_read(visitor):
            raise HTTPException(401, "Log in first.")
        who = visitor.who
        site.limit(site.reads, who, "Too many requests.")
        if self._open[who] >= MOST_EACH or self._open.total() >= MOST:
            site.refused["open pages"] += 1
            raise HTTPException(429, "Too many open pages. Close some of them.", headers={"retry-after": "30"})
        wanted = selection_of(request)
        return StreamingResponse(
            self._stream(visitor, wanted, who),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _stream(self, visitor: Visitor, wanted: Selection, who: str) -> AsyncIterator[bytes]:
        self._open[who] += 1
        try:
            shown, version = self._snapshot(wanted), self._version
            yield b"retry: 3000\n\n"
            while True:
                changed = self._changed
                if version == self._version:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), QUIET)
                if not await self._is_still(visitor):
                    return  # logged out, or with other rights: the page connects again
                if version == self._version:
                    yield b": nothing changed\n\n"
                    continue
                version = self._version
                before, shown = shown, self._snapshot(wanted)
                event = self._event(before, shown, visitor.person)
                if event:
                    yield event
                await asyncio.sleep(SOONEST)
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]

    async def _is_still(self, visitor: Visitor) -> bool:
        try:
            return await self._site.person(visitor.credentials) == visitor.person
        except SourceLost:
            return False

    def _snapshot(self, wanted: Selection) -> Snapshot:
        """Which tiles are shown, and in which order, does not depend on who reads them."""
        found = self._made.get(wanted)
        if found is None:
            machines = self._site.source.machines
            views = [machines[name] for name in sorted(machines)]
            everything = [one for view in views for one in view.gpus]
            counts = tuple(counted(everything))
            if is_summary(len(everything), wanted):
                found = Snapshot((), {}, counts, summary_html(self._site, views, wanted))
            else:
                tiles = {one.id: one for _, one in choose(views, wanted).gpus}
                found = Snapshot(tuple(tiles), tiles, counts)
            self._made[wanted] = found
        return found

    def _event(self, before: Snapshot, after: Snapshot, person: Person) -> bytes:
        """Made once for all pages that show the same before and after, and whose readers may see the same of it."""
        if before.order != after.order or bool(before.rows) != bool(after.rows):
            return b"event: list\ndata: {}\n\n"
        changed = [one for id_, one in after.tiles.items() if (was := before.tiles[id_]) is not one and was != one]
        if not changed and (before.counts, before.rows) == (after.counts, after.rows):
            return b""
        reader = _reader(changed, person)
        found = self._events.get((before, after, reader))
        if found is None:
            readers = self._site.readers
            tiles = {one.id: str(readers.html(readers.tile(one, person))) for one in changed}
            body = {"tiles": tiles, "counts": dict(after.counts), "rows": after.rows}
            found = b"event: tiles\ndata: " + msgspec.json.encode(body) + b"\n\n"
            self._events[before, after, reader] = found
        return found


def _reader(changed: Sequence[GpuTile], person: Person) -> str:
    """Readers of which none may see more of these tiles than the others have the same name here."""
    if person.admin:
        return "admin\0"
    return person.name if person.name and any(one.owner == person.name for one in changed) else ""


ROUTES: tuple[tuple[str, str, Page], ...] = (
    ("GET", "/", fleet.show),
    ("GET", "/fleet", fleet.rows),
    ("GET", "/workloads", workload.listed),
    ("POST", "/bulk", bulk.preview),
    ("POST", "/bulk/{token}", bulk.confirm),
    ("GET", "/bulk/{token}", bulk.show),
    ("GET", "/find", workload.find),
    ("GET", "/workload/{id}", workload.show),
    ("POST", "/workload/{id}/{verb}", workload.change),
    ("GET", "/plan", plan.show),
    ("GET", "/history", history.show),
    ("POST", "/restore", history.restore),
    ("GET", "/usage", usage.show),
    ("GET", "/usage.csv", usage.as_csv),
    ("GET", "/acceptance", acceptance.show),
    ("GET", "/acceptance/gpu/{serial}", acceptance.gpu),
    ("GET", "/policy", policy.show),
    ("GET", "/policy/try", policy.trial),
    ("GET", "/backtest", backtest.show),
    ("GET", "/health", health.show),
    ("GET", "/healthz", health.alive),
    ("GET", "/readyz", health.ready),
    ("GET", "/metrics", metrics.show),
    ("GET", "/login", account.how),
    ("GET", "/login/{token}", account.confirm),
    ("POST", "/login/{token}", account.redeem),
    ("POST", "/logout", account.logout),
    ("POST", "/theme", account.theme),
    *API_ROUTES,
)


PACKED = ("application/json", "text/html", "text/plain", "text/css", "text/javascript", "image/svg+xml")
PACKED_FROM = 1024  # bytes: what is smaller fits into one packet
PACKED_LEVEL = 5  # a third of the time of the highest, for a few percent more bytes


def make_app(source: Source) -> Starlette:
    settings = source.settings.site
    site = Site(source, Peers(settings.proxy))
    static = {one.name: one.read_bytes() for one in files("gpukeeper.interfaces.web").joinpath("static").iterdir()}
    app = Starlette(
        routes=[
            *(Route(path, _handler(site, page), methods=[method]) for method, path, page in ROUTES),
            Route("/events", Feed(site).events, methods=["GET"]),
            Route("/static/{name}", _static(static), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_problem(site), SourceLost: _lost(site), Exception: _bug(site)},
    )
    app.state.site, app.state.bulk = site, bulk.BulkRuns()
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

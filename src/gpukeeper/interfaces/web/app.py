"""What the pages share: the source, templates, who asks; forms and cookies."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from urllib.parse import parse_qsl

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import Answer, Credentials, Person
from gpukeeper.interfaces.web import charts, words
from gpukeeper.interfaces.web.bulk import BulkRuns
from gpukeeper.interfaces.web.security import (
    COOKIE,
    THEME,
    Bucket,
    Proxy,
    Signer,
    Visitor,
    credentials_of,
)
from gpukeeper.interfaces.web.source import Source

NOT_LOGGED_IN = 13
LARGEST_FORM = 64 * 1024
REMEMBERED = 5.0  # seconds: whose session it is, unless one is revoked; for each change the daemon looks it up again
THEMES = ("light", "dark")
Page = Callable[["Site", HttpRequest, Visitor], Awaitable[Response]]


class Site:
    """What the pages share: the source, templates, who asks."""

    def __init__(self, source: Source, proxy: Proxy | None = None) -> None:
        self.source = source
        self.signer = Signer(source.settings.key)
        self.proxy = proxy
        self.templates = _environment()
        self._people: dict[Credentials, tuple[float, int, Person]] = {}  # since when, and after how many revocations
        self.logins = Bucket(rate=5 / 60, burst=10)
        self.reads = Bucket(rate=50, burst=200)
        self.changes = Bucket(rate=0.5, burst=20)
        self.bulk = BulkRuns()

    async def visitor(self, request: HttpRequest) -> Visitor:
        presented, by_cookie = credentials_of(request, self.signer, self.proxy)
        person = await self.person(presented)
        secret = presented.secret or presented.proxy_user
        return Visitor(
            person=person, credentials=presented, by_cookie=by_cookie, csrf=self.signer.csrf(secret) if secret else ""
        )

    async def person(self, presented: Credentials) -> Person:
        if not presented.secret and not presented.proxy_user:
            return Person()
        now, revoked = time.monotonic(), self.source.revocations
        known = self._people.get(presented)
        if known is not None and now - known[0] <= REMEMBERED and known[1] == revoked:
            return known[2]
        person = (await self.source.ask(presented, "", Request(verb="whoami"))).person
        self._people = {one: found for one, found in self._people.items() if now - found[0] <= REMEMBERED}
        self._people[presented] = (now, revoked, person)
        return person

    def forget(self, presented: Credentials) -> None:
        self._people.pop(presented, None)

    def now(self) -> datetime:
        """As in the machines that are shown."""
        real, demo = datetime.now(UTC), self.source.settings.demo
        return real if demo is None else demo.time(real)

    def page(
        self, request: HttpRequest, visitor: Visitor, template: str, status: int = 200, **context: object
    ) -> Response:
        theme = request.cookies.get(THEME, "")
        body = self.templates.get_template(template).render(
            visitor=visitor,
            path=request.url.path,
            theme=theme if theme in THEMES else "",
            version=self.source.settings.version,
            machines=len(self.source.machines),
            demo=self.source.settings.demo,
            now=self.now(),
            machine_names=sorted(self.source.machines),
            condition=self.source.condition,
            **context,
        )
        return HTMLResponse(body, status, headers={"cache-control": "no-store"})

    def problem(self, request: HttpRequest, visitor: Visitor, status: int, sentence: str) -> Response:
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": sentence}, status)
        return self.page(request, visitor, "problem.html", status, sentence=sentence, code=status)

    async def ask(self, visitor: Visitor, machine: str, request: Request) -> Answer:
        """Raises HTTPException where the daemon refuses."""
        answer = await self.source.ask(visitor.credentials, machine, request)
        if answer.exit_code == NOT_LOGGED_IN:
            self.forget(visitor.credentials)
            raise HTTPException(401, answer.words)
        return answer


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("gpukeeper.interfaces.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    words.install(made)
    made.globals.update(sparkline=charts.sparkline, stacked=charts.stacked, places_of=words.places_of)
    for name in made.list_templates():
        made.get_template(name)  # all of them now: later we may have no rights to read files
    return made


def session_cookie(site: Site, response: Response, secret: str, *, secure: bool) -> None:
    response.set_cookie(
        COOKIE,
        site.signer.sign(secret),
        max_age=site.source.settings.session_seconds,
        path="/",
        httponly=True,
        samesite="strict",
        secure=secure,
    )


async def form_of(request: HttpRequest) -> dict[str, str]:
    return dict(await form_pairs(request))


async def form_pairs(request: HttpRequest) -> list[tuple[str, str]]:
    """With every value of a field that is given more than once."""
    return parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True)


def as_json(value: object) -> bytes:
    return msgspec.json.encode(value)

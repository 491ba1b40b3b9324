"""What the pages share: the source, templates, who asks; forms and cookies."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import LOOPBACK_HOSTS, Answer, Credentials, Person
from gpukeeper.interfaces.web import charts, words
from gpukeeper.interfaces.web.bulk import BulkRuns
from gpukeeper.interfaces.web.guard import hostname_of
from gpukeeper.interfaces.web.peers import Peers
from gpukeeper.interfaces.web.readers import Readers
from gpukeeper.interfaces.web.security import (
    THEME,
    Bucket,
    ProxyProblem,
    Signer,
    Visitor,
    cookie_name,
    credentials_of,
    is_secure,
)
from gpukeeper.interfaces.web.source import Source
from gpukeeper.views.live import Delta, MachineView

NOT_LOGGED_IN = 13
LARGEST_FORM = 64 * 1024
REMEMBERED = 5.0  # seconds: whose session it is, unless one is revoked; for each change the daemon looks it up again
MOST_REMEMBERED = 5_000  # logins
THEMES = ("light", "dark")
Page = Callable[["Site", HttpRequest, Visitor], Awaitable[Response]]


class Site:
    """What the pages share: the source, templates, who asks."""

    def __init__(self, source: Source, peers: Peers) -> None:
        self.source = source
        self.signer = Signer(source.settings.key)
        self.peers = peers
        self.refused: Counter[str] = Counter()  # requests, by reason
        self.changed_at = time.monotonic()  # when the source last sent something
        source.listen(self._on_change)
        self.templates = _environment()
        self.readers = Readers(self.templates.get_template("tile.html"))
        self._people: dict[Credentials, tuple[float, int, Person]] = {}  # since when, and after how many revocations
        self.logins = Bucket(rate=5 / 60, burst=10)
        self.reads = Bucket(rate=50, burst=200)
        self.changes = Bucket(rate=0.5, burst=20)
        self.bulk = BulkRuns()
        self.unknown = Bucket(rate=20, burst=100)  # logins that do not exist, by address

    def _on_change(self, machine: str, delta: Delta, view: MachineView) -> None:
        self.changed_at = time.monotonic()

    async def visitor(self, request: HttpRequest) -> Visitor:
        peers = self.peers
        if peers.proxy is not None and peers.proxy.header in request.headers and not peers.is_proxy(request):
            self.refused["proxy header"] += 1  # ignored: anybody can send it
        try:
            presented, by_cookie = credentials_of(request, self.signer, peers, self.cookie(request))
        except ProxyProblem as problem:
            self.refused["proxy header"] += 1
            raise HTTPException(400, str(problem)) from problem
        secret = presented.secret or presented.proxy_user
        return Visitor(
            person=await self.person(presented),
            credentials=presented,
            by_cookie=by_cookie,
            csrf=self.signer.csrf(secret) if secret else "",
            direct=not (peers.is_proxy(request) or peers.is_forwarded(request) or self._is_public(request)),
        )

    def cookie(self, request: HttpRequest) -> str:
        """The name of the cookie of a session."""
        return cookie_name(request, self.source.settings.site, self.peers)

    def _is_public(self, request: HttpRequest) -> bool:
        """Under the name that other machines use: then it came through a proxy, though it arrived over loopback."""
        public = urlsplit(self.source.settings.site.url).hostname
        name = hostname_of(request.headers.get("host", ""))
        return public not in (None, *LOOPBACK_HOSTS) and name == public

    def may_read(self, visitor: Visitor) -> bool:
        """An invalid token is refused even where reading needs no login."""
        return visitor.logged_in or (self.source.settings.anonymous and visitor.direct and visitor.by_cookie)

    def limit(self, bucket: Bucket, who: str, sentence: str) -> None:
        """Raises HTTPException above the rate."""
        now = time.monotonic()
        if not bucket.take(who, now):
            self.refused["rate"] += 1
            wait = math.ceil(bucket.wait(who, now)) or 1
            raise HTTPException(429, f"{sentence} Try again in {wait} s.", headers={"retry-after": str(wait)})

    async def person(self, presented: Credentials) -> Person:
        if not presented.secret and not presented.proxy_user:
            return Person()
        now, revoked = time.monotonic(), self.source.revocations
        where = f"{presented.address} {presented.uid}"
        known = self._people.get(presented)
        if known is not None and now - known[0] <= REMEMBERED and known[1] == revoked:
            return known[2]
        if self.unknown.wait(where, now) > 0:
            self.limit(self.unknown, where, "Too many logins that do not exist.")
        person = (await self.source.ask(presented, "", Request(verb="whoami"))).person
        if not person.name:
            self.unknown.take(where, now)
            return person
        self._people.pop(presented, None)
        self._people[presented] = (now, revoked, person)
        if len(self._people) > MOST_REMEMBERED:
            del self._people[next(iter(self._people))]
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
            fleet=self.source.settings.fleet,
            tile=self.readers.html,
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


@functools.cache
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


def session_cookie(site: Site, request: HttpRequest, response: Response, secret: str) -> None:
    response.set_cookie(
        site.cookie(request),
        site.signer.sign(secret),
        max_age=site.source.settings.session_seconds,
        path="/",
        httponly=True,
        samesite="strict",
        secure=is_secure(request, site.source.settings.site, site.peers),
    )


async def form_of(request: HttpRequest) -> dict[str, str]:
    return dict(await form_pairs(request))


async def form_pairs(request: HttpRequest) -> list[tuple[str, str]]:
    """With every value of a field that is given more than once."""
    return parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True)

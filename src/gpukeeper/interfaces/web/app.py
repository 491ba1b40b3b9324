"""What the pages share: the source, who asks, forms and cookies; what they ask a daemon, and which one; rows without
what others may not see and tiles as HTML, made once for all readers until the row changes; and templates with their
filters: times, numbers and missing values, as people read them.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from gpukeeper.engine.live import PlaceState
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import (
    BUG,
    LOOPBACK_HOSTS,
    NO_COPY,
    NOT_COPIED,
    NOT_LOGGED_IN,
    Answer,
    Credentials,
    Person,
)
from gpukeeper.interfaces.web import charts
from gpukeeper.interfaces.web.peers import Peers
from gpukeeper.interfaces.web.security import (
    THEME,
    Bucket,
    ProxyProblem,
    Signer,
    Visitor,
    cookie_name,
    credentials_of,
    hostname_of,
    is_secure,
)
from gpukeeper.interfaces.web.source import Source
from gpukeeper.lifecycle.forecast import NextStep, done_word, phrases
from gpukeeper.lifecycle.rules.hold import only_in_words
from gpukeeper.lifecycle.warnings import without_steps
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import SOON, UTC_TIME, in_words, size_in_words
from gpukeeper.views.live import Delta, GpuTile, MachineView, Row, WorkloadLine, for_reader, reduced

VIEWS = 64  # of readers that are kept
ROWS = 200_000


class Readers:
    def __init__(self, tile: Template) -> None:
        self._tile = tile
        self._views: dict[tuple[str, str], tuple[MachineView, MachineView]] = {}  # by machine and person
        self._rows: dict[str, tuple[Any, Any]] = {}  # by id: a tile or line, and what others see of it
        self._html: dict[tuple[str, bool], tuple[GpuTile, Markup]] = {}

    def view(self, view: MachineView, person: Person) -> MachineView:
        if person.admin:
            return view
        key = (view.machine, person.name)
        source, found = self._views.pop(key, (None, None))
        if found is None or source is not view:
            found = for_reader(view, person.name or "\0", admin=False, less=self._less)
        self._views[key] = (view, found)
        if len(self._views) > VIEWS:
            del self._views[next(iter(self._views))]
        return found

    def tile(self, tile: GpuTile, person: Person) -> GpuTile:
        return tile if person.admin or (person.name and tile.owner == person.name) else self._less(tile)

    def html(self, tile: GpuTile) -> Markup:
        """Of a tile that its reader may see."""
        known = self._rows.get(tile.id)
        key = (tile.id, known is not None and known[1] is tile)
        source, found = self._html.get(key, (None, Markup()))
        if source is not tile:
            _bound(self._html)
            found = Markup(self._tile.render(one=tile))  # noqa: S704 - a template that escapes
            self._html[key] = (tile, found)
        return found

    def _less(self, row: Row) -> Row:
        if self._rows.get(row.id, (None, None))[0] is not row:
            _bound(self._rows)
            self._rows[row.id] = (row, reduced(row))
        found: Row = self._rows[row.id][1]
        return found


def _bound(rows: dict[Any, Any]) -> None:
    """Rows that are gone are forgotten with all others now and then."""
    if len(rows) >= ROWS:
        rows.clear()


MOST_AT_ONCE = 100  # workloads of one request
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


def moment(at: datetime | None, mode: str = "time") -> Markup:
    """A time element: UTC in the page, the viewer's zone by script. `mode`: time, hour (of a chart), ago, for (since
    then), in (a countdown)."""
    if at is None:
        return Markup('<span class="none">unknown</span>')
    at = at.astimezone(UTC)
    day, time = at.date().isoformat(), at.time().isoformat("seconds")
    words = f"{at:%a} {time[:5]} UTC" if mode == "hour" else f"{'since ' if mode == 'for' else ''}{day} {time[:5]} UTC"
    # Nothing in it needs escaping, which would take half of the time of a page with hundreds of them.
    return Markup(f'<time datetime="{day}T{time}Z" data-mode="{mode}">{words}</time>')  # noqa: S704


def said(words: str) -> Markup:
    """A sentence of gpukeeper, with its times in the time zone of the reader."""
    return Markup("").join(
        _time(part) if number % 2 else escape(part) for number, part in enumerate(UTC_TIME.split(words))
    )


def _time(words: str) -> Markup:
    try:
        return moment(datetime.fromisoformat(f"{words}+00:00"))
    except ValueError:  # a name that only looks like a time
        return escape(f"{words} UTC")


def coming(steps: Sequence[NextStep]) -> Markup:
    """What happens next, as a sentence with countdowns."""
    parts = [
        Markup("{}<b>{}</b> {}").format(one.join, one.words, moment(one.at, "in") if one.at else SOON)
        for one in phrases(steps)
    ]
    return Markup("").join(parts)


def reason(one: GpuTile | WorkloadLine) -> Markup:
    """Why, without the times that its steps have: those in the reason are as old as the last pass."""
    return said(without_steps(one.reason) if one.steps else one.reason)


def known(value: object, unit: str = "", missing: str = "not measured") -> Markup:
    if value is None or isinstance(value, Unknown):
        why = value.why if isinstance(value, Unknown) else missing
        return Markup('<span class="none" title="{}">{}</span>').format(why, missing)
    if isinstance(value, float):
        value = f"{value:.0f}"
    return escape(f"{value}{unit}")


def span(value: timedelta | float) -> str:
    return in_words(value if isinstance(value, timedelta) else timedelta(seconds=value))


def size(value: int | Unknown | None) -> Markup:
    return known(value) if value is None or isinstance(value, Unknown) else escape(size_in_words(value))


def fact(value: object) -> Markup:
    """A fact of any kind as people read it."""
    match value:
        case None | () | []:
            return Markup('<span class="none">none</span>')
        case datetime():
            return moment(value)
        case timedelta():
            return escape(in_words(value))
        case bool():
            return escape("yes" if value else "no")
        case Unknown():
            return known(value, missing="unknown")
        case tuple() | list() | set() | frozenset():
            return Markup(", ").join(fact(one) for one in value)
        case dict():
            return Markup(", ").join(Markup("{} {}").format(key, fact(one)) for key, one in value.items())
        case _:
            return escape(str(value))


def places_of(views: Iterable[MachineView]) -> list[PlaceState]:
    return [place for view in views for place in view.places]


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
    made.filters.update(
        moment=moment,
        known=known,
        span=span,
        size=size,
        fact=fact,
        coming=coming,
        said=said,
        done_word=done_word,
        rules=only_in_words,
        reason=reason,
    )
    made.globals.update(sparkline=charts.sparkline, stacked=charts.stacked, places_of=places_of)
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


T = TypeVar("T")
# By exit code; all others are the fault of the request.
STATUS = {NOT_COPIED: 404, NO_COPY: 503, BUG: 500, KeeperError.exit_code: 503}
LATER = {"retry-after": "10"}  # seconds


def machine_named(site: Site, name: str) -> str:
    """The one that was named, or the only one."""
    known = site.source.machines
    if name and name not in known:
        raise HTTPException(404, f'There is no machine "{name[:60]}".')
    if not name and len(known) != 1:
        raise HTTPException(400, "Name the machine: there is more than one." if known else "No machine is known yet.")
    return name or next(iter(known))


def machine_of(site: Site, request: HttpRequest) -> str:
    """For a page about one machine: the one in its address, or the first."""
    known = sorted(site.source.machines)
    name = request.query_params.get("machine", "")
    return machine_named(site, name or (known[0] if known else ""))


def machine_or_all(site: Site, name: str) -> str:
    """For what can be summed up over machines: empty for all of a fleet."""
    return "" if site.source.settings.fleet and not name else machine_named(site, name)


async def ask_for(site: Site, visitor: Visitor, machine: str, kind: type[T], request: Request, refused: int = 400) -> T:
    answer = await site.ask(visitor, machine, request)
    if not answer.done:
        status = STATUS.get(answer.exit_code, refused)
        raise HTTPException(status, answer.words, headers=LATER if status == 503 else None)
    return reading.decode(answer.body, type=kind)

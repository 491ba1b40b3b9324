"""Who a browser or program is, and what protects them: cookies, CSRF tokens, headers, rate limits; and what is
checked of every request before a page sees it: its host, where it comes from, and which page sent it.

A cookie is the secret of a session with a signature, so that noise never reaches the daemon, which decides whose it
is. Pages of other sites must neither read the dashboard under a name of their own nor press its buttons.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import urlsplit

import msgspec
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpukeeper.interfaces.link import PERSON, Credentials, Person, SiteSettings
from gpukeeper.interfaces.web.peers import Peers, address_of, is_here

COOKIE = "gk_session"
SECURE_COOKIE = f"__Host-{COOKIE}"  # browsers take it over HTTPS only, from this host only, and only with Secure
THEME = "gk_theme"
CSRF = "csrf"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "referrer-policy": "same-origin",  # a link to log in must not be passed on; without any, forms have no origin
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
HSTS = {"strict-transport-security": f"max-age={30 * 86400}"}


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, as far as known here. `by_cookie`: requests that change something need a CSRF token. `direct`: not
    through a reverse proxy."""

    person: Person
    credentials: Credentials
    by_cookie: bool
    csrf: str
    direct: bool = True

    @property
    def who(self) -> str:
        """Whose share of what is limited. All users of a machine have its address."""
        at = self.credentials
        return self.person.name or (at.address if at.uid is None else f"{at.address} uid {at.uid}")

    @property
    def logged_in(self) -> bool:
        return bool(self.person.name)

    def may_change(self, owner: object) -> bool:
        """Whether buttons are shown; the daemon decides when one is pressed."""
        return self.logged_in and (self.person.admin or owner == self.person.name)

    def may_stop(self, owner: object, *, verified: bool) -> bool:
        """A claimed owner may hold it, but not stop or remove it."""
        return self.may_change(owner) and (self.person.admin or verified)


class Signer:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, secret: str) -> str:
        return f"{secret}.{self._mac('cookie', secret)}"

    def unsign(self, cookie: str) -> str:
        """Empty: not signed by us."""
        secret, _, mac = cookie.rpartition(".")
        return secret if hmac.compare_digest(mac.encode(), self._mac("cookie", secret).encode()) else ""

    def csrf(self, secret: str) -> str:
        return self._mac("csrf", secret)

    def _mac(self, purpose: str, words: str) -> str:
        return hmac.new(self._key, f"{purpose}\0{words}".encode(errors="surrogateescape"), sha256).hexdigest()


class ProxyProblem(ValueError):
    """The trusted proxy sent something that names no person."""


def credentials_of(
    connection: HTTPConnection, signer: Signer, peers: Peers, cookie: str = COOKIE
) -> tuple[Credentials, bool]:
    """What was presented, and whether a browser sends it by itself. Raises ProxyProblem."""
    address, proxy = peers.address(connection), ""
    if peers.proxy is not None and peers.is_proxy(connection):
        address, proxy = peers.client(connection), address
        name = _proxy_name(connection.headers.getlist(peers.proxy.header))
        if name:
            return Credentials(proxy_user=name, proxy=proxy, address=address), True
    words, uid = connection.headers.get("authorization", ""), peers.uid(connection)
    if words.lower().startswith("bearer "):
        return Credentials(secret=words[7:].strip(), address=address, uid=uid), False
    return Credentials(secret=signer.unsign(connection.cookies.get(cookie, "")), address=address, uid=uid), True


def _proxy_name(given: Sequence[str]) -> str:
    """Empty: the proxy reports nobody."""
    if len(given) > 1:
        raise ProxyProblem("The reverse proxy sent the name of the person more than once. Nothing was done.")
    name = given[0].strip() if given else ""
    if name and not PERSON.fullmatch(name):
        raise ProxyProblem("The reverse proxy sent a name that no person can have. Nothing was done.")
    return name


def cookie_name(connection: HTTPConnection, settings: SiteSettings, peers: Peers) -> str:
    return SECURE_COOKIE if is_secure(connection, settings, peers) else COOKIE


def is_secure(connection: HTTPConnection, settings: SiteSettings, peers: Peers) -> bool:
    """Whether the browser reaches us over HTTPS, so that it must send the cookie over HTTPS only."""
    if connection.scope["scheme"] == "https":
        return True
    if peers.is_proxy(connection) and connection.headers.get("x-forwarded-proto", "").lower() == "https":
        return True
    url = urlsplit(settings.url)
    hosts = [urlsplit(f"//{connection.headers.get(name, '')}").hostname for name in ("host", "x-forwarded-host")]
    return url.scheme == "https" and url.hostname in hosts


@dataclass
class Bucket:
    """Rate limits by address or person: `burst` at once, then `rate` a second."""

    rate: float
    burst: float
    most: int = 10_000  # entries; the oldest is forgotten
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # by name: tokens, and when

    def take(self, who: str, now: float) -> bool:
        left, at = self._left.pop(who, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.rate)
        allowed = left >= 1.0
        self._left[who] = (left - 1.0 if allowed else left, now)
        if len(self._left) > self.most:
            del self._left[next(iter(self._left))]
        return allowed

    def wait(self, who: str, now: float) -> float:
        """Seconds until the next is allowed."""
        left, at = self._left.get(who, (self.burst, now))
        return max(0.0, (1.0 - left) / self.rate - (now - at))


LARGEST_HEAD = 32 * 1024  # bytes of a request without its body
SAFE = ("GET", "HEAD", "OPTIONS")
OURS = ("same-origin", "none")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Guard:
    """On every request and response. `refused`: how many requests, by reason."""

    def __init__(self, app: ASGIApp, settings: SiteSettings, peers: Peers, refused: Counter[str]) -> None:
        self._app, self._settings, self._peers, self._refused = app, settings, peers, refused
        wanted = HEADERS | (HSTS if settings.tls and settings.url else {})
        self._headers = [(name.encode(), value.encode()) for name, value in wanted.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        connection = HTTPConnection(scope)
        if _head_size(scope) > LARGEST_HEAD:
            return self._refuse(scope, "size", 400, f"The headers are larger than {LARGEST_HEAD:,} bytes.")
        if "content-length" in connection.headers and "transfer-encoding" in connection.headers:
            return self._refuse(scope, "size", 400, "The request has two lengths.", close=True)
        words = self._wrong_host(connection)
        if words is not None:
            return self._refuse(scope, "host", 421, words)
        if self._settings.only_proxy and not self._may_connect(connection):
            where = f" Use {self._settings.url}" if self._settings.url else ""
            return self._refuse(scope, "address", 403, f"The dashboard is reached through its reverse proxy.{where}")
        if scope["method"] not in SAFE and not self._is_ours(connection):
            words = (
                "The request was sent by a page of another site. Nothing was done. If it was this page, set web.url to "
                "the address that browsers use."
            )
            return self._refuse(scope, "origin", 403, words)
        return None

    def _wrong_host(self, connection: HTTPConnection) -> str | None:
        """A name that another site has given to this address (DNS rebinding) is not ours."""
        given = connection.headers.getlist("host")
        if len(given) > 1:
            return "The request has more than one header Host."
        name = hostname_of(given[0]) if given else ""
        if not self._settings.hosts or name in self._settings.hosts:
            return None
        return (
            f'This server is not "{name[:100]}". Use http://localhost and the port, or set web.url to the address '
            "that browsers use."
        )

    def _may_connect(self, connection: HTTPConnection) -> bool:
        """Through the proxy, or from this machine."""
        return self._peers.is_proxy(connection) or is_here(self._peers.address(connection))

    def _is_ours(self, connection: HTTPConnection) -> bool:
        """As far as the browser reports it. Programs send neither header."""
        site = connection.headers.get("sec-fetch-site")
        if site is not None and site not in OURS:
            return False
        origin = connection.headers.get("origin")
        if origin is None:
            return True
        known = [f"{connection.scope['scheme']}://{connection.headers.get('host', '')}", self._settings.url]
        if self._peers.is_proxy(connection):
            scheme = connection.headers.get("x-forwarded-proto", "https")
            known.append(f"{scheme}://{connection.headers.get('x-forwarded-host', '')}")
        given = _origin(origin)
        return given is not None and given in map(_origin, known)

    def _refuse(self, scope: Scope, reason: str, status: int, words: str, *, close: bool = False) -> Response:
        self._refused[reason] += 1
        headers = {"connection": "close"} if close else None
        if scope["path"].startswith("/api/"):
            return JSONResponse({"error": words}, status, headers)
        return PlainTextResponse(f"{words}\n", status, headers)


def _head_size(scope: Scope) -> int:
    """Bytes of its first line and headers. The parser limits only what arrives in pieces."""
    return len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in scope["headers"])


def hostname_of(host: str) -> str:
    """Without port and brackets, in one spelling."""
    words = host.strip().lower()
    if words.startswith("["):
        name, _, port = words[1:].partition("]")
        if port and not (port[0] == ":" and port[1:].isdecimal()):
            return words  # of nobody
    else:
        name = words.rpartition(":")[0] or words
    found = address_of(name)
    return str(found) if found is not None else name.removesuffix(".")


def _origin(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port. None: it has none."""
    try:
        parts = urlsplit(url.strip().lower())
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname and port else None

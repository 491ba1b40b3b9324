"""Who a browser or program is, and what protects them: cookies, CSRF tokens, headers, rate limits.

A cookie is the secret of a session with a signature, so that noise never reaches the daemon. The daemon knows the hash
of the secret and decides whose it is; see `gpukeeper.interfaces.link`.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import urlsplit

import msgspec
from starlette.requests import HTTPConnection

from gpukeeper.interfaces.link import PERSON, Credentials, Person, SiteSettings
from gpukeeper.interfaces.web.peers import Peers

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

"""What is checked of every request before a page sees it: its host, where it comes from, and which page sent it.

A browser sends cookies, and connects to loopback, for any page that is open in it: pages of other sites, also of other
ports of this machine, must neither read the dashboard under a name of their own nor press its buttons.
"""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpukeeper.interfaces.link import SiteSettings
from gpukeeper.interfaces.web.addresses import address_of, is_here
from gpukeeper.interfaces.web.peers import Peers
from gpukeeper.interfaces.web.security import HEADERS, HSTS

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

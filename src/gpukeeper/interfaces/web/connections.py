"""Connections of the dashboard, over HTTP or HTTPS on a socket that was passed to this process: how many there may
be, and how long a request and its response may take.

A connection that waits for a request is closed when a new one needs its place, the oldest of the client with the
most. Each client, a user of this machine or another address, has a share: none can block others.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpukeeper.interfaces.link import UNKNOWN_UID, TlsPair
from gpukeeper.interfaces.web.peers import CONNECTION, is_here, is_quick, plain, socket_owner
from gpukeeper.interfaces.web.security import LARGEST_HEAD

USER = 64  # connections of one user of this machine; all whose user is not known have one share
SERVICE = 256  # of a service, perhaps a proxy that no policy names
RESERVE = 64  # for root and the trusted proxy, where all others have used up theirs
FIRST_USER = 1_000
SUBUIDS = Path("/etc/subuid")


class Shares:
    """`trusted`: uids without a limit of their own. With user namespaces a user can have thousands of uids: those that
    /etc/subuid gives them are one share."""

    def __init__(self, proxy: int | None = None) -> None:
        self._trusted = {0} if proxy is None else {0, proxy}
        self._subuids = list(_subuids())
        is_quick()  # tried now, while there are free descriptors

    def of(self, transport: asyncio.BaseTransport) -> tuple[str, int | None]:
        """Whose share a new connection counts on, and how many connections that has; None: as many as there are."""
        peer, own = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        if not peer or not own:
            return self.of_uid(UNKNOWN_UID)
        if not is_here(peer[0]):
            return plain(peer[0]), None
        found = socket_owner(peer[:2], own[:2]) if is_quick() else None  # reading whole tables would be the attack
        return self.of_uid(UNKNOWN_UID if found is None else found)

    def of_uid(self, uid: int) -> tuple[str, int | None]:
        for first, count, user in self._subuids:
            if first <= uid < first + count:
                return f"subuids of {user}", USER
        if uid in self._trusted:
            return f"uid {uid}", None
        return f"uid {uid}", SERVICE if 0 < uid < FIRST_USER else USER

    def is_trusted(self, share: str) -> bool:
        return share in {f"uid {uid}" for uid in self._trusted}


def _subuids() -> Iterator[tuple[int, int, str]]:
    """First uid, number of uids, and whose they are."""
    with suppress(OSError):
        for line in SUBUIDS.read_text(errors="replace").splitlines():
            user, _, rest = line.partition(":")
            first, _, count = rest.partition(":")
            if first.isdecimal() and count.strip().isdecimal() and len(rest) < 24:
                yield int(first), int(count), user


MOST = 2_000  # connections
SPARE = 64  # descriptors for everything else
HANDSHAKE = 5.0  # seconds
REQUEST = 10.0  # seconds until a request has arrived, with its body
RESPONSE = 30.0  # seconds without progress until a response that is not read is given up


class Connections:
    """All connections of the process, each with whose share it is; `waiting`, oldest first: those that have not sent a
    request."""

    def __init__(self, most: int | None = None, proxy: int | None = None) -> None:
        self.most = most or _room()
        self.shares = Shares(proxy)
        self.open: dict[asyncio.BaseTransport, str] = {}
        self.waiting: dict[asyncio.BaseTransport, None] = {}
        self.closed = 0  # to make room
        self._held: Counter[str] = Counter()

    def opened(self, transport: asyncio.BaseTransport) -> bool:
        """False: there is no room, and the connection must be closed."""
        share, most = self.shares.of(transport)
        room = self.most if self.shares.is_trusted(share) else self.most - min(RESERVE, self.most // 4)
        if most is not None and self._held[share] >= most:
            crowded = {share}
        elif len(self.open) >= room:
            crowded = {one for one, held in self._held.items() if held > self._held[share]} | {share}
        else:
            crowded = set()
        if crowded:
            waiting = (one for one in self.waiting if self.open[one] in crowded)
            oldest = max(waiting, key=lambda one: self._held[self.open[one]], default=None)
            self.closed += 1
            if oldest is None:
                return False
            self.lost(oldest)
            cast(asyncio.Transport, oldest).abort()
        self.open[transport] = share
        self._held[share] += 1
        self.waiting[transport] = None
        return True

    def asked(self, transport: asyncio.BaseTransport) -> None:
        self.waiting.pop(transport, None)

    def answered(self, transport: asyncio.BaseTransport) -> None:
        if transport in self.open:
            self.waiting[transport] = None

    def lost(self, transport: asyncio.BaseTransport) -> None:
        self.waiting.pop(transport, None)
        share = self.open.pop(transport, None)
        if share is not None:
            self._held[share] -= 1
            if not self._held[share]:
                del self._held[share]


def _room() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + SPARE if hard == resource.RLIM_INFINITY else min(MOST + SPARE, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        soft = max(soft, wanted)
    return max(min(MOST, soft - SPARE), 8)


class HttpConnection(H11Protocol):
    """With deadlines: uvicorn waits for ever for a request, and for a response to be read. `raw`: below TLS."""

    def __init__(self, connections: Connections, raw: asyncio.Transport, **given: Any) -> None:
        super().__init__(**given)
        self._connections, self._raw = connections, raw
        self.app_state = {**self.app_state, CONNECTION: {}}
        self._arriving: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._early: bytes | None = b""  # what came together with the end of the handshake; None: it is over

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        early, self._early = self._early, None
        self.data_received(early) if early else self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._early is None:
            super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._arriving, self._leaving):
            if timer is not None:
                timer.cancel()
        self._connections.lost(self._raw)

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._connections.answered(self._raw)  # uvicorn closes it later if nothing more comes

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._leaving is None:
            self._leaving = self.loop.call_later(RESPONSE, self._raw.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _await_request(self) -> None:
        """The deadline counts from the first byte, or from the beginning of the connection."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._arriving is None:
                self._arriving = self.loop.call_later(REQUEST, self._raw.abort)
            return
        self._connections.asked(self._raw)
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None


class Gate(asyncio.Protocol):
    """The beginning of a connection: finds room for it, and makes it a TLS connection."""

    def __init__(self, connections: Connections, context: ssl.SSLContext | None, given: dict[str, Any]) -> None:
        self._connections, self._context, self._given = connections, context, given
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast(asyncio.Transport, transport)
        if not self._connections.opened(raw):
            raw.abort()
            return
        http = HttpConnection(self._connections, raw, **self._given)
        if self._context is None:
            raw.set_protocol(http)
            http.connection_made(raw)
            return
        raw.pause_reading()  # what comes belongs to TLS
        self._task = asyncio.get_running_loop().create_task(self._secure(raw, http, self._context))

    def connection_lost(self, exc: Exception | None) -> None:
        """Before its HTTP began."""

    async def _secure(self, raw: asyncio.Transport, http: HttpConnection, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            made = await loop.start_tls(raw, http, context, server_side=True, ssl_handshake_timeout=HANDSHAKE)
        except (OSError, TimeoutError):
            made = None  # no TLS, too slow, or gone
        if made is None or raw.is_closing():
            self._connections.lost(raw)
            raw.abort()
            return
        http.connection_made(made)


def protocol(connections: Connections, context: ssl.SSLContext | None) -> Callable[..., asyncio.Protocol]:
    """For uvicorn, as the class of its HTTP protocol."""

    def make(**given: Any) -> asyncio.Protocol:
        return Gate(connections, context, given)

    return make


def tls_context(pair: TlsPair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_pair(context, pair)
    return context


def load_pair(context: ssl.SSLContext, pair: TlsPair) -> None:
    """For connections from now on. OpenSSL reads files only, and this process may read none: they are in memory."""
    with _in_memory(pair.certificate) as certificate, _in_memory(pair.key) as key:
        context.load_cert_chain(certificate, key, password=lambda: "")


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """The path of a file with this content, for this process only."""
    descriptor = os.memfd_create("gpukeeper-tls")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


KEEP_ALIVE = 20  # seconds
BACKLOG = 4_096  # connections that wait to be accepted: with fewer one client keeps out all others for seconds


class HttpServer:
    """`tls`: None: without. `proxy`: the uid of a trusted proxy on this machine."""

    def __init__(self, app: Starlette, tls: TlsPair | None, proxy: int | None = None) -> None:
        self._context = None if tls is None else tls_context(tls)
        self.connections = Connections(proxy=proxy)
        app.state.connections = self.connections
        self._config = uvicorn.Config(
            app,
            http=cast(Any, protocol(self.connections, self._context)),
            loop="asyncio",
            log_level="error",  # what clients send is no warning
            access_log=False,
            server_header=False,
            date_header=True,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=LARGEST_HEAD,
            backlog=BACKLOG,
            ws="none",
            proxy_headers=False,
        )

    def renew(self, tls: TlsPair) -> None:
        if self._context is not None:
            load_pair(self._context, tls)

    async def serve(self, listener: socket.socket, until: Awaitable[None]) -> None:
        server = uvicorn.Server(self._config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait([serving, asyncio.ensure_future(until)], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving

"""Connections of the dashboard: TLS, how many there may be, and how long a request and its response may take.

Anybody on the network, or every user of the machine, can connect. A connection that waits for a request is closed when
a new one needs its place, the oldest of the user with the most: no client can block others.
"""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpukeeper.interfaces.link import TlsPair
from gpukeeper.interfaces.web.peers import CONNECTION
from gpukeeper.interfaces.web.shares import RESERVE, Shares

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

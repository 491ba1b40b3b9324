"""Serves the dashboard over HTTP or HTTPS on a socket that was passed to this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from gpukeeper.interfaces.link import TlsPair
from gpukeeper.interfaces.web.connections import Connections, load_pair, protocol, tls_context
from gpukeeper.interfaces.web.guard import LARGEST_HEAD

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

"""A small API server on a loopback socket that answers what a test wrote down, in order, and breaks when told."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from gpukeeper.clients.kubernetes import auth
from gpukeeper.clients.kubernetes.connect import Cluster

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PODS = "/api/v1/pods"


@dataclass
class Asked:
    method: str
    path: str
    query: dict[str, str]
    headers: list[tuple[str, str]]
    body: Any

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class Reply:
    """One answer. `cut`: the connection ends in its middle; `stuck`: it never comes."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    stuck: bool = False


class ScriptedApi:
    """Replies are used up one by one; the last one stays."""

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply | Handler]] = {}
        self.asked: list[Asked] = []
        self.peers: list[str | None] = []  # the name in the client's certificate, per request
        self.address = ""

    def says(self, what: str, *replies: Reply | Handler) -> None:
        self.replies[what] = list(replies)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        read = await request.read()
        headers = [(name, value) for name, value in request.headers.items()]
        body = json.loads(read) if read else None
        self.asked.append(Asked(request.method, request.path, dict(request.query), headers, body))
        self.peers.append(_peer(request))
        waiting = self.replies.get(f"{request.method} {request.path}")
        if not waiting:
            return web.Response(status=404, text="404 page not found")
        reply = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return await (reply(request) if callable(reply) else _send(reply, request))


async def _send(reply: Reply, request: web.Request) -> web.StreamResponse:
    if reply.stuck:
        await asyncio.Event().wait()
    body = reply.body if isinstance(reply.body, bytes | str) else json.dumps(reply.body)
    data = body if isinstance(body, bytes) else body.encode()
    if reply.cut:
        answer = web.StreamResponse(status=reply.status, headers={**reply.headers, "Content-Length": str(len(data))})
        await answer.prepare(request)
        await answer.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.abort()
        return answer
    return web.Response(status=reply.status, headers=reply.headers, body=data, content_type="application/json")


def _peer(request: web.Request) -> str | None:
    assert request.transport is not None
    certificate = request.transport.get_extra_info("peercert")
    names = dict(one[0] for one in (certificate or {}).get("subject", ()))
    return names.get("commonName")


def stream(*lines: object, cut: bool = False, open_after: bool = False) -> Handler:
    """A watch: these lines, then it ends, breaks, or says nothing any more."""

    async def send(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for line in lines:
            data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            await answer.write(data)
        if open_after:
            await asyncio.Event().wait()
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return answer

    return send


class Time:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.sleeping = asyncio.Event()  # somebody did, at least once

    def clock(self) -> float:
        return self.now

    def utc(self) -> datetime:
        return datetime(2026, 9, 1, 12, tzinfo=UTC) + timedelta(seconds=self.now)

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        self.slept.append(seconds)
        self.sleeping.set()
        for _ in range(5):  # others run meanwhile
            await asyncio.sleep(0)
        self.now = max(self.now, until)


@asynccontextmanager
async def listening(api: ScriptedApi, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedApi]:
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{rest:.*}", api._answer)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    api.address = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield api
    finally:
        await runner.cleanup()


def kubeconfig(
    file: Path, server: str, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None
) -> Path:
    text = {
        "current-context": "lab",
        "clusters": [{"name": "it", "cluster": {"server": server, **(cluster or {})}}],
        "contexts": [{"name": "lab", "context": {"cluster": "it", "user": "me", "namespace": "research"}}],
        "users": [{"name": "me", "user": user or {}}],
    }
    file.write_text(json.dumps(text))
    return file


def ask(
    api: ScriptedApi,
    what: Callable[[Cluster], Awaitable[T]],
    folder: Path,
    *,
    user: dict[str, Any] | None = None,
    time: Time | None = None,
    requests: float = 1000,
    burst: int = 1000,
) -> T:
    """Serves, connects as `user`, asks."""
    time = time or Time()

    async def run() -> T:
        async with listening(api):
            file = kubeconfig(folder / "config", api.address, user)
            login = auth.from_files([file], None, {}, auth.utc_now)
            cluster = Cluster(
                login, requests, burst, clock=time.clock, sleep=time.sleep, chance=lambda: 0.5, utc=time.utc
            )
            async with cluster.opened():
                return await what(cluster)

    return asyncio.run(run())


def pods(*names: str, more: str = "", version: str = "7") -> dict[str, Any]:
    items = [{"metadata": {"name": name, "namespace": "lab", "uid": f"uid-{name}"}} for name in names]
    return {"kind": "PodList", "metadata": {"resourceVersion": version, "continue": more}, "items": items}


def refused(code: int, reason: str, message: str = "because", **more: Any) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, **more}

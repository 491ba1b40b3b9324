"""A small engine that works: it listens on a real socket, has containers, obeys, refuses and says what it was asked."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from gpukeeper.clients.docker import Engine
from tests.patience import PATIENT

T = TypeVar("T")
SHORT = timedelta(milliseconds=200)


class FakeEngine:
    def __init__(self, *told: dict[str, Any], version: str = "1.41") -> None:
        self.containers = {one["Id"]: one for one in told}
        self.volumes: list[dict[str, Any]] = []
        self.networks: list[dict[str, Any]] = []
        self.images: dict[str, dict[str, Any]] = {}
        self.version = version
        self.asked: list[str] = []  # METHOD path?query
        self.bodies: list[Any] = []
        self.answers: dict[str, tuple[int, str]] = {}  # METHOD path → what is answered instead
        self.stuck: set[str] = set()  # METHOD path that never answers
        self.before: Callable[[str], Awaitable[None] | None] = lambda _call: None
        self.past: list[dict[str, Any]] = []
        self.live: asyncio.Queue[str | None] = asyncio.Queue()
        self.usage: dict[str, Any] = {"LayersSize": 0}

    def acts(self) -> list[str]:
        return [call for call in self.asked if not call.startswith("GET")]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix(f"/v{self.version}")
        call = f"{request.method} {path}"
        self.asked.append(call + (f"?{request.query_string}" if request.query_string else ""))
        body = await request.read()
        self.bodies.append(json.loads(body) if body else None)
        waiting = self.before(call)
        if waiting is not None:
            await waiting
        if call in self.stuck:
            await asyncio.Event().wait()
        if call in self.answers:
            status, words = self.answers[call]
            return web.Response(status=status, text=words)
        if path == "/_ping":
            return web.Response(text="OK", headers={"Api-Version": self.version})
        if path == "/events":
            return await self._events(request)
        return self._plain(request.method, path, self.bodies[-1], dict(request.query))

    def _plain(self, method: str, path: str, body: Any, query: dict[str, str]) -> web.Response:
        parts = path.strip("/").split("/")
        match method, *parts:
            case "GET", "info":
                return web.json_response({"Name": "node-3", "DefaultRuntime": "runc"})
            case "GET", "containers", "json":
                return web.json_response([self._line(one) for one in self.containers.values()])
            case "POST", "containers", "create":
                return web.json_response({"Id": "e" * 64, "Warnings": []}, status=201)
            case "GET", "images", "json":
                return web.json_response(list(self.images.values()))
            case "GET", "images", name, "json":
                found = self.images.get(name)
                return web.json_response(found) if found else _no(404, f"No such image: {name}")
            case "DELETE", "images", _name:
                return web.json_response([])
            case "GET", "volumes":
                return web.json_response({"Volumes": self.volumes})
            case "GET", "networks":
                return web.json_response(self.networks)
            case "DELETE", "volumes" | "networks", _name:
                return web.Response(status=204)
            case "GET", "system", "df":
                return web.json_response(self.usage)
            case _, "containers", id_, *_rest if id_ not in self.containers:
                return _no(404, f"No such container: {id_}")
            case "GET", "containers", id_, "json":
                sized = "size" in query  # an engine measures only then
                told = self.containers[id_]
                return web.json_response({key: told[key] for key in told if sized or key != "SizeRw"})
            case "POST", "containers", id_, "update":
                self.containers[id_]["HostConfig"]["RestartPolicy"] = body["RestartPolicy"]
                return web.json_response({"Warnings": []})
            case "POST", "containers", id_, "stop":
                if not self.containers[id_]["State"]["Running"]:
                    return web.Response(status=304)
                self.end(id_)
                return web.Response(status=204)
            case "DELETE", "containers", id_:
                if self.containers[id_]["State"]["Running"]:
                    return _no(409, "You cannot remove a running container")
                del self.containers[id_]
                return web.Response(status=204)
            case "POST", "containers", id_, "start":
                return web.Response(status=304 if self.containers[id_]["State"]["Running"] else 204)
        return _no(404, "page not found")

    def end(self, id_: str) -> None:
        state = {"Status": "exited", "Running": False, "Pid": 0, "FinishedAt": "2026-11-15T11:00:00Z", "ExitCode": 137}
        self.containers[id_]["State"] |= state

    def restart(self, id_: str) -> None:
        state = {"Status": "running", "Running": True, "Pid": 4343, "StartedAt": "2026-11-15T11:30:00.5Z"}
        self.containers[id_]["State"] |= state

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.past:
            await response.write(json.dumps(event).encode() + b"\n")
        if "until" not in request.query:
            while (line := await self.live.get()) is not None:
                await response.write(line.encode() + b"\n")
        return response

    @staticmethod
    def _line(told: dict[str, Any]) -> dict[str, Any]:
        return {
            "Id": told["Id"],
            "Names": [told["Name"]],
            "Image": told["Config"]["Image"],
            "ImageID": told["Image"],
            "State": told["State"]["Status"],
            "Created": 1,
        }


class Hasty(Engine):
    """Who waits only a moment for an answer that does not come, so that tests do not."""

    stuck: set[str]

    async def get(self, path: str, type_: type[T], *, deadline: timedelta = PATIENT, **query: object) -> T:
        limit = SHORT if f"GET {path}" in self.stuck else PATIENT
        return await super().get(path, type_, deadline=limit, **query)


@asynccontextmanager
async def served(fake: FakeEngine, *, hasty: bool = False) -> AsyncIterator[Engine]:
    """An engine client that talks to it, opened."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "s")
        await web.UnixSite(runner, socket).start()
        engine = (Hasty if hasty else Engine)(f"unix://{socket}")
        if isinstance(engine, Hasty):
            engine.stuck = fake.stuck
        try:
            async with engine.opened():
                yield engine
        finally:
            await runner.cleanup()


def event(id_: str, action: str, **attributes: str) -> dict[str, Any]:
    return {
        "Type": "container",
        "Action": action,
        "Actor": {"ID": id_, "Attributes": attributes},
        "timeNano": 1794736800_000_000_000,
    }


def _no(status: int, words: str) -> web.Response:
    return web.json_response({"message": words}, status=status)

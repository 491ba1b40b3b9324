"""A small API server that works: objects with uid and version, preconditions, patches, subresources, logs; on loopback.

It obeys, refuses as the real one does, says what it was asked, and can be told to answer something else.
"""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from aiohttp import web

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.kinds.kind import Kind

T = TypeVar("T")
Object = dict[str, Any]
NAMESPACE = "team-a"
MISFIT = "the server rejected our request due to an error in our request"


class Refusal(Exception):
    def __init__(self, status: int, reason: str, words: str, **details: Any) -> None:
        super().__init__(words)
        self.status = status
        self.body = {"kind": "Status", "reason": reason, "message": words, "code": status, "details": details}


class StoredApi:
    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}  # by path
        self.namespaces = {NAMESPACE}
        self.logs: dict[str, str] = {}  # by pod/container, with .previous after it
        self.asked: list[str] = []  # METHOD path
        self.queries: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.answers: dict[str, list[Refusal | str]] = {}  # METHOD path: said instead, one after the other
        self.stuck: set[str] = set()
        self.before: Callable[[str], None] = lambda _call: None
        self._version = 100

    def put(self, kind: Kind, told: Object) -> str:
        """Store it; its path."""
        told = copy.deepcopy(told)
        group = f"{kind.group}/" if kind.group else ""
        told = {"apiVersion": group + kind.versions[0], "kind": kind.kind, **told}
        meta = told.setdefault("metadata", {})
        meta.setdefault("namespace", NAMESPACE)
        meta.setdefault("uid", f"uid-{meta['name']}")
        meta.setdefault("generation", 1)
        meta["resourceVersion"] = self.next_version()
        path = kind.path(kind.versions[0], meta["namespace"], meta["name"])
        self.objects[path] = told
        return path

    def touch(self, path: str, **status: Any) -> None:
        """Somebody writes to it."""
        self.objects[path].setdefault("status", {}).update(status)
        self.objects[path]["metadata"]["resourceVersion"] = self.next_version()

    def next_version(self) -> str:
        self._version += 1
        return str(self._version)

    def writes(self) -> list[str]:
        return [call for call in self.asked if not call.startswith("GET")]

    def body_of(self, call: str) -> Any:
        return self.bodies[len(self.asked) - 1 - self.asked[::-1].index(call)]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        call = f"{request.method} {request.path}"
        read = await request.read()
        self.asked.append(call)
        self.queries.append(dict(parse_qsl(request.query_string)))
        self.bodies.append(json.loads(read) if read else None)
        self.before(call)
        if call in self.stuck:
            await asyncio.Event().wait()
        try:
            if self.answers.get(call):
                said = self.answers[call].pop(0)
                if isinstance(said, Refusal):
                    raise said
                return web.Response(status=502, text=said)
            return self._plain(request, self.bodies[-1])
        except Refusal as no:
            return web.json_response(no.body, status=no.status)

    def _plain(self, request: web.Request, body: Any) -> web.StreamResponse:
        path, query = request.path, self.queries[-1]
        stem, _, last = path.rpartition("/")
        match request.method, last:
            case "GET", "log":
                return self._log(stem, query)
            case "GET", "events":
                return web.json_response({"kind": "EventList", "items": self._events(query)})
            case "GET", _:
                return web.json_response(self._at(path))
            case "DELETE", _:
                self._conditions(self._at(path), body["preconditions"])
                return web.json_response(self.objects.pop(path))
            case "POST", "eviction":
                self._conditions(self._at(stem), body["deleteOptions"]["preconditions"])
                del self.objects[stem]
                return web.json_response({"kind": "Status", "status": "Success"}, status=201)
            case "POST", _:
                return self._create(path, body)
            case "PATCH", "scale":
                parent = self._at(stem)
                self._conditions(parent, body["metadata"])
                return web.json_response(self._written(stem, _merged(parent, {"spec": body["spec"]})))
            case "PATCH", _ if isinstance(body, list):
                return web.json_response(self._written(path, _patched(self._at(path), body)))
            case "PATCH", _:
                self._conditions(self._at(path), body.get("metadata", {}))
                return web.json_response(self._written(path, _merged(self._at(path), body)))
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _at(self, path: str) -> Object:
        if path not in self.objects:
            plural, name = path.rsplit("/", 2)[1:]
            raise Refusal(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
        return self.objects[path]

    def _conditions(self, stored: Object, wanted: Object) -> None:
        for field in ("uid", "resourceVersion"):
            if wanted.get(field, stored["metadata"][field]) != stored["metadata"][field]:
                words = f"Precondition failed: {field} in precondition: {wanted[field]}"
                raise Refusal(409, "Conflict", words, name=stored["metadata"]["name"])

    def _written(self, path: str, now: Object) -> Object:
        was = self.objects[path]
        if now.get("spec") != was.get("spec"):
            now["metadata"]["generation"] += 1
        now["metadata"]["resourceVersion"] = self.next_version()
        self.objects[path] = now
        return now

    def _create(self, path: str, body: Object) -> web.StreamResponse:
        namespace = path.split("/namespaces/")[1].partition("/")[0]
        if namespace not in self.namespaces:
            raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        meta = body["metadata"]
        meta.setdefault("name", f"{meta.get('generateName')}x{len(self.objects)}")
        place = f"{path}/{meta['name']}"
        if place in self.objects:
            raise Refusal(409, "AlreadyExists", f'"{meta["name"]}" already exists', name=meta["name"])
        made = {**body, "metadata": {**meta, "uid": f"made-{len(self.objects)}", "generation": 1}}
        made["metadata"]["resourceVersion"] = self.next_version()
        self.objects[place] = made
        return web.json_response(made, status=201)

    def _events(self, query: dict[str, str]) -> list[Object]:
        uid = query["fieldSelector"].removeprefix("involvedObject.uid=")
        found = [one for path, one in self.objects.items() if "/events/" in path]
        return [one for one in found if one["involvedObject"]["uid"] == uid]

    def _log(self, pod: str, query: dict[str, str]) -> web.StreamResponse:
        self._at(pod)
        name = f"{pod.rpartition('/')[2]}/{query['container']}" + (".previous" if "previous" in query else "")
        if name not in self.logs:
            raise Refusal(400, "BadRequest", f'container "{query["container"]}" is waiting to start')
        lines = self.logs[name].splitlines(keepends=True)
        tail = "".join(lines[-int(query["tailLines"]) :]).encode()
        return web.Response(body=tail[: int(query["limitBytes"])])


def refused(status: int, reason: str, words: str, **details: Any) -> Refusal:
    return Refusal(status, reason, words, **details)


def _merged(stored: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    now = dict(stored) if isinstance(stored, dict) else {}
    for name, value in patch.items():
        if value is None:
            now.pop(name, None)
        else:
            now[name] = _merged(now.get(name), value)
    return copy.deepcopy(now)


def _patched(stored: Object, steps: list[Object]) -> Object:
    """RFC 6902: what of it is used."""
    now = copy.deepcopy(stored)
    for step in steps:
        *above, last = step["path"].strip("/").split("/")
        place: Any = now
        for part in above:
            place = place[part]
        key: Any = int(last) if isinstance(place, list) else last
        try:
            if step["op"] == "test" and place[key] != step["value"]:
                raise Refusal(422, "Invalid", MISFIT)
            if step["op"] == "remove":
                del place[key]
        except (IndexError, KeyError) as error:
            raise Refusal(422, "Invalid", MISFIT) from error
    return now


@asynccontextmanager
async def served(api: StoredApi) -> AsyncIterator[Cluster]:
    """A cluster that is this server, open."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster.from_environment({"KUBECONFIG": _kubeconfig(folder, port)}, None, 1000, 1000)
            async with cluster.opened():
                yield cluster
    finally:
        await runner.cleanup()


def _kubeconfig(folder: str, port: int) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {"token": "x"}}],
    }
    file = Path(folder, "config")
    file.write_text(json.dumps(config))
    return str(file)


def with_cluster(api: StoredApi, what: Callable[[Cluster], Awaitable[T]]) -> T:
    async def run() -> T:
        async with served(api) as cluster:
            return await what(cluster)

    return asyncio.run(run())

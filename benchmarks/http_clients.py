"""CPU of HTTP clients: a list and 300 answers about containers over a unix socket, and what importing them costs.

The server is a program of its own that sends prepared answers, in chunks as Docker does. Each client asks it in an
interpreter of its own, sixteen questions at once, each with a deadline, as the Docker adapter does.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.report import Figure, print_figure, print_table
from benchmarks.size import sized

CONTAINERS, AT_ONCE, ROUNDS, RUNS = sized((300, 16, 5, 3), tiny=(10, 4, 1, 1))
DEADLINE, MOST = 10.0, 64 * 1024 * 1024
LIST = "/v1.48/containers/json?all=true"
PATHS = [LIST, *(f"/v1.48/containers/{number:064x}/json" for number in range(CONTAINERS))]
PEER = "aiohttp"
Get = Callable[[str], Awaitable[bytes]]


def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        socket = f"{folder}/socket"
        server = subprocess.Popen([sys.executable, "-m", "benchmarks.http_clients", "serve", socket], env=environ)
        try:
            while not Path(socket).exists():
                time.sleep(0.05)
            spent = {name: [_in_program(name, socket, environ) for _ in range(RUNS)] for name in CLIENTS}
        finally:
            server.kill()
            server.wait()
        imports = {name: min(_import(module, environ) for _ in range(RUNS * 3)) for name, module in MODULES.items()}
    rates = {name: len(PATHS) / min(seconds) for name, seconds in spent.items()}
    bare = imports.pop("")
    rows = [
        (name, f"{rate:.0f}", f"{rate / rates[PEER]:.2f}", f"{imports[name] - bare:.3f}")
        for name, rate in rates.items()
    ]
    print_table(
        ("client", "requests a CPU second", f"of {PEER}", "CPU seconds of its import, beyond asyncio and ssl"), rows
    )
    ours = rates["gpukeeper.http_client"]
    print_figure(Figure("http-clients", round(ours), "requests/CPU second", round(ours / rates[PEER], 2), PEER))


def _in_program(name: str, socket: str, environ: dict[str, str]) -> float:
    command = [sys.executable, "-m", "benchmarks.http_clients", name, socket]
    return float(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


def _import(module: str, environ: dict[str, str]) -> float:
    program = f"import asyncio, ssl, resource{module and ', '}{module}\nu = resource.getrusage(0)\nprint(u[0] + u[1])"
    return float(subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True).stdout)


@asynccontextmanager
async def _ours(socket: str) -> AsyncIterator[Get]:
    from gpukeeper.http_client import Client

    async with Client("http://engine", unix_socket=socket) as client:

        async def get(path: str) -> bytes:
            async with asyncio.timeout(DEADLINE):
                return (await client.request("GET", path, size_max=MOST)).body

        yield get


@asynccontextmanager
async def _aiohttp(socket: str) -> AsyncIterator[Get]:
    import aiohttp

    connector, timeout = aiohttp.UnixConnector(path=socket, limit=0), aiohttp.ClientTimeout(total=DEADLINE)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def get(path: str) -> bytes:
            async with session.get(f"http://engine{path}") as answer:
                return b"".join([piece async for piece in answer.content.iter_chunked(65536)])

        yield get


@asynccontextmanager
async def _httpx2(socket: str) -> AsyncIterator[Get]:
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
    transport = httpx2.AsyncHTTPTransport(uds=socket, limits=limits)
    async with httpx2.AsyncClient(transport=transport, timeout=None) as client:

        async def get(path: str) -> bytes:
            async with asyncio.timeout(DEADLINE), client.stream("GET", f"http://engine{path}") as answer:
                return b"".join([piece async for piece in answer.aiter_bytes()])

        yield get


CLIENTS = {"gpukeeper.http_client": _ours, "aiohttp": _aiohttp, "httpx2": _httpx2}
MODULES = {"": "", **{name: name for name in CLIENTS}}


async def _ask(name: str, socket: str) -> float:
    """CPU seconds of one round; the first one connects and is not counted."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(get: Get, path: str) -> None:
        async with limit:
            assert json.loads(await get(path))

    spent = []
    async with CLIENTS[name](socket) as get:
        for _ in range(ROUNDS + 1):
            before = _cpu()
            await asyncio.gather(*(one(get, path) for path in PATHS))
            spent.append(_cpu() - before)
    return min(spent[1:])


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _serve(socket: str) -> None:
    labels = {f"label-{number}": "v" * 30 for number in range(10)}
    listed = [{"Id": f"{number:064x}", "Names": [f"/made-{number}"], "Labels": labels} for number in range(CONTAINERS)]
    whole = {"Id": "f" * 64, "Config": {"Env": ["A=" + "x" * 40] * 40, "Labels": labels}, "State": {"Running": True}}
    answers = {name: _chunked(json.dumps(value).encode()) for name, value in (("list", listed), ("one", whole))}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while asked := await reader.readuntil(b"\r\n\r\n"):
                writer.write(answers["list" if LIST.encode() in asked else "one"])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_unix_server(serve, socket) as server:
        await server.serve_forever()


def _chunked(body: bytes) -> bytes:
    fields = ("Api-Version: 1.48", "Content-Type: application/json", "Ostype: linux", "Transfer-Encoding: chunked")
    head = "\r\n".join(("HTTP/1.1 200 OK", *fields, "", ""))
    return head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


if __name__ == "__main__":
    what, where = sys.argv[1:]
    if what == "serve":
        asyncio.run(_serve(where))
    else:
        print(asyncio.run(_ask(what, where)))

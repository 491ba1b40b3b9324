"""Pages of 10,000 workloads and 2,000 GPUs: time to the first byte and bytes, beside a static file of the same size.

Both are served by the same server in the same run, in turn, to one client over a kept connection. The views are those
of a pass over a made fleet. The first request of a page renders its tiles; later ones find them rendered.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import time

import msgspec
import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from benchmarks.web_fleet import LARGE, FixedSource, LargeFleet, cpu_of, percentile, view_of
from gpukeeper.interfaces.web.application import make_app

PAGES = {
    "GPUs: summary": "/",
    "GPUs: 500 tiles": "/?place=large",
    "workloads: 500 rows": "/workloads",
    "workloads: a search": "/workloads?q=train-99",
}
TURNS = sized(20, tiny=2)
GOAL = 0.2  # seconds to the first byte


class Load(msgspec.Struct, frozen=True):
    """Of one request. `first`: seconds to the first byte of the body. `cpu`: of the server's loop."""

    first: float
    cpu: float
    size: int


def run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.web_page", str(listener.fileno())],
            pass_fds=(listener.fileno(),),
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            child.stdout.readline()
            port = listener.getsockname()[1]
            results = {name: _measure(port, child.pid, path) for name, path in PAGES.items()}
        finally:
            child.kill()
            child.wait()
    rows = []
    for name, (cold, warm, static) in results.items():
        ratio = _median(warm) / _median(static)
        rows.append(
            (
                name,
                f"{warm[0].size:,}",
                f"{cold.cpu * 1000:.0f}",
                f"{sum(one.cpu for one in warm) / len(warm) * 1000:.1f}",
                f"{sum(one.cpu for one in static) / len(static) * 1000:.1f}",
                f"{_median(warm) * 1000:.1f}",
                f"{percentile((one.first for one in warm), 0.95) * 1000:.1f}",
                f"{_median(static) * 1000:.1f}",
                f"{ratio:.1f}",
            )
        )
    head = ("page", "bytes", "CPU ms, cold", "warm", "static", "to first byte ms", "p95", "static", "times static")
    print_table(head, rows)
    worst = max(_median(warm) for _, warm, _ in results.values())
    print(f"slowest page (median): {worst:.3f} s to the first byte; goal {GOAL:g} s, {met(worst, GOAL, least=False)}")
    print(f"{TURNS} turns; load average {os.getloadavg()[0]:.1f}\n")
    _, warm, static = results["GPUs: 500 tiles"]
    ours = _median(warm)
    print_figure(
        Figure("web-page", round(ours, 4), "s", round(ours / _median(static), 1), "a static file of the same size")
    )


def _median(loads: list[Load]) -> float:
    return percentile((one.first for one in loads), 0.5)


def _measure(port: int, pid: int, path: str) -> tuple[Load, list[Load], list[Load]]:
    """The first request, later ones, and those of a static file."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    cold = _get(connection, pid, path)
    warm, static = [], []
    for _ in range(TURNS):
        warm.append(_get(connection, pid, path))
        static.append(_get(connection, pid, f"/bytes/{cold.size}"))
        time.sleep(0.05)  # the server allows 50 pages a second
    connection.close()
    return cold, warm, static


def _get(connection: http.client.HTTPConnection, pid: int, path: str) -> Load:
    used, begun = cpu_of(pid), time.perf_counter()
    connection.request("GET", path)
    response = connection.getresponse()
    response.read(1)
    first = time.perf_counter() - begun
    size = 1 + len(response.read())
    assert response.status == 200, response.status
    return Load(first, cpu_of(pid) - used, size)


async def _serve(listener: socket.socket) -> None:
    source = FixedSource(await view_of(LargeFleet(*LARGE)))
    app = make_app(source)
    files: dict[int, bytes] = {}

    async def static(request: HttpRequest) -> Response:
        size = int(request.path_params["size"])
        body = files.setdefault(size, b"x" * size)
        return Response(body, media_type="text/html", headers={"cache-control": "no-store"})

    app.router.routes.append(Route("/bytes/{size}", static))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", ws="none"))
    print("ready", flush=True)
    await server.serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))

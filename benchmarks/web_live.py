"""200 browsers on the page of GPUs: delay from a change to the event at each, and CPU of daemon and web process.

A daemon with the real publisher and web process, over a made fleet: a pass over everything and a measurement of
everything every 10 s, and each second a narrow pass that finds one changed GPU, whose tile carries the time of that.
The browsers are connections of another program, which reads that time. The peer is a plain socket between both
programs: the same time is written to it at once, so that its delay is that of a busy machine. First a usual fleet, then
10,000 workloads with 2,000 GPUs, on a page of 500 tiles.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from benchmarks.web_fleet import LARGE, POLICY, SMALL, LargeFleet, cpu_of, measure_before, percentile, whole_pass
from gpukeeper.engine.keeper import Keeper
from gpukeeper.interfaces.daemon.requests import WebLogins
from gpukeeper.interfaces.daemon.web import WebProcess, listen, supervised
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.ledger.logins import open_logins
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.wiring.session import open_session

BROWSERS, SECONDS, SETTLE = sized((200, 40, 10), tiny=(3, 2, 1))
EVERY = sized(10, tiny=1)  # seconds between two passes over everything; a daemon makes one a minute
GOAL, BLOCKED = 2.0, 0.05  # seconds: p99 of the delay; the longest that the daemon's loop stands still for it
MARK = re.compile(rb"at (\d+\.\d+)")


class Seen(msgspec.Struct, frozen=True):
    """What the browsers received, and what was used meanwhile. `blocked`: the longest the daemon's loop was late."""

    delays: list[float]
    peer: list[float]
    marks: int  # that were made
    megabytes: float
    web: float  # share of a core
    daemon: float
    idle_daemon: float  # without a browser and web process: the same passes and measurements
    blocked: float
    idle_blocked: float


def run() -> None:
    rows, p99, found = [], 0.0, {}
    for name, size in (("usual fleet", SMALL), ("large fleet", LARGE)):
        seen = found[name] = _run(size)
        p99 = percentile(seen.delays, 0.99)
        rows.append(
            (
                f"{name}: {size[0]:,} workloads, {size[1]:,} GPUs",
                f"{percentile(seen.delays, 0.5):.2f}",
                f"{p99:.2f}",
                f"{percentile(seen.peer, 0.5):.2f}",
                f"{percentile(seen.peer, 0.99):.2f}",
                f"{len(seen.delays) / (seen.marks * BROWSERS):.0%}",
                f"{seen.megabytes / SECONDS:.1f}",
                f"{seen.web:.0%}",
                f"{seen.daemon:.0%}",
                f"{seen.idle_daemon:.0%}",
                f"{seen.blocked * 1000:.0f}",
                f"{seen.idle_blocked * 1000:.0f}",
            )
        )
    head = (
        "fleet",
        "median s",
        "p99 s",
        "peer",
        "its p99",
        "arrived",
        "MB/s",
        "web",
        "daemon",
        "without web",
        "late ms",
        "without web",
    )
    print_table(head, rows)
    print(f"p99 with the large fleet: goal at most {GOAL:g} s, {met(p99, GOAL, least=False)}")
    print(f"{BROWSERS} browsers, {SECONDS} s, passes every {EVERY} s; load average {os.getloadavg()[0]:.1f}")
    print("late: the longest time by which the daemon's loop woke up too late, passes included\n")
    peer = percentile(found["large fleet"].peer, 0.99)
    print_figure(Figure("web-live", round(p99, 2), "s", round(p99 / peer, 2), "a plain socket between both programs"))


def _run(size: tuple[int, int]) -> Seen:
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.web_live", folder, *map(str, size)]
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        try:
            return asyncio.run(_watch(daemon, f"{folder}/peer"))
        finally:
            daemon.kill()
            daemon.wait()


async def _watch(daemon: subprocess.Popen[bytes], socket: str) -> Seen:
    assert daemon.stdout is not None
    assert daemon.stdin is not None
    loop = asyncio.get_running_loop()
    idle_cpu, idle_blocked = map(float, (await loop.run_in_executor(None, daemon.stdout.readline)).split())
    port, web = map(int, (await loop.run_in_executor(None, daemon.stdout.readline)).split())
    delays: list[float] = []
    peer: list[float] = []
    read = [0]
    browsers = [asyncio.create_task(_browse(number, port, delays, read)) for number in range(BROWSERS)]
    browsers.append(asyncio.create_task(_be_peer(socket, peer)))
    await asyncio.sleep(SETTLE)
    delays.clear()
    read[0] = 0
    begun = time.monotonic()
    before = cpu_of(web), cpu_of(daemon.pid)
    daemon.stdin.write(b"begin\n")
    daemon.stdin.flush()
    marks, blocked = (await loop.run_in_executor(None, daemon.stdout.readline)).split()
    await asyncio.sleep(sized(3, tiny=1))  # for the last of them to arrive
    spent = time.monotonic() - begun
    after = cpu_of(web), cpu_of(daemon.pid)
    for one in browsers:
        one.cancel()
    await asyncio.gather(*browsers, return_exceptions=True)
    return Seen(
        delays,
        peer,
        int(marks),
        read[0] / 1e6,
        (after[0] - before[0]) / spent,
        (after[1] - before[1]) / spent,
        idle_cpu,
        float(blocked),
        idle_blocked,
    )


async def _browse(number: int, port: int, delays: list[float], read: list[int]) -> None:
    """One EventSource. Each has an address of its own: the server limits connections by address."""
    here = (f"127.0.1.{number + 1}", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=here, limit=2**24)
    writer.write(b"GET /events?place=large HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n")
    newest = time.monotonic()
    with suppress(asyncio.CancelledError):
        while data := await reader.read(2**20):
            read[0] += len(data)
            now = time.monotonic()
            for mark in sorted({float(one) for one in MARK.findall(data)}):
                if mark > newest:
                    delays.append(now - mark)
                    newest = mark
    writer.close()


async def _be_peer(socket: str, delays: list[float]) -> None:
    reader, _ = await asyncio.open_unix_connection(socket)
    while line := await reader.readline():
        delays.append(time.monotonic() - float(line))


class Lateness:
    """The longest time by which a timer of this loop was late."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.005)
            self.worst = max(self.worst, time.monotonic() - begun - 0.005)


async def _daemon(folder: Path, size: tuple[int, int]) -> None:
    (folder / "fleet").mkdir()
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    state = {"GPUKEEPER_FLEET": f"folder:{folder / 'fleet'}", "GPUKEEPER_STATE": str(folder / "state")}
    session = open_session(policy, write=True, environ={**os.environ, **state})
    fleet = LargeFleet(*size)
    session.keeper = replace(session.keeper, platforms=(fleet,))
    await measure_before(session.keeper, fleet)
    logins = open_logins(session.ledger.path)
    listener = listen(Endpoint(0, "127.0.0.1"))
    port = listener.getsockname()[1]
    late = Lateness()
    peers: list[asyncio.StreamWriter] = []
    await asyncio.start_unix_server(lambda _, writer: peers.append(writer), folder / "peer")
    await whole_pass(session.keeper, session.book)
    late.worst, used, begun = 0.0, cpu_of(os.getpid()), time.monotonic()
    await _work(session.keeper, session.book, fleet, 2 * EVERY, peers)
    print((cpu_of(os.getpid()) - used) / (time.monotonic() - begun), late.worst, flush=True)
    found = WebLogins(logins, Endpoint(port, "127.0.0.1"), listener)
    log = partial(print, file=sys.stderr)
    async with supervised(WebProcess(session, logins, listener, log), found, log):
        await whole_pass(session.keeper, session.book)
        await asyncio.sleep(SETTLE)
        print(port, _web(), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        late.worst = 0.0
        marks = await _work(session.keeper, session.book, fleet, SECONDS, peers)
        print(marks, late.worst, flush=True)
        await asyncio.sleep(60)


def _web() -> str:
    """The web process, among the children of this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return next(one for one in children if b"gpukeeper.interfaces.web" in Path(f"/proc/{one}/cmdline").read_bytes())


async def _work(
    keeper: Keeper, book: Rulebook, fleet: LargeFleet, seconds: int, peers: Iterable[asyncio.StreamWriter]
) -> int:
    """Returns how many GPUs were changed, one a second."""
    for number in range(seconds):
        until = time.monotonic() + 1.0
        if number % EVERY == 0:
            await whole_pass(keeper, book)  # one at a time, as the daemon does
        if number % EVERY == 5:
            samples = fleet.samples(datetime.now(UTC))
            await keeper.signals.add(samples)
            keeper.live.measured(samples)
        gpu = number % 60  # on the first page
        now = time.monotonic()
        fleet.models[gpu] = f"at {now:.4f}"
        for one in peers:
            one.write(f"{now}\n".encode())
        await whole_pass(keeper, book, [fleet.gpu(gpu)])
        await asyncio.sleep(max(0.0, until - time.monotonic()))
    return seconds


if __name__ == "__main__":
    asyncio.run(_daemon(Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))))

"""How soon `serve` has recorded that a container ended: from Docker's `die` event to the line in the ledger.

Passes are at least five seconds apart, however many hints come; so the time is shown for ends that come soon after
another change, and for such that come after a quiet while (in which the pass of every minute may have been, too). The
peer is a bare listener to the engine's events.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import threading
import time
from datetime import datetime
from urllib.parse import quote

from benchmarks.needs import need
from benchmarks.report import Figure, print_figure, print_table
from benchmarks.size import sized
from tests.engines import has_docker
from tests.real.docker.private_engine import DockerEngine, docker_engine

ENDS = sized(12, tiny=1)
POLICY = "mode: plan\nscope: {docker: {}}\n"
LEAVES = 'trap "exit 3" 15; while sleep 0.1; do :; done'


def run() -> None:
    need("docker", has_docker())
    rng = random.Random(7)
    with docker_engine() as engine:
        serving = engine.popen("serve", policy=POLICY)
        heard = _listen(engine)
        quiet = [_one(engine, f"quiet-{number}", heard, 7.0) for number in range(ENDS)]
        any_time = [_one(engine, f"any-{number}", heard, rng.uniform(0, 5)) for number in range(ENDS)]
        assert serving.poll() is None, serving.communicate()
    rows = [
        _row("after 7 s without a change", [ours for ours, _ in quiet]),
        _row("up to 5 s after another change", [ours for ours, _ in any_time]),
        _row("a bare listener hears the event", peers := [peer for _, peer in quiet + any_time]),
    ]
    print_table(("from die to recorded, seconds", "median", "longest", ""), rows)
    value, peer = statistics.median(ours for ours, _ in quiet), statistics.median(peers)
    print_figure(Figure("docker-outcome", round(value, 3), "s", round(value / peer, 1), "a bare listener to events"))


def _one(engine: DockerEngine, name: str, heard: dict[str, tuple[float, float]], pause: float) -> tuple[float, float]:
    """Ends a container after a pause; seconds until the ledger's line, and until a listener heard of it."""
    made = engine.run(name, gpus=[0], cmd=["sh", "-c", LEAVES])
    engine.until(lambda: _noticed(engine, made, "running"), "it is noticed", 60)
    time.sleep(pause)
    engine.signal_container(name, "TERM")
    ended = engine.until(lambda: _noticed(engine, made, "ended"), "its end is recorded", 60)
    assert ended is not None
    died, arrived = heard[made]
    return datetime.fromisoformat(str(ended["at"])).timestamp() - died, arrived - died


def _noticed(engine: DockerEngine, uid: str, state: str) -> dict[str, object] | None:
    ran = engine.gpukeeper("ledger", "list", "--json", "--type", "noticed", "--last", "100000")
    lines = json.loads(ran.out)["lines"] if ran.code == 0 else []
    return next((one for one in lines if one["ref"]["uid"] == uid and one["state"] == state), None)


def _listen(engine: DockerEngine) -> dict[str, tuple[float, float]]:
    """By id: when it died, and when that was heard here."""
    heard: dict[str, tuple[float, float]] = {}

    def listen() -> None:
        filters = quote(json.dumps({"type": ["container"], "event": ["die"]}))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(engine.socket))
            connection.sendall(f"GET /events?filters={filters} HTTP/1.0\r\n\r\n".encode())
            for line in connection.makefile("rb"):
                if line.startswith(b"{"):
                    event = json.loads(line)
                    heard[event["Actor"]["ID"]] = (event["timeNano"] / 1e9, time.time())

    threading.Thread(target=listen, daemon=True).start()
    return heard


def _row(what: str, seconds: list[float]) -> tuple[str, str, str, str]:
    return what, f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}", ""

"""From due to gone: 200 finished Jobs under gpukeeper's loop, against the TTL controller of the same cluster.

The control plane is a private one, started for this. Every Job has a pod on a node of KWOK. Once all have ended each
gets the lifetime that lets all of them be due at one moment (or one a second): gpukeeper by its annotation, in a
namespace of its own, the peer by `ttlSecondsAfterFinished`, in another. A watch that belongs to neither tells when the
API server says that a Job is gone. gpukeeper is a process of its own with its ledger on disk; evidence (manifest, logs,
events) is captured before and the removal is verified after, which the peer does not do. What the API server is asked
is counted from a moment before the Jobs are due until the last one is gone, and once more without logs and events.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.needs import need
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from tests.engines import has_kube
from tests.real.kube import objects
from tests.real.kube.api import condition
from tests.real.kube.control_plane import ControlPlane, control_plane
from tests.real.kube.removals import Removals
from tests.real.kube.runs import SUCCEEDS

JOBS, ONES = sized((200, 40), tiny=(4, 2))
LAG, CALLS = 1.0, 3.0  # targets: seconds at the 99th of a hundred, questions to the API server for each reclaim
LEAD = sized(15.0, tiny=6.0)  # seconds between the last lifetime that is set and the moment that it ends
LONGEST = 240.0  # seconds to wait for the last one
EVERYTHING, MANIFEST = ("manifest", "logs", "events"), ("manifest",)

# The loop of `serve` over this one cluster. SIGUSR1: say what was asked so far.
WE_WATCH = """
import asyncio, json, signal, sys, time
from pathlib import Path
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.wiring.session import open_session
session = open_session(Path(sys.argv[1]), write=True, only="kubernetes")
(platform,) = session.keeper.platforms
async def main():
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    tell = lambda: print(json.dumps([platform._cluster.asked, time.process_time()]), flush=True)
    loop.add_signal_handler(signal.SIGUSR1, tell)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    seen = lambda report: print("looked", flush=True) if report.survey.whole else None
    await watch(Watch(session.keeper, lambda: session.book, stop, seen, lambda what: print(what, file=sys.stderr)))
asyncio.run(main())
session.close()
"""


class Run(msgspec.Struct, frozen=True):
    lags: list[float]  # seconds from due to gone, sorted
    asked: Mapping[str, int] = {}  # by method
    cpu: float = 0.0  # seconds of our own

    def at(self, share: float) -> float:
        return self.lags[min(int(len(self.lags) * share), len(self.lags) - 1)]

    @property
    def calls(self) -> float:
        return sum(self.asked.values()) / len(self.lags)


def run() -> None:
    need("kubernetes", has_kube())
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with control_plane() as plane:
        plane.gpu_node("node", gpus=2 * JOBS)
        with _watching(plane, EVERYTHING) as ours:
            at_once = _measured(plane, ours, JOBS, apart=0.0)
            one_by_one = _measured(plane, ours, ONES, apart=1.0)
        with _watching(plane, MANIFEST) as ours:
            bare = _measured(plane, ours, JOBS, apart=0.0)
        peer = _measured(plane, None, JOBS, apart=0.0)
        peer_one_by_one = _measured(plane, None, ONES, apart=1.0)
    print(f"load after: {os.getloadavg()[0]:.1f}\n")
    rows = [
        _row(f"gpukeeper, {JOBS} at once", at_once, target=True),
        _row(f"the same, manifest only, {JOBS} at once", bare, target=True),
        _row(f"the TTL controller, {JOBS} at once", peer),
        _row(f"gpukeeper, {ONES} one a second", one_by_one, target=True),
        _row(f"the TTL controller, {ONES} one a second", peer_one_by_one),
    ]
    head = ("from due to gone, seconds", "median", "p90", "p99", "longest", "calls each", "CPU ms each", "target")
    print_table(head, rows)
    for words, one in (("with logs and events", at_once), ("manifest only", bare), ("one by one", one_by_one)):
        each = ", ".join(f"{method} {n / len(one.lags):.2f}" for method, n in sorted(one.asked.items()))
        print(f"asked for each reclaim, {words}: {each}")
    print()
    value = at_once.at(0.99)
    ratio = round(value / peer.at(0.99), 2)
    print_figure(Figure("kubernetes-lag", round(value, 2), "s", ratio, "the TTL controller of the same cluster"))


def _row(words: str, one: Run, *, target: bool = False) -> tuple[str, ...]:
    times = [f"{one.at(share):.2f}" for share in (0.5, 0.9, 0.99)] + [f"{one.lags[-1]:.2f}"]
    calls = f"{one.calls:.1f}" if one.asked else ""
    cpu = f"{one.cpu / len(one.lags) * 1000:.1f}" if one.cpu else ""
    words_of_it = (
        f"p99 below {LAG:g} s: {met(one.at(0.99), LAG, least=False)}; "
        f"at most {CALLS:g} calls: {met(-one.calls, -CALLS, least=True)}"
    )
    return (words, *times, calls, cpu, words_of_it if target else "")


class Ours:
    """gpukeeper's loop in a process of its own, over one namespace."""

    def __init__(self, namespace: str, process: subprocess.Popen[str]) -> None:
        self.namespace, self._process = namespace, process

    def looked(self) -> None:
        """Its first look at everything is over."""
        while self._line() != "looked":
            pass

    def spent(self) -> tuple[Counter[str], float]:
        """What was asked so far, by method, and our seconds of CPU."""
        self._process.send_signal(signal.SIGUSR1)
        while (line := self._line()) == "looked":
            pass
        asked, cpu = json.loads(line)
        return Counter(asked), float(cpu)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "gpukeeper ended"
        return line.strip()


@contextlib.contextmanager
def _watching(plane: ControlPlane, what: tuple[str, ...]) -> Iterator[Ours]:
    namespace = plane.new_namespace("lag")
    policy = {
        "mode": "enforce",
        "scope": {"kubernetes": {"namespaces": [namespace]}},
        "retention": {"succeeded": "10d", "failed": "20d"},
        "budget": {"per_pass": 10_000, "per_hour": 100_000},
        "breaker": {"running": "100%", "vanished": "100%", "floor": 1000},
        "kubernetes": {"requests": 1000, "burst": 1000},
        "capture": {"what": list(what)},
        "schedule": {"every": "10m"},
    }
    with tempfile.TemporaryDirectory(prefix="lag-") as name:
        folder = Path(name)
        (folder / "policy.yaml").write_text(json.dumps(policy))
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("GPUKEEPER_", "KUBE", "DOCKER"))},
            "KUBECONFIG": str(plane.kubeconfig()),
            "GPUKEEPER_STATE": str(folder / "state"),
        }
        command = [sys.executable, "-c", WE_WATCH, str(folder / "policy.yaml")]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        try:
            ours = Ours(namespace, process)
            ours.looked()
            yield ours
        finally:
            process.terminate()
            process.wait(timeout=60)


def _measured(plane: ControlPlane, ours: Ours | None, number: int, *, apart: float) -> Run:
    """`ours` None: the cluster's own controller, by its own field."""
    namespace = ours.namespace if ours is not None else plane.new_namespace("ttl")
    ended = _ended_jobs(plane, namespace, number)
    first = int(time.time() + LEAD + number / 20)  # times of the API are whole seconds
    due = {name: first + apart * n for n, name in enumerate(ended)}

    def set_lifetime(name: str) -> None:
        left = int(due[name] - ended[name][1])
        body: dict[str, Any] = {"metadata": {"annotations": {"gpukeeper.io/ttl": f"{left}s"}}}
        if ours is None:
            body = {"spec": {"ttlSecondsAfterFinished": left}}
        plane.api.patch("jobs", namespace, name, body)

    with Removals(plane.api, "jobs", namespace) as gone:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(set_lifetime, ended))
        early = first - 1 - time.time()
        assert early > 0, "the machine is too slow: the lifetimes were not set in time"
        time.sleep(early)
        before, cpu_before = ours.spent() if ours is not None else (Counter[str](), 0.0)
        uids = {uid for uid, _ in ended.values()}
        assert gone.wait(uids, LONGEST + apart * number), f"{len(uids - gone.at.keys())} of {number} are still there"
        time.sleep(0.5)
        asked, cpu = ours.spent() if ours is not None else (Counter[str](), 0.0)
    lags = sorted(gone.at[uid] - due[name] for name, (uid, _) in ended.items())
    return Run(lags, asked - before, cpu - cpu_before)


def _ended_jobs(plane: ControlPlane, namespace: str, number: int) -> dict[str, tuple[str, float]]:
    """By name: the uid, and when it ended by the API server's word."""
    stem = f"run-{int(time.time())}"
    with ThreadPoolExecutor(4) as pool:
        made = [objects.job(f"{stem}-{n}", annotations=SUCCEEDS) for n in range(number)]
        list(pool.map(lambda one: plane.api.create(one, namespace), made))

    def over() -> list[dict[str, Any]] | None:
        jobs = [one for one in plane.api.list("jobs", namespace) if one["metadata"]["name"].startswith(stem)]
        return jobs if len(jobs) == number and all(condition(one, "Complete") == "True" for one in jobs) else None

    jobs = plane.until(over, f"{number} Jobs ended", 300)
    assert jobs is not None
    return {one["metadata"]["name"]: (one["metadata"]["uid"], _ended(one)) for one in jobs}


def _ended(job: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(job["status"]["completionTime"]).astimezone(UTC).timestamp()

"""A backlog of twenty thousand: passes take the oldest first, within their budget, and memory hardly follows.

The pods are copies of one that was made through the API, written into etcd, from where the API server serves and
removes them like any other. No controller runs: the pod garbage collector would take what is over its own limit.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.engines import has_kube, require
from tests.real.kube.control_plane import ControlPlane, control_plane
from tests.real.kube.endings import ended_pod, text, unplaced

FEW, MANY = 1_000, 20_000
BUDGET, PASSES = 40, 3
PER_OBJECT = 4_096  # bytes of memory that one more due object may cost
IN_ONE_WRITE = 100
KEPT = 10  # of each: held, running
LIMIT = timedelta(minutes=10)

# Passes of one process, as `serve` makes them, without the pauses between them.
WE_PASS = """
import asyncio, json, resource, sys
from pathlib import Path
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.wiring.session import open_session
session = open_session(Path(sys.argv[1]), write=True, only="kubernetes")
(platform,) = session.keeper.platforms
async def main():
    for _ in range(int(sys.argv[2])):
        report = await reclaim(session.keeper, platform, session.book)
        told = {
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seen": report.survey.counts.seen,
            "unseen": [one.why for one in report.survey.unseen],
            "gone": [line.ref.name for line in report.reclaimed],
            "failed": [line.reason for line in report.failed],
            "deferred": report.deferred,
        }
        print(json.dumps(told), flush=True)
asyncio.run(main())
session.close()
"""


@pytest.fixture
def quiet_plane() -> Iterator[ControlPlane]:
    """An API server, and nobody who works on what is in it."""
    require("kubernetes", has_kube())
    with control_plane() as plane:
        for name in ("kube-scheduler", "kube-controller-manager"):
            plane.programs[name].kill()
        yield plane


@pytest.mark.timeout(900)
def test_a_backlog_goes_oldest_first_within_the_budget_and_memory_hardly_follows(
    quiet_plane: ControlPlane, tmp_path: Path
) -> None:
    peaks = {}
    for number in (FEW, MANY):
        folder = tmp_path / str(number)
        namespace = quiet_plane.new_namespace("scale")
        kept = _fill(quiet_plane, namespace, number)
        told = _passes(quiet_plane, namespace, folder, PASSES)
        for n, one in enumerate(told):
            assert (one["unseen"], one["failed"]) == ([], [])
            assert one["seen"] == number + len(kept) - n * BUDGET
            assert one["deferred"] == number - (n + 1) * BUDGET
            assert sorted(one["gone"]) == [_name(m) for m in range(n * BUDGET, (n + 1) * BUDGET)], "the oldest first"
        there = _uids(quiet_plane, namespace)
        assert there.keys() == kept.keys() | {_name(m) for m in range(PASSES * BUDGET, number)}
        assert {name: there[name] for name in kept} == kept
        peaks[number] = told[-1]["peak"]
    growth = (peaks[MANY] - peaks[FEW]) / (MANY - FEW)
    print(f"peaks {peaks}: {growth:.0f} bytes for each")
    assert growth < PER_OBJECT, f"{peaks}: {growth:.0f} bytes for each"


def _passes(plane: ControlPlane, namespace: str, folder: Path, number: int) -> list[dict[str, Any]]:
    policy = {
        "mode": "enforce",
        "scope": {"kubernetes": {"namespaces": [namespace]}},
        "retention": {"succeeded": "0s", "failed": "1h"},
        "budget": {"per_pass": BUDGET, "per_hour": 100_000},
        "breaker": {"running": "100%", "vanished": "100%", "floor": 1000},
        "kubernetes": {"requests": 1000, "burst": 1000},
    }
    folder.mkdir()
    (folder / "policy.yaml").write_text(json.dumps(policy))
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("GPUKEEPER_", "KUBE", "DOCKER_"))},
        "KUBECONFIG": str(plane.kubeconfig()),
        "GPUKEEPER_STATE": str(folder / "state"),
    }
    command = [sys.executable, "-c", WE_PASS, str(folder / "policy.yaml"), str(number)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT.total_seconds()
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _fill(plane: ControlPlane, namespace: str, number: int) -> dict[str, str]:
    """Pods that ended, each a second later than the one before it; returns what must stay: uids by name."""
    api, now = plane.api, datetime.now(UTC)
    far = {"gpukeeper.io/hold-until": text(now + timedelta(hours=20))}
    kept = {}
    for n in range(KEPT):
        kept[f"held-{n}"] = ended_pod(api, namespace, f"held-{n}", annotations=far)["metadata"]["uid"]
        kept[f"runs-{n}"] = api.create(unplaced(f"runs-{n}"), namespace)["metadata"]["uid"]
        api.patch("pods", namespace, f"runs-{n}", {"status": {"phase": "Running"}}, subresource="status")
    ended_pod(api, namespace, "one", finished=text(now))
    one = api.get("pods", namespace, "one")
    assert one is not None
    api.delete("pods", namespace, "one", grace=0)
    one["metadata"].pop("resourceVersion")
    one["metadata"].pop("managedFields", None)
    one["metadata"] |= {"name": "@name", "uid": "@uid", "creationTimestamp": text(now - timedelta(days=2))}
    one["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = "@ended"
    words = json.dumps(one)
    first = now - timedelta(seconds=number + 60)
    for begin in range(0, number, IN_ONE_WRITE):
        numbers = range(begin, min(begin + IN_ONE_WRITE, number))
        _write(
            plane,
            {
                f"/registry/pods/{namespace}/{_name(n)}": words.replace("@name", _name(n))
                .replace("@uid", str(uuid.uuid4()))
                .replace("@ended", text(first + timedelta(seconds=n)))
                for n in numbers
            },
        )
    plane.until(lambda: len(_uids(plane, namespace)) == number + len(kept), "the API server serves them", 300)
    return kept


def _name(number: int) -> str:
    return f"made-{number:06}"


def _uids(plane: ControlPlane, namespace: str) -> dict[str, str]:
    """By name, by the API server's list."""
    found: dict[str, str] = {}
    token = ""
    while True:
        query = {"limit": 2000, **({"continue": token} if token else {})}
        page = plane.api.must("GET", f"/api/v1/namespaces/{namespace}/pods", query=query, deadline=120)
        found |= {one["metadata"]["name"]: one["metadata"]["uid"] for one in page["items"]}
        token = page["metadata"].get("continue", "")
        if not token:
            return found


def _write(plane: ControlPlane, objects: dict[str, str]) -> None:
    words = next(word for word in plane.programs["etcd"].command if word.startswith("--listen-client-urls="))
    puts = [
        {"request_put": {"key": _base64(key.encode()), "value": _base64(value.encode())}}
        for key, value in objects.items()
    ]
    etcd = http.client.HTTPConnection(words.rpartition("/")[2], timeout=60)
    try:
        etcd.request("POST", "/v3/kv/txn", json.dumps({"success": puts}), {"Content-Type": "application/json"})
        answer = etcd.getresponse()
        assert json.load(answer).get("succeeded"), f"etcd answered {answer.status}"
    finally:
        etcd.close()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()

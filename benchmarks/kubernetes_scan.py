"""20,000 pods listed in pages of 500 from a real API server, against the official Python client; memory at 100,000.

The control plane is a private one, started for this. One pod is made through its API; the others are copies of it with
a status, owners and names of their own, written into etcd, from where the API server serves them like any other. Each
client runs in an interpreter of its own; imports and the first request are over before the clocks start. The peer is
`CoreV1Api.list_pod_for_all_namespaces(limit=500)` of the package `kubernetes`. Of the 100,000 pods 20,000 run and have
8 GPUs each; the others are a backlog of runs that ended.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import subprocess
import sys
import uuid
import venv
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.needs import CannotMeasure, need
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.model.unknown import Unknown
from tests.engines import has_kube
from tests.real.kube.control_plane import ControlPlane, control_plane
from tests.real.kube.objects import pod

PODS, MANY, RUNS = sized((20_000, 100_000, 3), tiny=(600, 1_200, 1))
CPU, WALL, MEMORY = 10.0, 6.0, 100.0  # targets: times less, times faster, MiB
PEER = "kubernetes==37.0.2"
AT_ONCE = 100  # objects in one write
RECENT = "2026-01-05T10:00:00Z"

PEER_LISTS = """
import resource, sys, time
from kubernetes import client, config
config.load_kube_config(sys.argv[1])
api = client.CoreV1Api()
client.VersionApi().get_code()
api.list_pod_for_all_namespaces(limit=1)
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
begun, spent, found, token = time.perf_counter(), cpu(), 0, None
while True:
    page = api.list_pod_for_all_namespaces(limit=500, _continue=token)
    found += len(page.items)
    token = page.metadata._continue
    if not token:
        break
wall, spent = time.perf_counter() - begun, cpu() - spent
print(spent, wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, found)
"""
# As a pass does it: every page becomes totals of its owners before the next one is requested.
WE_LIST = """
import asyncio, os, resource, sys, time
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.gpus import requested
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.clients.kubernetes.wire import Pod
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
async def scan(tallies):
    cluster = Cluster.from_environment({**os.environ, "KUBECONFIG": sys.argv[1]}, None, 1000, 1000)
    async with cluster.opened():
        async for page in cluster.pages("/api/v1/pods", Pod, limit=1):
            break
        begun, spent, found = time.perf_counter(), cpu(), 0
        async for page in cluster.pages("/api/v1/pods", Pod, limit=500):
            assert not page.problems and not page.inconsistent
            found += len(page.items)
            if tallies is not None:
                for pod in page.items:
                    tallies.setdefault(pod.metadata.owner.uid, PodTotals()).add_pod(pod, requested(pod.spec))
        return cpu() - spent, time.perf_counter() - begun, found
spent, wall, found = asyncio.run(scan({} if sys.argv[2] == "tally" else None))
print(spent, wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, found)
"""


class Run(msgspec.Struct, frozen=True):
    cpu: float  # seconds
    wall: float  # seconds
    memory: float  # MiB, the peak
    found: int


def run() -> None:
    need("kubernetes", has_kube())
    peer = peer_interpreter(PEER, "kubernetes.client")
    if isinstance(peer, Unknown):
        raise CannotMeasure(f"The peer: {peer.why}")
    with control_plane() as plane:
        for name in ("kube-scheduler", "kube-controller-manager"):  # they would work on the pods
            plane.programs[name].kill()
        config = str(plane.kubeconfig())
        size = _fill(plane, 0, PODS)
        rounds = [_round(peer, config) for _ in range(RUNS)]
        _fill(plane, PODS, MANY, phase="Succeeded")  # a backlog of runs that ended
        many = _listed(sys.executable, WE_LIST, config, "tally", expected=MANY)
    _print(rounds, many, size)


def _round(peer: str, config: str) -> tuple[Run, Run, Run]:
    return (
        _listed(peer, PEER_LISTS, config, expected=PODS),
        _listed(sys.executable, WE_LIST, config, "list", expected=PODS),
        _listed(sys.executable, WE_LIST, config, "tally", expected=PODS),
    )


def _print(rounds: list[tuple[Run, Run, Run]], many: Run, size: int) -> None:
    peer, lists, tallies = (
        Run(min(one.cpu for one in runs), min(one.wall for one in runs), min(one.memory for one in runs), PODS)
        for runs in zip(*rounds, strict=True)
    )
    rows = [
        _row(f"official client {PEER.partition('==')[2]}, {PODS:,} pods", peer, peer, ""),
        _row(f"gpukeeper, {PODS:,} pods", lists, peer, _targets(peer, lists)),
        _row(f"gpukeeper with tallies, {PODS:,} pods", tallies, peer, ""),
        _row(
            f"gpukeeper with tallies, {MANY:,} pods",
            many,
            None,
            f"peak below {MEMORY:g} MiB: {met(many.memory, MEMORY, least=False)}",
        ),
    ]
    head = ("pages of 500", "CPU s", "times less", "wall s", "times faster", "peak MiB", "target")
    print_table(head, rows)
    print(f"{size:,} bytes of JSON a pod; minimum of {RUNS} rounds in turn, the last line once\n")
    ratio = round(lists.cpu / peer.cpu, 4)
    print_figure(Figure("kubernetes-scan", round(lists.cpu, 3), "CPU s", ratio, "the official Python client's list"))


def _row(words: str, one: Run, peer: Run | None, target: str) -> tuple[str, ...]:
    times = ("", "") if peer is None else (f"{peer.cpu / one.cpu:.1f}", f"{peer.wall / one.wall:.1f}")
    return (words, f"{one.cpu:.2f}", times[0], f"{one.wall:.2f}", times[1], f"{one.memory:.0f}", target)


def _targets(peer: Run, ours: Run) -> str:
    cpu, wall = peer.cpu / ours.cpu, peer.wall / ours.wall
    return (
        f"CPU at least {CPU:g} times less: {met(cpu, CPU, least=True)}; "
        f"at least {WALL:g} times faster: {met(wall, WALL, least=True)}"
    )


def _listed(program: str, text: str, *arguments: str, expected: int) -> Run:
    done = subprocess.run([program, "-c", text, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cpu, wall, memory, found = done.stdout.split()
    assert int(found) == expected, f"{found} pods were listed, there are {expected}"
    return Run(float(cpu), float(wall), float(memory), int(found))


def _fill(plane: ControlPlane, first: int, end: int, *, phase: str = "Running") -> int:
    """Until there are so many; says how long one is."""
    if first == 0:
        plane.new_namespace("scan")
    namespace = f"scan-{os.getpid()}-1"
    name = f"made-{first}"
    plane.api.create(_rich(name), namespace)
    made = plane.api.get("pods", namespace, name)
    assert made is not None
    text = json.dumps(_template(made, phase))
    for begin in range(first, end, AT_ONCE):
        numbers = range(begin, min(begin + AT_ONCE, end))
        write_to_etcd(plane, {f"/registry/pods/{namespace}/made-{number}": _copy(text, number) for number in numbers})
    _wait_until_served(plane, end)
    return len(json.dumps(plane.api.get("pods", namespace, name), separators=(",", ":")))


def _wait_until_served(plane: ControlPlane, expected: int) -> None:
    """By its cache, too: that one comes behind so many writes."""

    def number() -> bool:
        page = plane.api.call("GET", "/api/v1/pods", query={"limit": 1}).json
        if not page or 1 + int(page["metadata"].get("remainingItemCount", 0)) != expected:
            return False
        version = {"resourceVersion": page["metadata"]["resourceVersion"], "resourceVersionMatch": "NotOlderThan"}
        return plane.api.call("GET", "/api/v1/pods", query={"limit": 1, **version}).ok

    plane.until(number, f"the API server serves {expected} pods", 300)


def _rich(name: str) -> dict[str, Any]:
    """What a training job's pod carries: variables, volumes, tolerations."""
    made = pod(name, gpus=8, labels={f"training.example/label-{n}": f"value-{n}" for n in range(6)})
    container = made["spec"]["containers"][0]
    container["command"] = ["torchrun", "--nproc-per-node=8", "--nnodes=16", "train.py", "--config", "large.yaml"]
    container["env"] = [{"name": f"VARIABLE_{n}", "value": f"something of a usual length {n}"} for n in range(16)]
    container["volumeMounts"] = [{"name": f"volume-{n}", "mountPath": f"/mnt/volume-{n}"} for n in range(4)]
    made["spec"]["volumes"] = [{"name": f"volume-{n}", "emptyDir": {}} for n in range(4)]
    made["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return made


def _copy(text: str, number: int) -> bytes:
    job = number // 8
    own = {
        "@name": f"made-{number}",
        "@uid": str(uuid.uuid4()),
        "@job": f"job-{job}",
        "@of": str(uuid.uuid5(uuid.NAMESPACE_OID, f"job-{job}")),
        "@node": f"node-{job % 500}",
        "@digest": secrets.token_hex(32),  # what no compression can take away
        "@container": secrets.token_hex(32),
    }
    for mark, value in own.items():
        text = text.replace(mark, value)
    return text.encode()


def _template(made: dict[str, Any], phase: str) -> dict[str, Any]:
    """It is on a node, below one of many Jobs; what differs from copy to copy is marked."""
    one = deepcopy(made)
    one["metadata"] |= {"name": "@name", "uid": "@uid"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "@job", "uid": "@of", "controller": True}
    one["metadata"]["ownerReferences"] = [owner]
    one["metadata"]["annotations"] = {"example.org/config-digest": "@digest"}
    one["metadata"].pop("resourceVersion", None)
    one["spec"]["nodeName"] = "@node"
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    one["status"] = {
        "phase": phase,
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": RECENT} for kind in conditions],
        "hostIP": "10.1.2.3",
        "podIP": "10.4.5.6",
        "startTime": RECENT,
        "qosClass": "BestEffort",
        "containerStatuses": [
            {
                "name": "main",
                "image": "local/busybox:1",
                "imageID": "sha256:" + "0" * 64,
                "containerID": "containerd://@container",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": RECENT}},
            }
        ],
    }
    return one


def write_to_etcd(plane: ControlPlane, objects: dict[str, bytes]) -> None:
    words = next(word for word in plane.programs["etcd"].command if word.startswith("--listen-client-urls="))
    puts = [{"request_put": {"key": _base64(key.encode()), "value": _base64(value)}} for key, value in objects.items()]
    etcd = http.client.HTTPConnection(words.rpartition("/")[2], timeout=60)
    try:
        etcd.request("POST", "/v3/kv/txn", json.dumps({"success": puts}), {"Content-Type": "application/json"})
        answer = etcd.getresponse()
        assert json.load(answer).get("succeeded"), f"etcd answered {answer.status}"
    finally:
        etcd.close()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def peer_interpreter(package: str, module: str) -> str | Unknown:
    """Of an environment with this package, made once in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "gpukeeper" / f"benchmark-{package}"
    program = folder / "bin" / "python"
    asks = [str(program), "-c", f"import {module}"]
    if not program.exists() or subprocess.run(asks, capture_output=True, check=False).returncode:
        try:
            venv.create(folder, with_pip=True, clear=True)
            install = [str(program), "-m", "pip", "install", "--quiet", package]
            subprocess.run(install, check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            return Unknown(f"{package} could not be installed into {folder}: {error}")
    return str(program)

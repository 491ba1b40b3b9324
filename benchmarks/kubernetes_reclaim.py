"""Due Jobs removed by one pass from a real API server, against kube-janitor's code path: calls, CPU, wall time.

The control plane is a private one, started for this. One Job and its pod are made through its API; the others are
copies with names, uids and a status of their own, written into etcd, from where the API server serves and removes them
like any other. Every second Job still has its pod, on a node of KWOK that serves its log; of the others the pods are
gone. gpukeeper captures manifest, events and logs before a removal and verifies it afterwards. The peer lists the Jobs,
writes an Event for each and deletes it, as kube-janitor does, with the client that kube-janitor uses; it keeps nothing
and does not look again. Each runs in an interpreter of its own; imports are over before the clocks start.

JOBS=5000 sets how many (default 300), RATE=200 the requests per second that gpukeeper is allowed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kubernetes_scan import peer_interpreter, write_to_etcd
from benchmarks.needs import CannotMeasure, need
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.model.unknown import Unknown
from tests.engines import has_kube
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane, control_plane
from tests.real.kube.endings import text

JOBS, RATE = int(os.environ.get("JOBS", sized("300", tiny="6"))), int(os.environ.get("RATE", "200"))
CALLS, CPU = 3.0, 2.0  # targets: calls for each Job, times the peer's CPU
PEER = "pykube-ng==23.6.0"
IN_ONE_WRITE = 50
UID = "batch.kubernetes.io/controller-uid"

PEER_DELETES = """
import json, logging, resource, sys, time
import pykube
from pykube.objects import Event
api = pykube.HTTPClient(pykube.KubeConfig.from_file(sys.argv[1]))
asked = 0
send = api.session.send
def counted(*args, **kwargs):
    global asked
    asked += 1
    return send(*args, **kwargs)
api.session.send = counted
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
begun, spent = time.perf_counter(), cpu()
gone = 0
for job in list(pykube.Job.objects(api, namespace=sys.argv[2])):
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    involved = {"apiVersion": job.version, "name": job.name, "namespace": job.namespace, "kind": job.kind,
                "resourceVersion": job.metadata["resourceVersion"], "uid": job.metadata["uid"]}
    Event(api, {"metadata": {"namespace": job.namespace, "generateName": "kube-janitor-"}, "type": "Normal", "count": 1,
                "firstTimestamp": now, "lastTimestamp": now, "reason": "TimeToLiveExpired", "involvedObject": involved,
                "message": f"Job {job.name} with 1d TTL is 2d old and will be deleted",
                "source": {"component": "kube-janitor"}}).create()
    job.delete(propagation_policy="Background")
    gone += 1
print(json.dumps({"cpu": cpu() - spent, "wall": time.perf_counter() - begun, "asked": {"all": asked}, "gone": gone}))
"""
WE_RECLAIM = """
import asyncio, json, resource, sys, time
from pathlib import Path
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.wiring.session import open_session
session = open_session(Path(sys.argv[1]), write=True, only="kubernetes")
(platform,) = session.keeper.platforms
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
begun, spent = time.perf_counter(), cpu()
report = asyncio.run(reclaim(session.keeper, platform, session.book))
told = {"cpu": cpu() - spent, "wall": time.perf_counter() - begun, "asked": platform._cluster.asked,
        "gone": len(report.reclaimed), "failed": [one.reason for one in report.failed][:3], "stopped": report.stopped}
print(json.dumps(told))
session.close()
"""


class Run(msgspec.Struct, frozen=True):
    cpu: float  # seconds
    wall: float  # seconds
    asked: Mapping[str, int]  # by method
    gone: int
    failed: tuple[str, ...] = ()
    stopped: str | None = None

    @property
    def calls(self) -> float:
        return sum(self.asked.values()) / self.gone


def run() -> None:
    need("kubernetes", has_kube())
    peer = peer_interpreter(PEER, "pykube")
    if isinstance(peer, Unknown):
        raise CannotMeasure(f"The peer: {peer.why}")
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with control_plane() as plane, tempfile.TemporaryDirectory(prefix="reclaim-") as name:
        plane.gpu_node("node")
        theirs = _told([peer, "-c", PEER_DELETES, str(plane.kubeconfig()), _filled(plane)], {})
        ours = _ours(plane, _filled(plane), Path(name))
    print(f"load after: {os.getloadavg()[0]:.1f}\n")
    _print(ours, theirs)


def _ours(plane: ControlPlane, namespace: str, folder: Path) -> Run:
    policy = {
        "mode": "enforce",
        "scope": {"kubernetes": {"namespaces": [namespace]}},
        "retention": {"succeeded": "1h", "failed": "1h"},
        "budget": {"per_pass": 100_000, "per_hour": 100_000},
        "kubernetes": {"requests": RATE, "burst": RATE},
    }
    (folder / "policy.yaml").write_text(json.dumps(policy))
    environ = {"KUBECONFIG": str(plane.kubeconfig()), "GPUKEEPER_STATE": str(folder / "state")}
    found = _told([sys.executable, "-c", WE_RECLAIM, str(folder / "policy.yaml")], environ)
    assert found.gone == JOBS, f"{found.gone} of {JOBS} are gone: {found.failed} {found.stopped}"
    assert not plane.api.list("jobs", namespace), "the API server still has some"
    return found


def _told(command: list[str], environ: Mapping[str, str]) -> Run:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GPUKEEPER_", "KUBE", "DOCKER"))}
    done = subprocess.run(command, env={**kept, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Run)


def _print(ours: Run, theirs: Run) -> None:
    times = ours.cpu / theirs.cpu
    target = (
        f"at most {CALLS:g} calls: {met(-ours.calls, -CALLS, least=True)}; "
        f"at most {CPU:g} times the CPU: {met(-times, -CPU, least=True)}"
    )
    rows = [
        (f"gpukeeper, {JOBS} Jobs, {RATE} requests/s", *_figures(ours), f"{times:.1f}", target),
        (f"kube-janitor's code path, {JOBS} Jobs", *_figures(theirs), "1.0", ""),
    ]
    print_table(("one pass", "calls each", "CPU ms each", "wall s", "times the CPU", "target"), rows)
    each = ", ".join(f"{method} {number / ours.gone:.2f}" for method, number in sorted(ours.asked.items()))
    print(f"asked for each Job: {each}\n")
    print_figure(
        Figure("kubernetes-reclaim", round(ours.calls, 2), "calls", round(times, 2), "CPU of kube-janitor's code path")
    )


def _figures(one: Run) -> tuple[str, str, str]:
    return f"{one.calls:.2f}", f"{one.cpu / one.gone * 1000:.1f}", f"{one.wall:.1f}"


def _filled(plane: ControlPlane) -> str:
    """A namespace with the Jobs in it."""
    namespace = plane.new_namespace("reclaim")
    plane.api.create(objects.job("first"), namespace)
    (listed,) = plane.until(lambda: plane.api.list("pods", namespace), "the first Job has its pod")
    job, pod = plane.api.get("jobs", namespace, "first"), plane.api.get("pods", namespace, listed["metadata"]["name"])
    assert job is not None
    assert pod is not None
    templates = json.dumps(_ended_job(job)), json.dumps(_ended_pod(pod))
    plane.api.delete("jobs", namespace, "first", propagation="Background")
    plane.until(lambda: not plane.api.list("jobs", namespace) and not plane.api.list("pods", namespace), "it is gone")
    for begin in range(0, JOBS, IN_ONE_WRITE):
        written: dict[str, bytes] = {}
        for number in range(begin, min(begin + IN_ONE_WRITE, JOBS)):
            written |= _copies(namespace, number, *templates)
        write_to_etcd(plane, written)
    plane.until(lambda: len(plane.api.list("jobs", namespace)) == JOBS, "the API server serves them", 300)
    time.sleep(2)  # its controllers have looked at them
    return namespace


def _copies(namespace: str, number: int, job: str, pod: str) -> dict[str, bytes]:
    name, owner = f"run-{number}", str(uuid.uuid4())
    words = {"@name": name, "@uid": owner}
    made = {f"/registry/jobs/{namespace}/{name}": _with(job, words)}
    if number % 2 == 0:
        words = {"@name": f"{name}-x", "@uid": str(uuid.uuid4()), "@owner": name, "@of": owner}
        made[f"/registry/pods/{namespace}/{name}-x"] = _with(pod, words)
    return made


def _with(template: str, words: Mapping[str, str]) -> bytes:
    for mark, value in words.items():
        template = template.replace(f'"{mark}"', f'"{value}"')
    return template.encode()


def _ended_job(made: Mapping[str, Any]) -> dict[str, Any]:
    one = deepcopy(dict(made))
    ended = text(datetime.now(UTC) - timedelta(days=2))
    for name in ("resourceVersion", "managedFields"):
        one["metadata"].pop(name, None)
    one["metadata"] |= {"name": "@name", "uid": "@uid", "creationTimestamp": ended, "labels": {UID: "@uid"}}
    one["spec"]["selector"] = {"matchLabels": {UID: "@uid"}}
    one["spec"]["template"]["metadata"] = {"labels": {UID: "@uid"}}
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": ended, "lastProbeTime": ended}
        for kind in ("SuccessCriteriaMet", "Complete")
    ]
    one["status"] = {"startTime": ended, "completionTime": ended, "succeeded": 1, "conditions": conditions}
    return one


def _ended_pod(made: Mapping[str, Any]) -> dict[str, Any]:
    one = deepcopy(dict(made))
    ended = text(datetime.now(UTC) - timedelta(days=2))
    for name in ("resourceVersion", "managedFields", "finalizers", "generateName"):
        one["metadata"].pop(name, None)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "@owner", "uid": "@of", "controller": True}
    one["metadata"] |= {"name": "@name", "uid": "@uid", "labels": {UID: "@of"}, "ownerReferences": [owner]}
    one["spec"]["nodeName"] = "node"
    over = {"exitCode": 0, "reason": "Completed", "startedAt": ended, "finishedAt": ended}
    container = {"name": "main", "image": "local/busybox:1", "imageID": "", "ready": False, "restartCount": 0}
    one["status"] = {
        "phase": "Succeeded",
        "startTime": ended,
        "containerStatuses": [{**container, "state": {"terminated": over}}],
    }
    return one

"""From `gpukeeper accept --on kubernetes` to the last of 512 pods, beside `kubectl apply` of the same manifests.

The control plane is a private one with nodes of KWOK. The whole command is measured: start of the interpreter, reading
the nodes and what uses them, one Job for each node. The peer gets the manifests of `--render`, ready in a file. What is
counted is read from the API server several times a second. The pods are created by the Job controller, the same for
both, so the last Job is given as well.

NODES=64 sets how many (default 512).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.needs import need
from benchmarks.report import Figure, print_figure, print_table
from benchmarks.size import sized
from tests.engines import has_kube
from tests.real.kube.binaries import program
from tests.real.kube.control_plane import ControlPlane, control_plane
from tests.real.launch.beds import make_nodes

NODES = int(os.environ.get("NODES", sized("512", tiny="4")))
PAUSE_S, PATIENCE_S = 0.1, 900.0
IMAGE, BED = "local/accept:1", "bench"


class Times(msgspec.Struct, frozen=True):
    """Seconds from the command on."""

    jobs: float
    pods: float


def run() -> None:
    need("kubernetes", has_kube())
    with control_plane() as plane, tempfile.TemporaryDirectory() as folder:
        make_nodes(plane, BED, NODES)
        ours = _measured(plane, _accept(plane, plane.new_namespace("ours"), Path(folder)))
        apply = _kubectl(plane, plane.new_namespace("peer"), Path(folder))
        theirs = _measured(plane, apply)
    rows = [
        ("gpukeeper accept", f"{ours.jobs:.1f} s", f"{ours.pods:.1f} s"),
        ("kubectl apply", f"{theirs.jobs:.1f} s", f"{theirs.pods:.1f} s"),
    ]
    print_table((f"{NODES} nodes, load {os.getloadavg()[0]:.0f}", "last Job", "last pod"), rows)
    against = f"kubectl apply of the same {NODES} Jobs"
    print_figure(Figure("accept-launch", round(ours.pods, 1), "s", round(ours.pods / theirs.pods, 2), against))


class Command(msgspec.Struct, frozen=True):
    words: list[str]
    environ: dict[str, str]
    namespace: str


def _accept(plane: ControlPlane, namespace: str, folder: Path, *more: str) -> Command:
    words = [sys.executable, "-m", "gpukeeper", "accept", "--on", "kubernetes", "--nodes", f"test/bed={BED}"]
    words += ["--image", IMAGE, "--namespace", namespace, "--report-dir", str(folder / "reports"), *more]
    state = {"GPUKEEPER_STATE": str(folder / "state"), "KUBECONFIG": str(plane.kubeconfig())}
    return Command(words, {**os.environ, **state}, namespace)


def _kubectl(plane: ControlPlane, namespace: str, folder: Path) -> Command:
    rendered = _accept(plane, namespace, folder, "--render")
    file = folder / "run.yaml"
    made = subprocess.run(rendered.words, env=rendered.environ, check=True, capture_output=True)
    file.write_bytes(made.stdout)
    return Command([program("kubectl"), "apply", "-f", str(file)], rendered.environ, namespace)


def _measured(plane: ControlPlane, command: Command) -> Times:
    """Until all pods are there; the command is then ended, and what it created is removed."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command.words, env=command.environ, stdout=said, stderr=said)
        try:
            jobs = _until(plane, "jobs", command, begun)
            pods = _until(plane, "pods", command, begun)
        finally:
            process.kill()
            process.wait()
    for one in plane.api.names("jobs", command.namespace):
        plane.api.delete("jobs", command.namespace, one, propagation="Background")
    plane.until(lambda: not plane.api.names("pods", command.namespace), "the pods are gone", deadline=PATIENCE_S)
    return Times(jobs, pods)


def _until(plane: ControlPlane, what: str, command: Command, begun: float) -> float:
    """One object, and the number of the others: a list of 512 would cost what is measured."""
    group = "/apis/batch/v1" if what == "jobs" else "/api/v1"
    path = f"{group}/namespaces/{command.namespace}/{what}"
    while True:
        found = plane.api.must("GET", path, query={"limit": 1})
        count = len(found["items"]) + found["metadata"].get("remainingItemCount", 0)
        if count >= NODES:
            return time.perf_counter() - begun
        assert time.perf_counter() - begun < PATIENCE_S, f"{count} of {NODES} {what}"
        time.sleep(PAUSE_S)

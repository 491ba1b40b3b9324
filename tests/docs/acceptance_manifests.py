"""Writes examples/acceptance-on-kubernetes with the code of the launcher: `python -m tests.docs.acceptance_manifests`.
A test compares the files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.fleet.launcher import RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes.forms import can_name_a_label, items
from gpukeeper.acceptance.launchers.kubernetes.launcher import as_yaml
from gpukeeper.acceptance.launchers.kubernetes.objects import Plan, options_of

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "acceptance-on-kubernetes"
IMAGE = "registry.example/gpukeeper-accept:1"
GPU = "nvidia.com/gpu"
TRAINING = {"TRAIN_SMOKE": "1", "STEPS": "20"}
TOGETHER = {"together": True}
# Name: form, nodes, GPUs of each, options, more of the run.
RUNS: dict[str, tuple[str, int, int, dict[str, str], dict[str, Any]]] = {
    "one-gpu": ("job", 1, 1, {"shm": "4Gi"}, {"gpus_per_node": 1, "environment": TRAINING}),
    "two-gpus": ("job", 1, 2, {"shm": "8Gi"}, {"gpus_per_node": 2, "environment": TRAINING}),
    "two-nodes": ("job", 2, 8, {}, TOGETHER),
    "job-per-node": ("job", 2, 8, {}, {}),
    "daemonset": ("daemonset", 2, 8, {}, {}),
    "every-gpu-node": (
        "daemonset",
        0,
        8,
        {},
        {"selector": "nvidia.com/gpu.present=true", "gpus_per_node": 8},
    ),
    "statefulset": ("statefulset", 2, 8, {}, TOGETHER),
    "indexed-job": ("indexed-job", 2, 8, {"ttl": "1h"}, TOGETHER),
    "jobset": ("jobset", 2, 8, {}, TOGETHER),
    "pytorchjob": ("pytorchjob", 4, 8, {"shm": "32Gi"}, TOGETHER),
    "pytorchjob-flexible": (
        "pytorchjob",
        2,
        1,
        {"cpu": "14", "memory": "150Gi", "ttl": "24h"},
        {"gpus_per_node": 1, **TOGETHER},
    ),
    "pytorchjob-rdma": ("pytorchjob", 2, 8, {"rdma": "rdma/ib=8", "shm": "32Gi"}, TOGETHER),
    "trainjob": ("trainjob", 1, 8, {}, {}),
    "trainjob-tensorflow": ("trainjob", 2, 8, {"framework": "tensorflow"}, {"port": 2222, **TOGETHER}),
    "mixed-cluster": ("job", 3, 8, {}, {}),
}
MIXED = (
    Target(node="gpu-1", gpus=8, resource=GPU),
    Target(node="gpu-2", gpus=4, resource=GPU),
    Target(node="gpu-3", gpus=8, resource="amd.com/gpu"),
)


def rendered(name: str) -> str:
    form, nodes, gpus, options, more = RUNS[name]
    created = datetime(2026, 1, 5, 10, tzinfo=UTC)
    spec = RunSpec(run=name, owner="ann", created=created, engine="kubernetes", form=form, image=IMAGE, **more)
    alike = tuple(Target(node=f"gpu-{number}", gpus=gpus, resource=GPU) for number in range(1, nodes + 1))
    targets = MIXED if name == "mixed-cluster" else alike
    placed = options_of({"namespace": "default", **options})
    made = items(Plan(spec, placed, targets, by_label=can_name_a_label(spec)))
    return as_yaml([one.manifest for one in sorted(made, key=lambda one: not one.owned)])


if __name__ == "__main__":
    for each in RUNS:
        (FOLDER / f"{each}.yaml").write_text(rendered(each))

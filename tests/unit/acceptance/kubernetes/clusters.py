"""Clusters in memory to begin with: nodes with GPUs, and a player for the Job controller and the kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from gpukeeper.acceptance.fleet.launcher import RunSpec
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.clients.kubernetes.api import JOBS, NODES, PODS, Resource
from tests.unit.clients.kubernetes.memory_api import MemoryApi

T = TypeVar("T")
GPU = "nvidia.com/gpu"
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(story)


def spec(**changes: Any) -> RunSpec:
    given = {"run": "r1", "owner": "ann", "created": datetime(2026, 1, 5, 10, tzinfo=UTC), "engine": "kubernetes"}
    return RunSpec(**{**given, "image": "registry.example/accept:1", **changes})


def add_node(api: MemoryApi, name: str, gpus: int | None = 8, *, resource: str = GPU, **changes: Any) -> None:
    room = {"cpu": "64"} | ({resource: str(gpus)} if gpus is not None else {})
    api.add(
        NODES,
        {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **changes.pop("labels", {})}},
            "spec": changes.pop("spec", {}),
            "status": {"conditions": [READY], "allocatable": room, "capacity": room} | changes,
        },
    )


def cluster(*nodes: str) -> MemoryApi:
    api = MemoryApi()
    for name in nodes:
        add_node(api, name)
    return api


async def _no_sleep(seconds: float) -> None:
    pass


def launcher(api: MemoryApi, **options: str) -> KubernetesLauncher:
    return KubernetesLauncher(api, options, sleep=_no_sleep, patience=3)


def add_pod(
    api: MemoryApi,
    root: Mapping[str, Any],
    name: str,
    *,
    resource: Resource = JOBS,
    node: str = "",
    phase: str = "Running",
    state: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """As a controller creates it from the template of its root, and a kubelet reports it."""
    chosen = template or root["spec"]["template"]
    owner = {
        "kind": resource.kind,
        "name": root["metadata"]["name"],
        "uid": root["metadata"]["uid"],
        "controller": True,
    }
    ready = status.pop("ready", False)
    restarts = status.pop("restarts", 0)
    last = status.pop("last", {})
    containers = (
        []
        if state is None
        else [{"name": "accept", "state": state, "ready": ready, "restartCount": restarts, "lastState": last}]
    )
    return api.add(
        PODS,
        {
            "metadata": {**chosen["metadata"], "name": name, "ownerReferences": [owner]},
            "spec": {**chosen["spec"], "nodeName": node},
            "status": {"phase": phase, "containerStatuses": containers, **status},
        },
        root["metadata"]["namespace"],
    )


def ended(code: int = 0, **more: Any) -> dict[str, Any]:
    reason = "Completed" if code == 0 else "Error"
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": "2026-01-05T10:05:00Z", **more}}

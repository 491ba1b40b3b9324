"""Objects as an API server writes them, decoded the way a list is: so the names on the wire are proven, too."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.clients.kubernetes.wire import Pod, Root
from gpukeeper.platforms.kubernetes.gpus import PodTotals, requested
from gpukeeper.platforms.kubernetes.translate import Observation

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
AT = Observation("lab", NOW)
UID = "8a0f1c7e-3c52-4a43-9a6e-5d0c6a5f9a11"


def ago(**span: float) -> str:
    """As the API writes a time: UTC, whole seconds."""
    return (NOW - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


CREATED = ago(hours=6)


def meta(**parts: Any) -> dict[str, Any]:
    return {
        "name": "run-7",
        "namespace": "team-a",
        "uid": UID,
        "resourceVersion": "184467",
        "generation": 1,
        "creationTimestamp": CREATED,
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
        **parts,
    }


def condition(type_: str, at: str | None, status: str = "True", **parts: Any) -> dict[str, Any]:
    return {"type": type_, "status": status, "lastProbeTime": at, "lastTransitionTime": at, **parts}


def root(*, spec: Mapping[str, Any] | None = None, status: Mapping[str, Any] | None = None, **metadata: Any) -> Root:
    told = {"metadata": meta(**metadata), "spec": spec or {}, "status": status or {}}
    return msgspec.json.decode(msgspec.json.encode(told), type=Root)


def gpu_container(count: int | str = 1, resource: str = "nvidia.com/gpu", **parts: Any) -> dict[str, Any]:
    quantity = str(count)
    return {
        "name": "main",
        "image": "registry.example/train:1",
        "resources": {"limits": {resource: quantity}, "requests": {"cpu": "500m", resource: quantity}},
        **parts,
    }


def pod_json(
    phase: str = "Running",
    *,
    node: str = "node-1",
    containers: list[dict[str, Any]] | None = None,
    spec: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta(**metadata),
        "spec": {
            "containers": containers if containers is not None else [gpu_container()],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            **({"nodeName": node} if node else {}),
            **(spec or {}),
        },
        "status": {"phase": phase, **(status or {})},
    }


def pod(phase: str = "Running", **parts: Any) -> Pod:
    return msgspec.json.decode(msgspec.json.encode(pod_json(phase, **parts)), type=Pod)


def terminated(finished: str | None, code: int = 0, name: str = "main") -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "finishedAt": finished, "reason": "Completed"}}}


def totals(*pods: Pod) -> PodTotals:
    added = PodTotals()
    for one in pods:
        added.add_pod(one, requested(one.spec))
    return added

"""Facts of a healthy cluster, in which tests plant one problem."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.preflight.facts import (
    GPU,
    PRODUCT,
    ClusterFacts,
    ClusterRequest,
    Finding,
    NamespaceFacts,
    NodeFacts,
    PluginFacts,
    RightFacts,
    WorkloadFacts,
)
from gpukeeper.acceptance.fleet.preflight.kubernetes import judge, needed
from gpukeeper.clients.kubernetes.wire import Toleration
from gpukeeper.model.gpu import Grade

H100 = "NVIDIA-H100-80GB-HBM3"
IMAGE = "registry.example.org/gpukeeper-accept:1.0"
REQUEST = ClusterRequest(namespace="lab", image=IMAGE)
DRIVER = {
    "nvidia.com/cuda.driver.major": "570",
    "nvidia.com/cuda.driver.minor": "86",
    "nvidia.com/cuda.driver.rev": "15",
}


def node(name: str, gpus: int = 8, **changes: Any) -> NodeFacts:
    room = {"cpu": "64", "memory": "512Gi"} | ({GPU: str(gpus)} if gpus else {})
    made = {
        "capacity": room,
        "allocatable": room,
        "labels": {PRODUCT: H100, "nvidia.com/gpu.present": "true", **DRIVER} if gpus else {},
        "images": (IMAGE,),
    }
    return NodeFacts(name=name, **{**made, **changes})


def workload(name: str, on: str = "gpu-1", gpus: int = 1, **changes: Any) -> WorkloadFacts:
    return WorkloadFacts(namespace="team", name=name, node=on, gpus=gpus, **changes)


def plugin(**changes: Any) -> PluginFacts:
    made = {
        "kind": "DaemonSet",
        "namespace": "gpu-operator",
        "name": "nvidia-device-plugin",
        "wanted": 2,
        "ready": 2,
        "tolerations": (Toleration(operator="Exists"),),
    }
    return PluginFacts(**{**made, **changes})


def facts(**changes: Any) -> ClusterFacts:
    made = {
        "nodes": (node("gpu-1"), node("gpu-2"), node("cpu-1", gpus=0)),
        "workloads": (),
        "plugins": (plugin(),),
        "namespace": NamespaceFacts(exists=True),
        "quotas": (),
        "limits": (),
        "rights": tuple(RightFacts(right=one, allowed=True) for one in needed(REQUEST)),
    }
    return ClusterFacts(**{**made, **changes})


def judged(request: ClusterRequest = REQUEST, **changes: Any) -> tuple[Finding, ...]:
    return judge(facts(**changes), request)


def asking(**changes: Any) -> ClusterRequest:
    return msgspec.structs.replace(REQUEST, **changes)


def the(code: str, findings: tuple[Finding, ...], verdict: Grade | None = None) -> Finding:
    """The only finding of this code, or of this code and verdict."""
    found = [one for one in findings if one.code == code and verdict in (None, one.verdict)]
    assert len(found) == 1, [f"{one.verdict} {one.code} {one.message}" for one in findings]
    return found[0]

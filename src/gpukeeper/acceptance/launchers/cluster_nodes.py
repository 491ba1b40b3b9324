"""The nodes of a cluster: read as marks, and written under the condition that they are as they were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.node_marks import (
    LABEL,
    QUARANTINE,
    TAINTS,
    Change,
    NodeCondition,
    NodeMarks,
    condition_of,
)
from gpukeeper.acceptance.launchers.kubernetes.api import NODES, Api
from gpukeeper.acceptance.launchers.kubernetes.options import GPU_RESOURCES
from gpukeeper.acceptance.launchers.kubernetes.wire import count
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import MarkSettings

BLOCKING = ("NoSchedule", "NoExecute")
PRESENT = "nvidia.com/gpu.present"  # label of GPU feature discovery


class _Taint(msgspec.Struct, frozen=True, omit_defaults=True):
    key: str
    effect: str
    value: str = ""
    timeAdded: str = ""  # noqa: N815 a field of the API


class _Meta(msgspec.Struct, frozen=True):
    name: str
    uid: str
    resourceVersion: str  # noqa: N815 a field of the API
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Spec(msgspec.Struct, frozen=True):
    taints: list[_Taint] = []
    unschedulable: bool = False


class _Info(msgspec.Struct, frozen=True):
    systemUUID: str = ""  # noqa: N815 a field of the API


class _Status(msgspec.Struct, frozen=True):
    nodeInfo: _Info = _Info()  # noqa: N815 a field of the API
    conditions: list[NodeCondition] = []
    capacity: dict[str, str] = {}


class ClusterNode(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


async def nodes_of(api: Api) -> Sequence[ClusterNode]:
    """A list with a gap would make the budget wrong."""
    found = await api.list(NODES, ClusterNode)
    if not found.complete or found.problems:
        why = found.problems[0] if found.problems else "the list of nodes is not complete"
        raise PlatformError(f"{api.place}: {why}. Nothing more was marked")
    return found.items


def marks_of(node: ClusterNode, settings: MarkSettings) -> NodeMarks:
    labels = node.metadata.labels
    announced = any(count(node.status.capacity, resource) for resource in GPU_RESOURCES)
    return NodeMarks(
        node=node.metadata.name,
        uid=node.metadata.uid,
        version=node.metadata.resourceVersion,
        labels=labels,
        annotations=node.metadata.annotations,
        taints={one.key: one.value for one in node.spec.taints if one.key in TAINTS},
        conditions=tuple(node.status.conditions),
        gpu=announced or labels.get(PRESENT) == "true" or LABEL in labels or QUARANTINE in labels,
        out=_out(node, settings),
    )


def _out(node: ClusterNode, settings: MarkSettings) -> str:
    blocking = [one.key for one in node.spec.taints if one.effect in BLOCKING]
    ours = [one for one in blocking if one in TAINTS]
    if ours:
        return f"with our taint {ours[0]}"
    ready = next((one.status for one in node.status.conditions if one.type == "Ready"), "Unknown")
    if ready != "True":
        return "not ready"
    if node.spec.unschedulable:
        return "cordoned"
    others = [one for one in blocking if one not in settings.ignored_taints]
    return f"with the taint {others[0]}" if others else ""


async def write_condition(api: Api, change: Change, node: ClusterNode, now: datetime) -> ClusterNode:
    """Conditions are merged by their type: those of the kubelet are not touched."""
    wanted = change.condition
    before = condition_of(NodeMarks(node="", uid="", version="", conditions=tuple(node.status.conditions)), wanted.type)
    if before == wanted:
        return node
    stamp = f"{now:%Y-%m-%dT%H:%M:%SZ}"
    written: dict[str, str] = {"type": wanted.type, "$patch": "delete"}
    if wanted.status:
        moved = {} if before.status == wanted.status else {"lastTransitionTime": stamp}
        written = {**msgspec.to_builtins(wanted), "lastHeartbeatTime": stamp, **moved}
    status = {"metadata": _read(node), "status": {"conditions": [written]}}
    return await api.patch(NODES, change.node, status, ClusterNode, how="strategic", subresource="status")


async def write_marks(api: Api, change: Change, node: ClusterNode) -> ClusterNode:
    """Labels, annotations and taints in one request: all of them or none."""
    labels = _differences(change.labels, node.metadata.labels)
    annotations = _differences(change.annotations, node.metadata.annotations)
    taints = _differences(change.taints, {one.key: one.value for one in node.spec.taints})
    if not labels and not annotations and not taints:
        return node
    patch: dict[str, Any] = {"metadata": {**_read(node), "labels": labels, "annotations": annotations}}
    if taints:
        patch["spec"] = {"taints": _taints(node, change.taints)}
    return await api.patch(NODES, change.node, patch, ClusterNode)


def _differences(wanted: Mapping[str, str | None], there: Mapping[str, str]) -> dict[str, str | None]:
    return {key: value for key, value in wanted.items() if there.get(key) != value}


def _read(node: ClusterNode) -> dict[str, str]:
    """The server refuses a write if the node is another one, or has changed since it was read."""
    return {"uid": node.metadata.uid, "resourceVersion": node.metadata.resourceVersion}


def _taints(node: ClusterNode, wanted: Mapping[str, str | None]) -> list[Any]:
    """All others stay as they are."""
    others = [msgspec.to_builtins(one) for one in node.spec.taints if one.key not in wanted]
    ours = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in wanted.items() if value is not None]
    return [*others, *ours]

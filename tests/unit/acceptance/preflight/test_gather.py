"""What is read of a cluster in memory becomes facts; what may not be read is Unknown, and the rest is still read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import ClusterFacts
from gpukeeper.acceptance.fleet.preflight.kubernetes import judge
from gpukeeper.acceptance.launchers.preflight import LIMIT_RANGES, SECRETS, gather_facts
from gpukeeper.clients.kubernetes.api import (
    ACCESS_REVIEWS,
    DAEMON_SETS,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    Resource,
)
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Taint
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.preflight.clusters import REQUEST, asking, the
from tests.unit.clients.kubernetes.memory_api import MemoryApi


class Cluster(MemoryApi):
    """As MemoryApi, and it answers what a login may do."""

    def __init__(self) -> None:
        super().__init__("lab")
        self.denied: set[str] = set()
        self.add(NAMESPACES, {"metadata": {"name": "lab", "labels": {"a": "b"}}})

    async def create(self, resource: Resource, manifest: Any, type_: Any, **more: Any) -> Any:
        if resource != ACCESS_REVIEWS:
            return await super().create(resource, manifest, type_, **more)
        self._ask("create", resource, "", "")
        asked = manifest["spec"]["resourceAttributes"]
        return type_(status=type(type_().status)(allowed=f"{asked['verb']} {asked['resource']}" not in self.denied))


def gathered(cluster: MemoryApi, **changes: Any) -> ClusterFacts:
    return asyncio.run(gather_facts(cluster, asking(**changes)))


def a_node(name: str, **changes: Any) -> dict[str, Any]:
    room = {"nvidia.com/gpu": "8", "memory": "512Gi"}
    status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": {"pool": name}}, "spec": {}, "status": status, **changes}


def a_pod(name: str, **changes: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "train:1",
        "resources": {"limits": {"nvidia.com/gpu": "2"}},
        "env": [
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "NCCL_IB_HCA", "valueFrom": {"configMapKeyRef": {"name": "net"}}},
            {"name": "HOME", "value": "/data"},
        ],
        "envFrom": [{"configMapRef": {"name": "net"}}],
    }
    spec = {"nodeName": "gpu-1", "containers": [container], "tolerations": [{"operator": "Exists"}]}
    made = {"metadata": {"name": name, "namespace": "team"}, "spec": spec, "status": {"phase": "Running"}}
    return {**made, **changes}


def test_nodes_and_their_state() -> None:
    cluster = Cluster()
    taints = [{"key": "gpu", "value": "only", "effect": "NoSchedule", "timeAdded": "2026-01-05T10:00:00Z"}]
    cluster.add(NODES, a_node("gpu-1", spec={"unschedulable": True, "taints": taints}))
    cluster.add(NODES, a_node("gpu-2", status={}))
    first, second = gathered(cluster).nodes or ()
    assert (first.gpus, first.usable, first.ready, first.cordoned) == (8, 8, True, True)
    assert first.taints == (Taint(key="gpu", value="only", effect="NoSchedule"),)
    assert (second.gpus, second.ready) == (0, False)


def test_workloads_that_hold_gpus_and_their_variables() -> None:
    cluster = Cluster()
    owners = [{"kind": "ReplicaSet", "name": "train-6c9f", "controller": True}]
    cluster.add(
        PODS, a_pod("train-6c9f-x", metadata={"name": "train-6c9f-x", "namespace": "team", "ownerReferences": owners})
    )
    cluster.add(PODS, a_pod("over", status={"phase": "Succeeded"}))
    cluster.add(PODS, a_pod("cpu", spec={"containers": [{"name": "main"}]}))
    (one,) = gathered(cluster).workloads or ()
    assert (one.path, one.root, one.gpus, one.node) == ("team/train-6c9f-x", "deployment/train", 2, "gpu-1")
    assert one.variables == {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": None}
    assert one.sources == ("ConfigMap net",)


def test_the_device_plugin_is_found_in_any_namespace() -> None:
    cluster = Cluster()
    template = {"spec": {"containers": [{"name": "x", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"}]}}
    status = {"desiredNumberScheduled": 3, "numberReady": 2}
    cluster.add(
        DAEMON_SETS,
        {"metadata": {"name": "own-name", "namespace": "odd-place"}, "spec": {"template": template}, "status": status},
    )
    cluster.add(DAEMON_SETS, {"metadata": {"name": "kube-proxy", "namespace": "kube-system"}})
    static = a_pod(
        "nvidia-device-plugin-gpu-9", metadata={"name": "nvidia-device-plugin-gpu-9", "namespace": "kube-system"}
    )
    cluster.add(PODS, static)
    first, second = gathered(cluster).plugins or ()
    assert (first.kind, first.namespace, first.name, first.wanted, first.ready) == (
        *("DaemonSet", "odd-place", "own-name"),
        *(3, 2),
    )
    assert (second.kind, second.name, second.ready) == ("Pod", "nvidia-device-plugin-gpu-9", 0)


def test_quotas_limits_secrets_and_the_namespace() -> None:
    cluster = Cluster()
    cluster.add(QUOTAS, {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "9"}}, "status": {"used": {"pods": "1"}}})
    limit = {"type": "Container", "max": {"memory": "1Gi"}, "default": {"memory": "1Gi"}}
    cluster.add(LIMIT_RANGES, {"metadata": {"name": "l"}, "spec": {"limits": [limit]}})
    cluster.add(SECRETS, {"metadata": {"name": "regcred"}, "type": "Opaque", "data": {"password": "c2VjcmV0"}})
    found = gathered(cluster, pull_secrets=("regcred", "other"))
    assert [(one.name, one.hard, one.used) for one in found.quotas or ()] == [("q", {"pods": "9"}, {"pods": "1"})]
    assert [one.most for one in found.limits or ()] == [{"memory": "1Gi"}]
    assert [(one.name, one.kind) for one in found.secrets] == [("regcred", "Opaque"), ("other", None)]
    assert not isinstance(found.namespace, Unknown)
    assert found.namespace.labels == {"a": "b"}
    assert "c2VjcmV0" not in repr(found)


def test_what_may_not_be_read_is_unknown_and_the_rest_is_read() -> None:
    cluster = Cluster()
    cluster.add(NODES, a_node("gpu-1"))
    cluster.forbidden = lambda verb, resource, namespace: resource in (PODS, DAEMON_SETS, SECRETS)
    found = gathered(cluster, pull_secrets=("regcred",))
    assert isinstance(found.workloads, Unknown)
    assert isinstance(found.plugins, Unknown)
    assert isinstance(found.secrets[0].kind, Unknown)
    assert not isinstance(found.nodes, Unknown)
    verdicts = {one.code: one.verdict for one in judge(found, REQUEST)}
    assert verdicts["gpu-nodes"] is Grade.PASS
    assert {verdicts[code] for code in ("gpus-in-use", "device-plugin", "nccl")} == {Grade.INCONCLUSIVE}


def test_rights_are_asked_for_one_by_one() -> None:
    cluster = Cluster()
    cluster.denied = {"create jobs"}
    one = the("rights", judge(gathered(cluster), REQUEST))
    assert one.message == "may not create jobs.batch in namespace lab; needed to run"


def test_a_selector_selects_nodes_and_an_invalid_one_is_refused() -> None:
    cluster = Cluster()
    cluster.add(NODES, a_node("gpu-1"))
    cluster.add(NODES, a_node("gpu-2"))
    assert gathered(cluster, selector="pool=gpu-2").selected == frozenset({"gpu-2"})
    invalid = ApiError(400, "BadRequest", "unable to parse requirement")
    answered = iter([None, invalid])
    cluster.fail = lambda verb, resource, name: next(answered) if resource == NODES else None
    with pytest.raises(UsageError, match="not a label selector"):
        gathered(cluster, selector="(")


def test_a_list_that_changed_while_it_was_read_is_not_known() -> None:
    class Torn(Cluster):
        async def list(self, resource: Resource, type_: Any, **more: Any) -> Any:
            found = await super().list(resource, type_, **more)
            return type(found)(items=found.items, complete=resource != NODES)

    assert isinstance(gathered(Torn()).nodes, Unknown)

"""A PyTorchJob of the Kubeflow training operator: one master and a worker on each other node. The operator creates a
Service for each pod and sets MASTER_ADDR, RANK and WORLD_SIZE; gpukeeper starts the ranks of a node itself."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.launchers.kubernetes import pod
from gpukeeper.acceptance.launchers.kubernetes.api import PYTORCH_JOBS
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head, names

RESOURCE = PYTORCH_JOBS
CONTAINER = "pytorch"  # the operator searches for these two names
PORT = "pytorchjob-port"


def items(plan: Plan) -> list[Item]:
    replicas = {"Master": _replicas(plan, 1, {"value": "0"})}
    if len(plan.nodes) > 1:
        replicas["Worker"] = _replicas(plan, len(plan.nodes) - 1, None)
    policy: dict[str, Any] = {
        "cleanPodPolicy": "None",  # pods keep the log until the report is collected
        "backoffLimit": plan.spec.backoff,
        "activeDeadlineSeconds": int(plan.spec.deadline_s),
    }
    if plan.options.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = plan.options.ttl_s
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return [Item(PYTORCH_JOBS, {**head(PYTORCH_JOBS), "metadata": plan.metadata(plan.name), "spec": spec})]


def _replicas(plan: Plan, count: int, index: dict[str, Any] | None) -> dict[str, Any]:
    group: list[dict[str, Any]] = [{"name": "GPUKEEPER_GROUP_SIZE", "value": str(len(plan.nodes))}]
    if index:
        group.append({"name": "GPUKEEPER_GROUP_INDEX", **index})
    template = pod.template(
        plan, devices=plan.same_devices(), nodes=names(plan.nodes), group=group, container=CONTAINER, apart=True
    )
    template["spec"]["containers"][0]["ports"] = [{"name": PORT, "containerPort": plan.spec.port}]
    return {"replicas": count, "restartPolicy": "Never", "template": template}

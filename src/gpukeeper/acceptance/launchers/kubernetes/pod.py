"""The pod of a run, the same in every form: one container that has the GPUs of its node. Pure.

Least privilege, as far as the probes allow: no token, no capability except IPC_LOCK (pinned memory for RDMA), no more
privileges than at the start, the runtime's seccomp profile. The root filesystem is writable: PyTorch caches kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukeeper.acceptance.fleet.spec import command
from gpukeeper.acceptance.launchers.kubernetes import marks
from gpukeeper.acceptance.launchers.kubernetes.plan import Plan

CONTAINER = "accept"
TERMINATION_LOG = "/dev/termination-log"
REPORTS = "/app/reports"
SHM = "/dev/shm"  # noqa: S108
HOST = "kubernetes.io/hostname"
GRACE_S = 30  # a run that is ended sends the report of what it has done
# 2: a wrong flag, 3: partly done, 4: a check failed, 5: inconclusive. Its report is sent; once more gives no other.
JUDGED = (2, 3, 4, 5)
POD_NODE = {"fieldRef": {"fieldPath": "spec.nodeName"}}


def template(
    plan: Plan,
    *,
    devices: Mapping[str, int],
    nodes: Sequence[str],
    node: str = "",
    group: Sequence[dict[str, Any]] = (),
    stays: bool = False,
    container: str = CONTAINER,
    apart: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """`nodes`: where it may run. `node`: the one, if that is known. `group`: variables of a run over all nodes.
    `stays`: restarted for ever, so the program waits when it has reported. `apart`: one on each node."""
    annotations = marks.of_pods(plan.spec) | ({marks.NODE: node} if node else {})
    return {
        "metadata": {"labels": marks.labels(plan.spec), "annotations": annotations},
        "spec": _spec(plan, devices, nodes, node, group, stays, container, apart) | more,
    }


def _spec(
    plan: Plan,
    devices: Mapping[str, int],
    nodes: Sequence[str],
    node: str,
    group: Sequence[dict[str, Any]],
    stays: bool,
    container: str,
    apart: bool,
) -> dict[str, Any]:
    options = plan.options
    spec: dict[str, Any] = {
        "restartPolicy": "Always" if stays else "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "affinity": {"nodeAffinity": on_nodes(nodes)} | ({"podAntiAffinity": _apart(plan)} if apart else {}),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(plan, devices, node, group, stays, container)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}],
    }
    if stays:
        spec["volumes"].append({"name": "reports", "emptyDir": {}})
    if options.tolerate:
        spec["tolerations"] = [{"operator": "Exists"}]
    if options.priority:
        spec["priorityClassName"] = options.priority
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    if options.runtime_class:
        spec["runtimeClassName"] = options.runtime_class
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return spec


def _container(
    plan: Plan, devices: Mapping[str, int], node: str, group: Sequence[dict[str, Any]], stays: bool, name: str
) -> dict[str, Any]:
    options = plan.options
    limits: dict[str, Any] = {**devices, **options.rdma}
    requests = {key: text for key, text in (("cpu", options.cpu), ("memory", options.memory)) if text}
    resources: dict[str, Any] = {"limits": limits | requests} if limits or requests else {}
    found: dict[str, Any] = {
        "name": name,
        "image": plan.spec.image,
        "command": list(command(plan.spec)),
        "env": _environment(plan, node, group, stays),
        "resources": resources | ({"requests": requests} if requests else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        },
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "shm", "mountPath": SHM}],
    }
    if options.pull_policy:
        found["imagePullPolicy"] = options.pull_policy
    if group:
        found["ports"] = [{"name": "rendezvous", "containerPort": plan.spec.port}]
    if stays:
        found["volumeMounts"].append({"name": "reports", "mountPath": REPORTS})
        # Ready means: it has reported. The program writes this file last.
        found["readinessProbe"] = {"exec": {"command": ["test", "-s", TERMINATION_LOG]}, "periodSeconds": 5}
    return found


def _environment(plan: Plan, node: str, group: Sequence[dict[str, Any]], stays: bool) -> list[dict[str, Any]]:
    own = {"GPUKEEPER_TERMINATION_LOG": TERMINATION_LOG}
    own |= {"GPUKEEPER_STAY": "1", "REPORT_DIR": REPORTS} if stays else {}
    given = {key: text for key, text in plan.spec.environment.items() if key not in own}
    where = {"name": "GPUKEEPER_NODE", "value": node} if node else {"name": "GPUKEEPER_NODE", "valueFrom": POD_NODE}
    return [where, *({"name": key, "value": text} for key, text in (own | given).items()), *group]


def on_nodes(nodes: Sequence[str]) -> dict[str, Any]:
    """By the name of the node, not by its hostname label, which can differ. One term each: a field has one value."""
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in sorted(nodes)]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _apart(plan: Plan) -> dict[str, Any]:
    run = {marks.RUN: plan.spec.run}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {"matchLabels": run}, "topologyKey": HOST}]
    }

"""The default: one Job for each node, with all its GPUs. It runs to completion; one node does not affect another."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.launchers.kubernetes import marks, pod, rendezvous
from gpukeeper.acceptance.launchers.kubernetes.api import JOBS
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head

RESOURCE = JOBS
WHOLE = 3  # so many of them carry the names of all nodes: one can be removed by others


def items(plan: Plan) -> list[Item]:
    made = [Item(JOBS, _job(plan, number)) for number in range(len(plan.nodes))]
    return [*made, rendezvous.service(plan)] if plan.spec.together else made


def _job(plan: Plan, number: int) -> dict[str, Any]:
    target = plan.nodes[number]
    more: dict[str, Any] = {}
    group: list[dict[str, Any]] = []
    if plan.spec.together:
        more = {"hostname": _host(number), "subdomain": plan.name}
        group = rendezvous.variables(plan, f"{_host(0)}.{plan.name}", {"value": str(number)})
    template = pod.template(
        plan, devices=plan.devices(target), nodes=[target.node], node=target.node, group=group, **more
    )
    spec = {**limits(plan), "template": template}
    name = marks.name(plan.spec.run, target.node)
    return {**head(JOBS), "metadata": plan.metadata(name, whole=number < WHOLE, node=target.node), "spec": spec}


def limits(plan: Plan) -> dict[str, Any]:
    """A node that was judged is not judged again; one that was evicted is."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(pod.JUDGED)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    found: dict[str, Any] = {
        "backoffLimit": plan.spec.backoff,
        "activeDeadlineSeconds": int(plan.spec.deadline_s),
        "podFailurePolicy": {"rules": rules},
    }
    return found if plan.options.ttl_s is None else found | {"ttlSecondsAfterFinished": plan.options.ttl_s}


def _host(number: int) -> str:
    return f"node-{number}"

"""One Job over all nodes, with an index for each. A node that fails does not end the others."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.launchers.kubernetes import pod, rendezvous
from gpukeeper.acceptance.launchers.kubernetes.api import JOBS
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head, names

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def items(plan: Plan) -> list[Item]:
    group = rendezvous.variables(plan, f"{plan.name}-0.{plan.name}", rendezvous.from_field(INDEX))
    spec = job_spec(plan, group, subdomain=plan.name)
    if plan.options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = plan.options.ttl_s
    job = {**head(JOBS), "metadata": plan.metadata(plan.name), "spec": spec}
    return [Item(JOBS, job), rendezvous.service(plan)]


def job_spec(plan: Plan, group: list[dict[str, Any]], **of_pods: Any) -> dict[str, Any]:
    count = len(plan.nodes)
    rules = [
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": list(pod.JUDGED)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": plan.spec.backoff,
        "maxFailedIndexes": count,
        "activeDeadlineSeconds": int(plan.spec.deadline_s),
        "podFailurePolicy": {"rules": rules},
        "template": pod.template(
            plan, devices=plan.same_devices(), nodes=names(plan.nodes), group=group, apart=True, **of_pods
        ),
    }

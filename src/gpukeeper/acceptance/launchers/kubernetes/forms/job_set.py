"""A JobSet with one indexed Job over all nodes. Its controller creates the headless Service."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.launchers.kubernetes import marks, rendezvous
from gpukeeper.acceptance.launchers.kubernetes.api import JOB_SETS
from gpukeeper.acceptance.launchers.kubernetes.forms import indexed_job
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head

RESOURCE = JOB_SETS
STEP = "node"


def items(plan: Plan) -> list[Item]:
    group = rendezvous.variables(plan, f"{plan.name}-{STEP}-0-0.{plan.name}", rendezvous.from_field(indexed_job.INDEX))
    # A TTL of the Job could remove it while the set runs: it belongs to the set.
    job = {
        "metadata": {"labels": marks.labels(plan.spec), "annotations": marks.of_pods(plan.spec)},
        "spec": indexed_job.job_spec(plan, group),
    }
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": plan.name},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": STEP, "replicas": 1, "template": job}],
    }
    if plan.options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = plan.options.ttl_s
    return [Item(JOB_SETS, {**head(JOB_SETS), "metadata": plan.metadata(plan.name), "spec": spec})]

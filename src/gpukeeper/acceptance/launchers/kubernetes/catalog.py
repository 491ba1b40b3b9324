"""Every form, in one table."""

from __future__ import annotations

from collections.abc import Callable

from gpukeeper.acceptance.launchers.kubernetes.api import (
    JOB_SETS,
    JOBS,
    PYTORCH_JOBS,
    SERVICES,
    TRAIN_JOBS,
    TRAINING_RUNTIMES,
    Resource,
)
from gpukeeper.acceptance.launchers.kubernetes.forms import (
    daemon_set,
    indexed_job,
    job,
    job_set,
    pytorch_job,
    stateful_set,
    train_job,
)
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan
from gpukeeper.model.errors import UsageError

DEFAULT = "job"
FORMS: dict[str, Callable[[Plan], list[Item]]] = {
    "job": job.items,
    "daemonset": daemon_set.items,
    "indexed-job": indexed_job.items,
    "statefulset": stateful_set.items,
    "pytorchjob": pytorch_job.items,
    "trainjob": train_job.items,
    "jobset": job_set.items,
}
STAYING = frozenset({"daemonset", "statefulset"})  # its pods never end by themselves
ROOTS = (
    job.RESOURCE,
    daemon_set.RESOURCE,
    stateful_set.RESOURCE,
    pytorch_job.RESOURCE,
    train_job.RESOURCE,
    job_set.RESOURCE,
)
BESIDE = (TRAINING_RUNTIMES, SERVICES)
# Kinds that lead from a root to its pods, by form. Without them it is not known which pods belong to the run.
BETWEEN = {"trainjob": (JOB_SETS, JOBS), "jobset": (JOBS,)}
OPTIONAL = {  # kinds that a cluster may not have, and what installs them
    PYTORCH_JOBS.words: "the Kubeflow training operator",
    TRAIN_JOBS.words: "the Kubeflow Trainer",
    TRAINING_RUNTIMES.words: "the Kubeflow Trainer",
    JOB_SETS.words: "the JobSet controller",
}


def items(plan: Plan) -> list[Item]:
    if not plan.spec.image:
        raise UsageError("An image is needed: --image REGISTRY/NAME:TAG. Nothing was created.")
    if not plan.nodes:
        raise UsageError("No node can be tested, so there is nothing to create. `accept preflight` lists the reasons.")
    return FORMS[plan.spec.form](plan)


def is_optional(resource: Resource) -> bool:
    return resource.words in OPTIONAL

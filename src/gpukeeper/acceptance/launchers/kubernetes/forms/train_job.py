"""A TrainJob of the Kubeflow Trainer, and a TrainingRuntime of its own: a runtime of the cluster knows nothing of
shared memory, RDMA and the nodes to test. The Trainer sets PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR in a runtime
for PyTorch; in one for TensorFlow the variables are ours."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.launchers.kubernetes import marks, rendezvous
from gpukeeper.acceptance.launchers.kubernetes.api import TRAIN_JOBS, TRAINING_RUNTIMES
from gpukeeper.acceptance.launchers.kubernetes.forms import indexed_job
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head

RESOURCE = TRAIN_JOBS
TORCH = "torch"
STEP = "node"  # the name that the Trainer gives the Job and the container of the trainer
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def items(plan: Plan) -> list[Item]:
    reference = {"apiGroup": TRAIN_JOBS.group, "kind": TRAINING_RUNTIMES.kind, "name": plan.name}
    trainer: dict[str, Any] = {"numNodes": len(plan.nodes)}
    job = {
        **head(TRAIN_JOBS),
        "metadata": plan.metadata(plan.name),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [Item(TRAINING_RUNTIMES, _runtime(plan), owned=True), Item(TRAIN_JOBS, job)]


def _runtime(plan: Plan) -> dict[str, Any]:
    framework = plan.options.framework
    group = [{"name": "GPUKEEPER_GROUP_SIZE", "value": str(len(plan.nodes))}]
    if framework != TORCH:
        first = f"{plan.name}-{STEP}-0-0.{plan.name}"
        group = rendezvous.variables(plan, first, rendezvous.from_field(indexed_job.INDEX))
    spec = indexed_job.job_spec(plan, group)
    del spec["completions"], spec["parallelism"], spec["completionMode"]  # the Trainer's
    spec["template"]["spec"]["containers"][0]["name"] = STEP
    job = {
        "metadata": {"labels": marks.labels(plan.spec) | ANCESTOR, "annotations": marks.of_pods(plan.spec)},
        "spec": spec,
    }
    whole: dict[str, Any] = {
        "mlPolicy": {"numNodes": len(plan.nodes)} | ({"torch": {}} if framework == TORCH else {}),
        "template": {
            # Of the JobSet: the chain of uids from a pod to the TrainJob leads over it.
            "metadata": {"labels": marks.labels(plan.spec)},
            "spec": {
                "network": {"publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All"},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": STEP, "template": job}],
            },
        },
    }
    metadata = plan.metadata(plan.name)
    metadata["labels"]["trainer.kubeflow.org/framework"] = framework
    return {**head(TRAINING_RUNTIMES), "metadata": metadata, "spec": whole}

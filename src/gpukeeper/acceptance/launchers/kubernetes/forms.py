"""The forms of objects that a run can have, each from a plan to manifests, and all of them in one table. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpukeeper.acceptance.fleet.launcher import RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.acceptance.launchers.kubernetes.objects import (
    JUDGED,
    Item,
    Plan,
    from_field,
    group_variables,
    head,
    headless_service,
    node_names,
    pod_template,
)
from gpukeeper.clients.kubernetes.api import (
    DAEMON_SETS,
    JOB_SETS,
    JOBS,
    PYTORCH_JOBS,
    SERVICES,
    STATEFUL_SETS,
    TRAIN_JOBS,
    TRAINING_RUNTIMES,
    Resource,
)
from gpukeeper.model.errors import UsageError

WHOLE_JOBS = 3  # so many of them carry the names of all nodes: one can be removed by others


def _job_items(plan: Plan) -> list[Item]:
    """The default: one Job for each node, with all its GPUs. It runs to completion; one node does not affect
    another."""
    made = [Item(JOBS, _job(plan, number)) for number in range(len(plan.nodes))]
    return [*made, headless_service(plan)] if plan.spec.together else made


def _job(plan: Plan, number: int) -> dict[str, Any]:
    target = plan.nodes[number]
    more: dict[str, Any] = {}
    group: list[dict[str, Any]] = []
    if plan.spec.together:
        more = {"hostname": _host(number), "subdomain": plan.name}
        group = group_variables(plan, f"{_host(0)}.{plan.name}", {"value": str(number)})
    template = pod_template(
        plan, devices=plan.devices(target), nodes=[target.node], node=target.node, group=group, **more
    )
    spec = {**_job_limits(plan), "template": template}
    name = objects.name_of(plan.spec.run, target.node)
    return {**head(JOBS), "metadata": plan.metadata(name, whole=number < WHOLE_JOBS, node=target.node), "spec": spec}


def _job_limits(plan: Plan) -> dict[str, Any]:
    """A node that was judged is not judged again; one that was evicted is."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(JUDGED)}},
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


SET_LABEL = "gpukeeper.io/set"


def _daemon_set_items(plan: Plan) -> list[Item]:
    """A DaemonSet, as the older kit had it. It never completes: each pod runs once, reports and waits, and the set is
    removed when its nodes have reported. Its pods are alike, so there is one set for each number and kind of GPUs."""
    if plan.spec.together:
        raise UsageError(
            "--as daemonset: its pods have no stable names, so they cannot be one run. Nothing was created. "
            "Use --as job, indexed-job or statefulset."
        )
    if plan.by_label:
        return [_daemon_set(plan, plan.devices(Target(node="")), 0)]
    kinds = sorted({tuple(plan.devices(one).items()) for one in plan.nodes})
    return [
        _daemon_set(plan, dict(kind), number if len(kinds) > 1 else 0) for number, kind in enumerate(kinds, start=1)
    ]


def _daemon_set(plan: Plan, devices: dict[str, int], number: int) -> Item:
    """`number`: of the set, where there are several."""
    chosen = [] if plan.by_label else [one for one in plan.nodes if plan.devices(one) == devices]
    template = pod_template(plan, devices=devices, nodes=node_names(chosen), stays=True)
    match = {objects.ACCEPTANCE_LABEL: "run", objects.RUN_LABEL: plan.spec.run}
    if number:
        match[SET_LABEL] = template["metadata"]["labels"][SET_LABEL] = str(number)
    spec = {"selector": {"matchLabels": match}, "updateStrategy": {"type": "OnDelete"}, "template": template}
    name = objects.name_of(plan.spec.run, str(number) if number else "")
    return Item(DAEMON_SETS, {**head(DAEMON_SETS), "metadata": plan.metadata(name), "spec": spec})


JOB_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def _indexed_job_items(plan: Plan) -> list[Item]:
    """One Job over all nodes, with an index for each. A node that fails does not end the others."""
    group = group_variables(plan, f"{plan.name}-0.{plan.name}", from_field(JOB_INDEX))
    spec = _indexed_job_spec(plan, group, subdomain=plan.name)
    if plan.options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = plan.options.ttl_s
    job = {**head(JOBS), "metadata": plan.metadata(plan.name), "spec": spec}
    return [Item(JOBS, job), headless_service(plan)]


def _indexed_job_spec(plan: Plan, group: list[dict[str, Any]], **of_pods: Any) -> dict[str, Any]:
    count = len(plan.nodes)
    rules = [
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": list(JUDGED)}},
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
        "template": pod_template(
            plan, devices=plan.same_devices(), nodes=node_names(plan.nodes), group=group, apart=True, **of_pods
        ),
    }


POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


def _stateful_set_items(plan: Plan) -> list[Item]:
    """A StatefulSet over all nodes. All pods start at once: they wait for each other. It never completes by itself."""
    group = group_variables(plan, f"{plan.name}-0.{plan.name}", from_field(POD_INDEX))
    spec = {
        "serviceName": plan.name,
        "replicas": len(plan.nodes),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": {objects.ACCEPTANCE_LABEL: "run", objects.RUN_LABEL: plan.spec.run}},
        "template": pod_template(
            plan, devices=plan.same_devices(), nodes=node_names(plan.nodes), group=group, stays=True, apart=True
        ),
    }
    made = {**head(STATEFUL_SETS), "metadata": plan.metadata(plan.name), "spec": spec}
    return [Item(STATEFUL_SETS, made), headless_service(plan)]


PYTORCH_CONTAINER = "pytorch"  # the operator searches for these two names
PYTORCH_PORT = "pytorchjob-port"


def _pytorch_job_items(plan: Plan) -> list[Item]:
    """A PyTorchJob of the Kubeflow training operator: one master and a worker on each other node. The operator creates
    a Service for each pod and sets MASTER_ADDR, RANK and WORLD_SIZE; gpukeeper starts the ranks of a node itself."""
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
    template = pod_template(
        plan,
        devices=plan.same_devices(),
        nodes=node_names(plan.nodes),
        group=group,
        apart=True,
    )
    ports = [{"name": PYTORCH_PORT, "containerPort": plan.spec.port}]
    template["spec"]["containers"][0] |= {"name": PYTORCH_CONTAINER, "ports": ports}
    return {"replicas": count, "restartPolicy": "Never", "template": template}


TORCH = "torch"
TRAINER_STEP = "node"  # the name that the Trainer gives the Job and the container of the trainer
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def _train_job_items(plan: Plan) -> list[Item]:
    """A TrainJob of the Kubeflow Trainer, and a TrainingRuntime of its own: a runtime of the cluster knows nothing of
    shared memory, RDMA and the nodes to test. The Trainer sets PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR in a
    runtime for PyTorch; in one for TensorFlow the variables are ours."""
    reference = {"apiGroup": TRAIN_JOBS.group, "kind": TRAINING_RUNTIMES.kind, "name": plan.name}
    trainer: dict[str, Any] = {"numNodes": len(plan.nodes)}
    job = {
        **head(TRAIN_JOBS),
        "metadata": plan.metadata(plan.name),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [Item(TRAINING_RUNTIMES, _training_runtime(plan), owned=True), Item(TRAIN_JOBS, job)]


def _training_runtime(plan: Plan) -> dict[str, Any]:
    framework = plan.options.framework
    group = [{"name": "GPUKEEPER_GROUP_SIZE", "value": str(len(plan.nodes))}]
    if framework != TORCH:
        first = f"{plan.name}-{TRAINER_STEP}-0-0.{plan.name}"
        group = group_variables(plan, first, from_field(JOB_INDEX))
    spec = _indexed_job_spec(plan, group)
    del spec["completions"], spec["parallelism"], spec["completionMode"]  # the Trainer's
    spec["template"]["spec"]["containers"][0]["name"] = TRAINER_STEP
    job = {
        "metadata": {"labels": objects.labels(plan.spec) | ANCESTOR, "annotations": objects.pod_annotations(plan.spec)},
        "spec": spec,
    }
    whole: dict[str, Any] = {
        "mlPolicy": {"numNodes": len(plan.nodes)} | ({"torch": {}} if framework == TORCH else {}),
        "template": {
            # Of the JobSet: the chain of uids from a pod to the TrainJob leads over it.
            "metadata": {"labels": objects.labels(plan.spec)},
            "spec": {
                "network": {"publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All"},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": TRAINER_STEP, "template": job}],
            },
        },
    }
    metadata = plan.metadata(plan.name)
    metadata["labels"]["trainer.kubeflow.org/framework"] = framework
    return {**head(TRAINING_RUNTIMES), "metadata": metadata, "spec": whole}


JOB_SET_STEP = "node"


def _job_set_items(plan: Plan) -> list[Item]:
    """A JobSet with one indexed Job over all nodes. Its controller creates the headless Service."""
    group = group_variables(plan, f"{plan.name}-{JOB_SET_STEP}-0-0.{plan.name}", from_field(JOB_INDEX))
    # A TTL of the Job could remove it while the set runs: it belongs to the set.
    job = {
        "metadata": {"labels": objects.labels(plan.spec), "annotations": objects.pod_annotations(plan.spec)},
        "spec": _indexed_job_spec(plan, group),
    }
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": plan.name},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": JOB_SET_STEP, "replicas": 1, "template": job}],
    }
    if plan.options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = plan.options.ttl_s
    return [Item(JOB_SETS, {**head(JOB_SETS), "metadata": plan.metadata(plan.name), "spec": spec})]


DEFAULT = "job"
FORMS: dict[str, Callable[[Plan], list[Item]]] = {
    "job": _job_items,
    "daemonset": _daemon_set_items,
    "indexed-job": _indexed_job_items,
    "statefulset": _stateful_set_items,
    "pytorchjob": _pytorch_job_items,
    "trainjob": _train_job_items,
    "jobset": _job_set_items,
}
ROOTS = (
    JOBS,
    DAEMON_SETS,
    STATEFUL_SETS,
    PYTORCH_JOBS,
    TRAIN_JOBS,
    JOB_SETS,
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
    if not plan.nodes and not plan.by_label:
        raise UsageError("No node can be tested, so there is nothing to create. `accept preflight` lists the reasons.")
    return FORMS[plan.spec.form](plan)


def can_name_a_label(spec: RunSpec) -> bool:
    """Instead of nodes: one set for all nodes with so many GPUs."""
    return spec.form == "daemonset" and bool(spec.selector) and spec.gpus_per_node is not None


def is_optional(resource: Resource) -> bool:
    return resource.words in OPTIONAL

"""Objects to begin with: the smallest of each kind that asks for GPUs. `annotations` reach the pods (see nodes.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.real.kube.api import Object
from tests.real.kube.nodes import GPU

IMAGE = "local/busybox:1"


def pod_spec(*, gpus: int = 1, command: list[str] | None = None, restart: str = "Never", **more: Any) -> Object:
    container: Object = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}
    container |= {"command": command} if command else {}
    container |= {"resources": {"limits": {GPU: str(gpus)}}} if gpus else {}
    return {"restartPolicy": restart, "terminationGracePeriodSeconds": 1, "containers": [container], **more}


def pod(
    name: str, *, annotations: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None, **spec: Any
) -> Object:
    metadata = {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})}
    return {"kind": "Pod", "metadata": metadata, "spec": pod_spec(**spec)}


def template(
    *, annotations: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None, **spec: Any
) -> Object:
    return {
        "metadata": {"annotations": dict(annotations or {}), "labels": dict(labels or {})},
        "spec": pod_spec(**spec),
    }


def job(name: str, *, backoff: int = 0, ttl: int | None = None, parallelism: int = 1, **of_pods: Any) -> Object:
    spec: Object = {"backoffLimit": backoff, "parallelism": parallelism, "completions": parallelism}
    spec |= {"ttlSecondsAfterFinished": ttl} if ttl is not None else {}
    return {"kind": "Job", "metadata": {"name": name}, "spec": {**spec, "template": template(**of_pods)}}


def deployment(name: str, *, replicas: int = 1, **of_pods: Any) -> Object:
    made = template(labels={"app": name}, restart="Always", **of_pods)
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": made}
    return {"kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def jobset(name: str, *, replicas: int = 1, max_restarts: int = 0, ttl: int | None = None, **of_pods: Any) -> Object:
    one = job("unused", **of_pods)
    spec: Object = {
        "replicatedJobs": [{"name": "node", "replicas": replicas, "template": {"spec": one["spec"]}}],
    }
    spec |= {"failurePolicy": {"maxRestarts": max_restarts}} if max_restarts else {}
    spec |= {"ttlSecondsAfterFinished": ttl} if ttl is not None else {}
    return {"kind": "JobSet", "metadata": {"name": name}, "spec": spec}


def training_runtime(name: str, *, ttl: int | None = None, backoff: int = 0, **of_pods: Any) -> Object:
    """Of one namespace; `cluster_runtime` is of all."""
    inner = job("unused", backoff=backoff, **of_pods)["spec"]
    inner["template"]["spec"]["containers"][0]["name"] = "node"
    inner["template"]["metadata"].setdefault("labels", {})
    step = {
        "name": "node",
        "template": {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": inner},
    }
    spec: Object = {"replicatedJobs": [step]}
    spec |= {"ttlSecondsAfterFinished": ttl} if ttl is not None else {}
    labels = {"trainer.kubeflow.org/framework": "torch"}
    whole = {"mlPolicy": {"numNodes": 1}, "template": {"spec": spec}}
    return {"kind": "TrainingRuntime", "metadata": {"name": name, "labels": labels}, "spec": whole}


def cluster_runtime(name: str, **how: Any) -> Object:
    return {**training_runtime(name, **how), "kind": "ClusterTrainingRuntime"}


def train_job(name: str, runtime: str, *, nodes: int = 1, kind: str = "TrainingRuntime", **spec: Any) -> Object:
    reference = {"name": runtime, "kind": kind, "apiGroup": "trainer.kubeflow.org"}
    whole = {"runtimeRef": reference, "trainer": {"numNodes": nodes}, **spec}
    return {"kind": "TrainJob", "metadata": {"name": name}, "spec": whole}


def pytorch_job(name: str, *, workers: int = 1, run_policy: Mapping[str, Any] | None = None, **of_pods: Any) -> Object:
    made = template(**of_pods)
    made["spec"]["containers"][0]["name"] = "pytorch"
    replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": made}}
    if workers:
        replicas["Worker"] = {"replicas": workers, "restartPolicy": "Never", "template": made}
    spec = {"pytorchReplicaSpecs": replicas, **({"runPolicy": dict(run_policy)} if run_policy else {})}
    return {"kind": "PyTorchJob", "metadata": {"name": name}, "spec": spec}


def ray_cluster(name: str, *, workers: int = 1, gpus: int = 1, **spec: Any) -> Object:
    def of(container: str, count: int) -> Object:
        made = template(gpus=count, restart="Always")
        made["spec"]["containers"][0]["name"] = container
        return made

    group = {
        "groupName": "gpu",
        "replicas": workers,
        "minReplicas": workers,
        "maxReplicas": workers,
        "rayStartParams": {},
        "template": of("ray-worker", gpus),
    }
    whole = {
        "rayVersion": "2.46.0",
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "127.0.0.1"}, "template": of("ray-head", 0)},
        "workerGroupSpecs": [group],
        **spec,
    }
    return {"kind": "RayCluster", "metadata": {"name": name}, "spec": whole}

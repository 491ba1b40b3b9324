"""Runs of each kind that end on real controllers, passes over them, and what of them a cluster has afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed
from gpukeeper.model.unknown import Unknown
from tests.real.kube import objects
from tests.real.kube.api import Api, Object, condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness

SUCCEEDS, FAILS = {"test/exit-code": "0"}, {"test/exit-code": "1"}
HOLDERS = ("pods", "jobs")  # in every cluster
CHAIN = ("trainjobs", "jobsets", "jobs", "pods")
V1_REPLICAS = {  # of the training operator's kinds: where their replicas stand, which of them, and their container
    "PyTorchJob": ("pytorchReplicaSpecs", ("Master", "Worker"), "pytorch"),
    "TFJob": ("tfReplicaSpecs", ("Chief", "Worker"), "tensorflow"),
    "XGBoostJob": ("xgbReplicaSpecs", ("Master", "Worker"), "xgboost"),
    "PaddleJob": ("paddleReplicaSpecs", ("Master", "Worker"), "paddle"),
    "JAXJob": ("jaxReplicaSpecs", ("Worker",), "jax"),
    "MPIJob": ("mpiReplicaSpecs", ("Launcher", "Worker"), "mpi"),
}


def finish(plane: ControlPlane, namespace: str, count: int = 1, exit_code: int = 0) -> None:
    """So many pods run; they end."""
    for pod in plane.api.wait_pods(namespace, count):
        plane.finish_pod(namespace, pod["metadata"]["name"], exit_code)


def marked(made: Object, **annotations: str) -> Object:
    """With annotations of its own, not of its pods: `ttl` is gpukeeper.io/ttl."""
    given = {f"gpukeeper.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return annotated(made, given)


def annotated(made: Object, annotations: Mapping[str, str]) -> Object:
    meta = made["metadata"]
    return {**made, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), **annotations}}}


def labelled(made: Object, labels: Mapping[str, str]) -> Object:
    meta = made["metadata"]
    return {**made, "metadata": {**meta, "labels": {**meta.get("labels", {}), **labels}}}


def v1_job(kind: str, name: str, *, annotations: Mapping[str, str] | None = None, **of_pods: Any) -> Object:
    """Of the training operator: one replica of each of its roles, a GPU each. The workers of an MPIJob wait to be told
    when to end: its launcher starts only while they run."""
    field, roles, container = V1_REPLICAS[kind]

    def of(role: str) -> Object:
        ends = None if (kind, role) == ("MPIJob", "Worker") else annotations
        made = objects.template(annotations=ends, **of_pods)
        made["spec"]["containers"][0]["name"] = container
        return {"replicas": 1, "restartPolicy": "Never", "template": made}

    return {"kind": kind, "metadata": {"name": name}, "spec": {field: {role: of(role) for role in roles}}}


def ray_job(name: str, *, workers: int = 1, **spec: Any) -> Object:
    cluster = objects.ray_cluster("unused", workers=workers)["spec"]
    own = {} if "clusterSelector" in spec else {"rayClusterSpec": cluster}
    return {"kind": "RayJob", "metadata": {"name": name}, "spec": {"entrypoint": "python train.py", **own, **spec}}


def end_ray_job(api: Api, namespace: str, name: str, *, failed: bool = False) -> None:
    """As KubeRay writes it once the dashboard says so, which nobody answers for here. The RayCluster is real."""
    api.wait_for("rayjobs", namespace, name, lambda one: one and one.get("status", {}).get("rayClusterName"))
    status = {
        "jobDeploymentStatus": "Failed" if failed else "Complete",
        "jobStatus": "FAILED" if failed else "SUCCEEDED",
        "endTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    api.patch("rayjobs", namespace, name, {"status": status}, subresource="status")
    time.sleep(0.5)  # a reconcile that was under way may have written over it
    seen = api.patch("rayjobs", namespace, name, {"status": status}, subresource="status")
    assert seen["status"]["jobDeploymentStatus"] == status["jobDeploymentStatus"]


def left(api: Api, namespace: str, *plurals: str) -> dict[str, set[str]]:
    """What is there of these, by the API server; kinds with none are left out. What is on its way out counts."""
    found = {what: api.names(what, namespace) for what in plurals}
    return {what: names for what, names in found.items() if names}


def uid(api: Api, what: str, namespace: str, name: str) -> str | None:
    seen = api.get(what, namespace, name)
    return None if seen is None else str(seen["metadata"]["uid"])


def stays_so(read: Callable[[], object], words: str, seconds: float = 3) -> None:
    """It is true, and is so all the time. The time itself is the subject: where nothing happens there is no moment to
    wait for."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert read(), words
        time.sleep(0.1)


def is_true(seen: Mapping[str, Any] | None, kind: str) -> bool:
    return condition(seen, kind) == "True"


def passes(harness: Harness, patience: float = 90) -> list[Closed]:
    """Passes until one has nothing more to do or to follow; their outcomes. What only follows a removal may take as
    long as the garbage collector does."""
    done: list[Closed] = []
    ends = time.monotonic() + patience
    while True:
        report = harness.again()
        done += [*report.settled, *report.outcomes]
        unsettled = harness.run(harness.ledger.open_intents(harness.platform.name, harness.platform.place))
        if not report.outcomes and not report.warnings and not unsettled:
            return done
        assert time.monotonic() < ends, f"it goes on and on: {[(one.result, one.reason) for one in done]}"
        time.sleep(0.3)


def the_end(outcomes: list[Closed]) -> Closed:
    """The one line that says that it is done; before it there may be one that says that it is not over yet."""
    (done,) = [one for one in outcomes if one.result is not Result.UNKNOWN]
    return done


def gave_back(line: Closed, gpus: int) -> bool:
    """What was followed to its end by a later pass is not added up: then the line says so."""
    if line.by == "gpukeeper":
        return line.gpus_back == gpus
    return isinstance(line.gpus_back, Unknown) and isinstance(line.gpu_hours, Unknown)


def reclaimed(outcomes: list[Closed]) -> dict[str, Action]:
    """By kind and name: what was seen to be done."""
    return {
        f"{one.ref.kind}/{one.ref.name}": one.action
        for one in outcomes
        if one.ref is not None and one.result is Result.RECLAIMED
    }

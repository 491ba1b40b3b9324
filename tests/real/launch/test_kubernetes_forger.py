"""Someone who may create objects cannot forge the report of a node or end a run early, and keeps what is theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.launcher import Phase
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.model.unknown import Unknown
from tests.real.kube.api import Object
from tests.real.launch.beds import Bed

SERVERS = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "ownerReferences", "generation", "namespace")
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def test_labels_of_others_change_nothing(bed: Callable[[int], Bed], new_namespace: Callable[[], str]) -> None:
    made, elsewhere = bed(2), new_namespace()
    api = made.plane.api
    spec = made.spec()
    made.start(spec)
    made.until_all(Phase.RUNNING)
    pod = next(one for one in made.pods() if one["spec"]["nodeName"] == made.nodes[0])
    _forge_job(made, elsewhere)
    _forge_pod(made, pod, elsewhere)
    _forge_pod(made, pod, made.namespace)
    for one in api.list("pods", elsewhere, labels=f"{objects.RUN_LABEL}=r1"):
        made.plane.finish_pod(elsewhere, one["metadata"]["name"], exit_code=4)
    made.plane.finish_pod(made.namespace, "forged", exit_code=4)

    states = made.states()
    assert {one.phase for one in states.values()} == {Phase.RUNNING}, "the forged ones have failed, on the same node"
    (summary,) = made.tell(lambda launcher: launcher.runs())
    assert summary.spec.created >= spec.created.replace(microsecond=0)
    assert not story.is_over(summary, datetime.now(UTC))
    for one in made.pods():
        if one["metadata"]["name"] != "forged":
            made.finish(one)
    made.until_all(Phase.ENDED)
    output = made.tell(lambda launcher: launcher.output(spec, made.nodes[0]))
    assert not isinstance(output, Unknown)
    assert output.count(b"step 3 loss") == 1, "of one pod"

    before = {kind: api.names(kind, elsewhere) for kind in ("jobs", "pods")}
    removal = made.tell(lambda launcher: launcher.remove("r1"))
    assert len(removal.removed) == 2
    assert [name for name, _ in removal.left] == ["pod/forged"]
    assert {kind: api.names(kind, elsewhere) for kind in ("jobs", "pods")} == before
    assert made.left() == ["pods/forged"]
    assert made.tell(lambda launcher: launcher.run("r1")) is None


def _forge_pod(made: Bed, pod: Object, namespace: str) -> None:
    one = {"kind": "Pod", "metadata": _meta(pod, "forged"), "spec": copy.deepcopy(pod["spec"])}
    one["spec"]["containers"][0].pop("resources", None)  # the GPUs of the node are taken
    made.plane.api.create(one, namespace)


def _forge_job(made: Bed, namespace: str) -> None:
    """With the description of the run, and an old date in it."""
    job = made.plane.api.list("jobs", made.namespace)[0]
    spec = copy.deepcopy(job["spec"])
    for name in ("selector", "manualSelector"):
        spec.pop(name, None)
    spec["template"]["metadata"]["labels"] = _labels(spec["template"]["metadata"]["labels"])
    spec["template"]["spec"]["containers"][0].pop("resources", None)
    meta = _meta(job, "forged")
    described = objects.spec_of(meta["annotations"])
    assert described is not None
    old = msgspec.structs.replace(described, created=LONG_AGO, deadline_s=1.0)
    meta["annotations"][objects.SPEC_ANNOTATION] = msgspec.json.encode(old).decode()
    made.plane.api.create({"kind": "Job", "metadata": meta, "spec": spec}, namespace)
    made.plane.until(lambda: made.plane.api.list("pods", namespace), "the forged Job has its pod")


def _meta(one: Object, name: str) -> dict[str, Any]:
    kept = {key: value for key, value in copy.deepcopy(one["metadata"]).items() if key not in SERVERS}
    return {**kept, "name": name, "generateName": "", "labels": _labels(kept["labels"])}


def _labels(labels: dict[str, str]) -> dict[str, str]:
    """Without those of the Job: its controller would adopt the pod."""
    return {key: text for key, text in labels.items() if "job-name" not in key and "controller-uid" not in key}

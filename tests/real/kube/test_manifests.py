"""The offline view of a TrainJob: its init containers against the JobSet that a real Trainer makes, and the fields that
are no TTL against the API server with its CRDs."""

from __future__ import annotations

import copy
import re

import pytest

from gpukeeper.platforms.kubernetes.kinds.kubeflow import merged_manifest
from tests.real.kube import objects
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane


def runtime_with_inits() -> Object:
    made = copy.deepcopy(objects.training_runtime("torch"))
    spec = made["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    names = ("first", "second", "third", "fourth")
    spec["volumes"] = [{"name": name, "emptyDir": {}} for name in ("cache", "data", "out")]
    spec["initContainers"] = [
        {
            "name": name,
            "image": "registry.lab/init:1",
            "env": [{"name": key, "value": f"{name}-{key}"} for key in ("A", "B", "C")],
            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}, {"name": "out", "mountPath": "/out"}],
        }
        for name in names
    ]
    return made


def patch_of(manager: str, *inits: Object) -> Object:
    job = {"name": "node", "template": {"spec": {"template": {"spec": {"initContainers": list(inits)}}}}}
    return {
        "manager": f"lab.example/{manager}",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def test_the_view_is_what_the_trainer_makes(trainer_v23: ControlPlane, namespace: str) -> None:
    """C17.4: names, order, variables and mounts, with two patches that name some of them in another order."""
    runtime = runtime_with_inits()
    second = {"name": "D", "value": "new"}, {"name": "A", "value": "ours"}
    patches = [
        patch_of(
            "team",
            {"name": "third", "env": list(second)},
            {"name": "second", "volumeMounts": [{"name": "data", "mountPath": "/out"}]},
        ),
        patch_of("person", {"name": "first", "env": [{"name": "C", "value": "ours"}, {"name": "E", "value": "1"}]}),
    ]
    train = objects.train_job("run-7", "torch", runtimePatches=patches, suspend=True)
    trainer_v23.api.create(runtime, namespace)
    trainer_v23.api.create(train, namespace)
    made = trainer_v23.api.wait_for("jobsets", namespace, "run-7", lambda one: one is not None)
    (job,) = made["spec"]["replicatedJobs"]
    real = job["template"]["spec"]["template"]["spec"]["initContainers"]
    found = merged_manifest([runtime, train], "run-7")
    assert found.problems == ()
    (view,) = found.jobs
    assert [one.name for one in view.init] == [one["name"] for one in real]
    for mine, theirs in zip(view.init, real, strict=True):
        assert mine.image == theirs["image"]
        assert [(v.name, v.value) for v in mine.variables] == [(v["name"], v["value"]) for v in theirs["env"]]
        mounts = [(m["mountPath"], m["name"]) for m in theirs["volumeMounts"]]
        assert [(m.path, m.volume) for m in mine.mounts] == mounts


@pytest.mark.parametrize("release", ["trainer_v21", "trainer_v23"])
def test_the_api_server_knows_none_of_the_fields_that_are_named_as_absent(
    request: pytest.FixtureRequest, namespace: str, release: str
) -> None:
    """C5.2: `explain --manifest` names as absent exactly what the API server of each release names as unknown."""
    plane: ControlPlane = request.getfixturevalue(release)
    runtime = objects.training_runtime("torch", ttl=60)
    runtime["spec"]["ttlSecondsAfterFinished"] = 300
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["ttlSecondsAfterFinished"] = 5
    train = objects.train_job(
        "run-7",
        "torch",
        ttlSecondsAfterFinished=600,
        cleanupPolicy="All",
        jobRetentionPolicy="Keep",
        runPolicy={"ttlSecondsAfterFinished": 60},
    )
    named = {problem.partition(":")[0] for problem in merged_manifest([runtime, train], "run-7").problems}
    valid = {
        "spec.template.spec.ttlSecondsAfterFinished",
        "spec.template.spec.replicatedJobs[0].template.spec.ttlSecondsAfterFinished",
    }
    of_runtime = {one.partition(" of the ")[0] for one in named if " of the " in one}
    assert valid <= of_runtime
    assert unknown_fields(plane, namespace, "trainingruntimes", runtime) == of_runtime - valid
    of_train = {one for one in named if " of the " not in one}
    # Of a field that is absent the server names the field, and nothing below it.
    assert unknown_fields(plane, namespace, "trainjobs", train) == {
        one.replace("runPolicy.ttlSecondsAfterFinished", "runPolicy") for one in of_train
    }


def unknown_fields(plane: ControlPlane, namespace: str, plural: str, made: Object) -> set[str]:
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/{plural}"
    whole = {"apiVersion": "trainer.kubeflow.org/v1alpha1", **made}
    answer = plane.api.call("POST", path, whole, query={"fieldValidation": "Strict", "dryRun": "All"})
    assert answer.status == 400, answer.raw
    return set(re.findall(r'unknown field \\?"([^"\\]+)', answer.json["message"]))

"""The offline view of merged init containers against the JobSet that a real Trainer makes."""

from __future__ import annotations

import copy

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

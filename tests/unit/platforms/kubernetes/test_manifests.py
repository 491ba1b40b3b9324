"""What the init containers of a TrainJob will be, from files alone (C17.4)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.model.errors import UsageError
from gpukeeper.platforms.kubernetes.kinds.kubeflow import MergedTrainJob, merged_manifest

FILE = Path(__file__).with_name("trainjob.yaml")


def documents() -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(FILE))


def with_spec(**changes: Any) -> list[dict[str, Any]]:
    runtime, train = documents()
    spec = {"runtimeRef": {"name": "torch"}, **changes}
    return [runtime, {**train, "spec": spec}]


def told(found: MergedTrainJob, job: str = "node") -> dict[str, tuple[list[str], list[str]]]:
    (one,) = [one for one in found.jobs if one.name == job]
    return {
        init.name: (
            [f"{v.name}={v.value} {v.origin}" for v in init.variables],
            [f"{m.path} {m.volume} {m.origin}" for m in init.mounts],
        )
        for init in one.init
    }


PATCH = [{"name": "fetch", "env": [{"name": "DATASET", "value": "imagenet"}], "volumeMounts": []}]


def test_what_the_trainjob_says_is_laid_over_the_runtime() -> None:
    found = merged_manifest(documents(), "research/trainjob/run-7")
    assert (found.workload, found.runtime, found.problems) == ("run-7", "ClusterTrainingRuntime torch", ())
    assert told(found) == {
        "wait": ([], []),
        "fetch": (
            [
                "EPOCHS=3 TrainJob",
                "DATASET=imagenet TrainJob",
                "CACHE=/cache runtime",
                "TOKEN=(valueFrom) runtime",
            ],
            ["/data data TrainJob", "/cache cache runtime"],
        ),
    }
    assert told(found, "launcher") == {}
    assert [init.image for init in found.jobs[0].init] == ["busybox:1.36", "registry.lab/fetch:2"]


@pytest.mark.parametrize(
    "spec",
    [
        {"podSpecOverrides": [{"targetJobs": [{"name": "node"}], "initContainers": PATCH}]},
        {"podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": {"initContainers": PATCH}}]},
    ],
    ids=["v2.0", "v2.1"],
)
def test_the_fields_of_older_releases_count_alike(spec: dict[str, Any]) -> None:
    found = merged_manifest(with_spec(**spec), "run-7")
    assert found.problems == ()
    assert told(found)["fetch"][0] == [
        "DATASET=imagenet TrainJob",
        "CACHE=/cache runtime",
        "TOKEN=(valueFrom) runtime",
    ]


def test_without_a_patch_it_is_the_runtimes() -> None:
    assert {origin.rpartition(" ")[2] for origin in told(merged_manifest(with_spec(), "run-7"))["fetch"][0]} == {
        "runtime"
    }


def test_what_the_trainer_would_refuse_is_reported() -> None:
    other = [{"name": "extra", "env": []}]
    found = merged_manifest(
        with_spec(
            podSpecOverrides=[{"targetJobs": [{"name": "node"}, {"name": "nodes"}], "initContainers": other}],
            podTemplateOverrides=[{"targetJobs": [{"name": "node"}]}],
        ),
        "run-7",
    )
    assert list(told(found)) == ["wait", "fetch"], "nothing is added"
    assert len(found.problems) == 3
    assert "podSpecOverrides and podTemplateOverrides" in found.problems[0]
    assert "init container extra is not in job node" in found.problems[1]
    assert "job nodes is not in the runtime" in found.problems[2]
    assert [line for line in found.lines() if line.startswith("problem: ")]


def test_fields_that_are_no_ttl_of_a_trainjob_are_named() -> None:
    """C5.2: those that do not exist there, wherever they are written, and a deadline for running."""
    found = merged_manifest(
        with_spec(
            ttlSecondsAfterFinished=600,
            runPolicy={"ttlSecondsAfterFinished": 60, "cleanPodPolicy": "All"},
            cleanupPolicy={"ttl": 60},
            activeDeadlineSeconds=3600,
        ),
        "run-7",
    )
    named = [problem.partition(":")[0] for problem in found.problems]
    assert named == [
        "spec.ttlSecondsAfterFinished",
        "spec.cleanupPolicy",
        "spec.runPolicy.ttlSecondsAfterFinished",
        "spec.runPolicy.cleanPodPolicy",
        "spec.activeDeadlineSeconds",
    ]
    for problem in found.problems[:4]:
        assert (
            "no TrainJob up to v2.3 has this field, so it removes nothing; use the annotation gpukeeper.io/ttl"
            in problem
        )
    assert "is no TTL: it ends a TrainJob that runs longer" in found.problems[4]
    without_runtime = merged_manifest(with_spec(ttlSecondsAfterFinished=600)[1:], "run-7")
    assert "not found in these files" in without_runtime.problems[0]
    assert without_runtime.problems[1].startswith("spec.ttlSecondsAfterFinished: 600: ")


def test_a_ttl_in_the_runtime_is_at_the_wrong_level_wherever_it_is() -> None:
    """C5.2"""
    runtime, train = documents()
    jobset = runtime["spec"]["template"]["spec"]
    runtime["spec"]["ttlSecondsAfterFinished"] = 300
    jobset["ttlSecondsAfterFinished"] = 60
    jobset["replicatedJobs"][1]["template"]["spec"]["ttlSecondsAfterFinished"] = 5
    found = merged_manifest([runtime, train], "run-7")
    told_of = dict(problem.split(" of the ClusterTrainingRuntime: ") for problem in found.problems)
    assert list(told_of) == [
        "spec.ttlSecondsAfterFinished",
        "spec.template.spec.ttlSecondsAfterFinished",
        "spec.template.spec.replicatedJobs[1].template.spec.ttlSecondsAfterFinished",
    ]
    nowhere, of_the_jobset, of_a_step = told_of.values()
    assert nowhere.startswith(
        "300: a ClusterTrainingRuntime has no such field, so it removes nothing; use the annotation"
    )
    assert of_the_jobset.startswith("60: it removes the JobSet of each TrainJob, never the TrainJob; v2.1 then creates")
    assert of_a_step.startswith("5: it removes the Jobs of that step, also while other steps run")


def test_a_runtime_that_is_not_there_shows_how_to_get_it() -> None:
    found = merged_manifest(documents()[1:], "run-7")
    assert found.jobs == ()
    assert "kubectl get ClusterTrainingRuntime torch -o yaml" in found.problems[0]


def test_a_trainjob_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match=r"TrainJob run-9 not found in these files; found: run-7"):
        merged_manifest(documents(), "run-9")


def test_nothing_of_a_strange_manifest_breaks_it() -> None:
    """Each value in turn is another thing than it should be."""

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                for strange in (None, 7, "x", [], {}, [None], True):
                    yield {**value, key: strange}
                yield from ({**value, key: one} for one in spoiled(value[key]))
        elif isinstance(value, list):
            for number, one in enumerate(value):
                yield from ([*value[:number], other, *value[number + 1 :]] for other in spoiled(one))

    runtime, train = documents()
    many = 0
    for broken in spoiled({"runtime": runtime, "train": train}):
        many += 1
        try:
            given = copy.deepcopy([broken["runtime"], broken["train"]])
            found = merged_manifest([one for one in given if isinstance(one, dict)], "run-7")
        except UsageError:
            continue
        assert all(isinstance(line, str) for line in found.lines())
    assert many > 300

"""Labels of others: a forger may create objects, and must not change the report or the end of a run."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from gpukeeper.acceptance.fleet.launcher import Phase
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.clients.kubernetes.api import JOB_SETS, JOBS, PODS, SERVICES, TRAIN_JOBS, Resource
from gpukeeper.model.errors import PlatformError
from tests.unit.acceptance.kubernetes.clusters import add_pod, cluster, ended, launcher, run, spec
from tests.unit.clients.kubernetes.memory_api import MemoryApi

REAL, FORGED = b"the report\n", b"a forged report\n"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def started() -> tuple[MemoryApi, KubernetesLauncher]:
    api = cluster("a")
    made = launcher(api)
    run(made.start(spec(), run(made.targets(spec()))))
    (job,) = api.of(JOBS)
    add_pod(api, job, "real", node="a", phase="Succeeded", state=ended())
    api.logs[("default", "real", False)] = REAL
    return api, made


def forged_pod(api: MemoryApi, namespace: str = "default", **meta: Any) -> None:
    """It looks like a pod of the run, on the same node."""
    one = copy.deepcopy(next(one for one in api.of(PODS) if one["metadata"]["name"] == "real"))
    one["metadata"] = {**one["metadata"], "name": "forged", "uid": "", "namespace": namespace, **meta}
    one["status"]["containerStatuses"][0]["state"] = ended(4)
    api.add(PODS, one, namespace)
    api.logs[(namespace, "forged", False)] = FORGED


def copied(api: MemoryApi, namespace: str, **changes: Any) -> dict[str, Any]:
    """The Job with a description of the same run."""
    (job,) = api.of(JOBS)
    one = copy.deepcopy(job)
    annotations = {
        objects.OWNER_ANNOTATION: "ann",
        objects.SPEC_ANNOTATION: msgspec.json.encode(spec(**changes)).decode(),
    }
    meta = {"name": "copied", "labels": one["metadata"]["labels"], "annotations": annotations, "namespace": namespace}
    return api.add(JOBS, {**one, "metadata": meta}, namespace)


@pytest.mark.parametrize("same_owner", [True, False])
def test_a_pod_of_another_namespace_never_counts_and_never_goes(same_owner: bool) -> None:
    api, made = started()
    forged_pod(api, "mallory", **({} if same_owner else {"ownerReferences": []}))
    summary = run(made.run("r1"))
    assert summary is not None
    assert [(one.node, one.phase, one.exit_code) for one in summary.nodes] == [("a", Phase.ENDED, 0)]
    assert run(made.output(spec(), "a")) == REAL
    assert run(launcher(api).output(spec(), "a")) == REAL, "also without a status before"
    removal = run(made.remove("r1"))
    assert (removal.removed, removal.left) == ((f"job/{objects.name_of('r1', 'a')}",), ())
    assert [one["metadata"]["namespace"] for one in api.of(PODS)] == ["mallory"]


def test_a_pod_that_no_object_of_the_run_controls_is_no_report_and_is_kept_and_named() -> None:
    api, made = started()
    forged_pod(api, ownerReferences=[])
    assert run(made.output(spec(), "a")) == REAL
    summary = run(made.run("r1"))
    assert summary is not None
    assert summary.nodes[0].exit_code == 0
    removal = run(made.remove("r1"))
    assert removal.removed == (f"job/{objects.name_of('r1', 'a')}",)
    assert [name for name, why in removal.left if why.endswith("it was kept")] == ["pod/forged"]
    assert [one["metadata"]["name"] for one in api.of(PODS)] == ["forged"]


def test_a_pod_of_a_controller_that_only_has_the_label_is_no_report() -> None:
    api, made = started()
    labels = {objects.ACCEPTANCE_LABEL: "run", objects.RUN_LABEL: "r1"}
    other = api.add(JOBS, {"metadata": {"name": "other", "labels": labels}})
    owner = {"kind": "Job", "name": "other", "uid": other["metadata"]["uid"], "controller": True}
    forged_pod(api, ownerReferences=[owner])
    assert run(made.output(spec(), "a")) == REAL
    removal = run(made.remove("r1"))
    assert [name for name, _ in removal.left] == ["job/other"]
    assert [one["metadata"]["name"] for one in api.of(PODS)] == ["forged"]


@pytest.mark.parametrize("namespace", ["mallory", "default"])
def test_an_old_date_in_a_description_ends_no_run_early(namespace: str) -> None:
    api, made = started()
    copied(api, namespace, created=LONG_AGO, deadline_s=1.0, nodes=("a", "b", "c"))
    runs = run(made.runs())
    assert isinstance(runs, tuple)
    (found,) = runs
    assert found.spec == spec(form="job")
    assert not story.is_over(found, spec().created)


def test_a_description_is_not_older_than_its_object() -> None:
    """As with examples that are applied long after they were written."""
    api = cluster("a")
    made, old = launcher(api), spec(created=LONG_AGO)
    run(made.start(old, run(made.targets(old))))
    found = run(made.run("r1"))
    assert found is not None
    assert found.spec.created == datetime(2026, 1, 5, 10, tzinfo=UTC)


def test_a_run_of_the_same_id_in_another_namespace_is_another_run() -> None:
    api, made = started()
    other = launcher(api, namespace="lab")
    run(other.start(spec(), run(other.targets(spec()))))
    run(made.remove("r1"))
    assert [one["metadata"]["namespace"] for one in api.of(JOBS)] == ["lab"]
    assert run(other.run("r1")) is not None


def test_pods_of_a_controller_of_a_controller_count() -> None:
    api = cluster("a", "b")
    made, wanted = launcher(api), spec(form="trainjob")
    run(made.start(wanted, run(made.targets(wanted))))
    (root,) = api.of(TRAIN_JOBS)
    labels = objects.labels(spec(form="trainjob"))

    def below(resource: Resource, parent: Resource, name: str, owner: dict[str, Any]) -> dict[str, Any]:
        reference = {"kind": parent.kind, "name": name, "uid": owner["metadata"]["uid"], "controller": True}
        return api.add(resource, {"metadata": {"name": name, "labels": labels, "ownerReferences": [reference]}})

    job = below(JOBS, JOB_SETS, "job", below(JOB_SETS, TRAIN_JOBS, "set", root))
    for node in ("a", "b"):
        template = {"metadata": {"labels": labels}, "spec": {}}
        add_pod(api, job, f"p-{node}", node=node, phase="Succeeded", state=ended(), template=template)
    summary = run(made.run("r1"))
    assert summary is not None
    assert [(one.node, one.phase) for one in summary.nodes] == [("a", Phase.ENDED), ("b", Phase.ENDED)]
    assert not run(made.remove("r1")).left
    assert not [one for one in api.objects if one[0] != "nodes"]


@pytest.mark.parametrize("described", [False, True])
def test_an_object_of_the_name_with_only_the_label_is_not_taken_over(described: bool) -> None:
    api = cluster("a")
    labels = objects.labels(spec())
    about = (
        {"annotations": {objects.SPEC_ANNOTATION: msgspec.json.encode(spec(run="r2")).decode()}} if described else {}
    )
    api.add(JOBS, {"metadata": {"name": objects.name_of("r1", "a"), "labels": labels, **about}})
    made = launcher(api)
    with pytest.raises(PlatformError, match="is not one of run r1"):
        run(made.start(spec(), run(made.targets(spec()))))
    assert not run(made.remove("r1")).removed
    assert len(api.of(JOBS)) == 1


def test_a_service_with_only_the_label_is_kept() -> None:
    api, made = started()
    api.add(SERVICES, {"metadata": {"name": "web", "labels": objects.labels(spec())}})
    assert [name for name, _ in run(made.remove("r1")).left] == ["service/web"]
    assert len(api.of(SERVICES)) == 1

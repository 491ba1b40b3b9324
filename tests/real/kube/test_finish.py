"""What ended goes at its time, as a whole, from the root; never sooner, and never a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gpukeeper.config.load import load_text
from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.event import Complaint
from tests.real.kube import objects
from tests.real.kube.api import Object, condition
from tests.real.kube.control_plane import ControlPlane, control_plane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import (
    CHAIN,
    FAILS,
    HOLDERS,
    SUCCEEDS,
    V1_REPLICAS,
    annotated,
    end_ray_job,
    finish,
    labelled,
    left,
    marked,
    passes,
    ray_job,
    reclaimed,
    the_end,
    uid,
    v1_job,
)

pytestmark = pytest.mark.usefixtures("kwok_node")
GOOD, BAD = "good", "bad"
EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes"
Make = Callable[..., Object]


def ended_at(plane: ControlPlane, what: str, namespace: str, good: str, bad: str) -> None:
    """Both runs are over, by their controller's own word."""
    plane.api.wait_condition(what, namespace, GOOD, good)
    plane.api.wait_condition(what, namespace, BAD, bad)


def of_good(plane: ControlPlane, namespace: str, *holders: str) -> set[str]:
    """What the garbage collector has still to remove below the run that succeeded."""
    there = left(plane.api, namespace, *holders)
    return {name for names in there.values() for name in names if name.startswith(GOOD)}


def goes_in_two_steps(plane: ControlPlane, namespace: str, kind: str, *holders: str) -> None:
    """What succeeded goes after an hour, what failed after two, each with all that it has."""
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    both = {f"{kind}/{GOOD}", f"{kind}/{BAD}"}
    assert set(harness.subjects()) == both, "the roots, and nothing below them"
    harness.later(minutes=59)
    assert passes(harness) == []
    harness.later(minutes=2)
    assert reclaimed(passes(harness)) == {f"{kind}/{GOOD}": Action.REMOVE}
    plane.until(lambda: not of_good(plane, namespace, *holders), "nothing of it is left")
    assert set(harness.subjects()) == {f"{kind}/{BAD}"}
    harness.later(minutes=57)
    assert passes(harness) == []
    harness.later(minutes=2)
    assert reclaimed(passes(harness)) == {f"{kind}/{BAD}": Action.REMOVE}
    plane.until(lambda: not left(plane.api, namespace, *holders), "nothing is left")


# Each kind, both ends.


@pytest.mark.smoke
def test_finished_jobs_go_with_their_pods(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job(GOOD, annotations=SUCCEEDS, parallelism=2), namespace)
    plane.api.create(objects.job(BAD, annotations=FAILS), namespace)
    ended_at(plane, "jobs", namespace, "Complete", "Failed")
    goes_in_two_steps(plane, namespace, "job", *HOLDERS)


@pytest.mark.smoke
def test_finished_bare_pods_go(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.pod(GOOD, annotations=SUCCEEDS), namespace)
    plane.api.create(objects.pod(BAD, annotations=FAILS), namespace)
    plane.api.wait_pods(namespace, 1, phase="Succeeded")
    plane.api.wait_pods(namespace, 1, phase="Failed")
    goes_in_two_steps(plane, namespace, "pod", "pods")


def test_finished_jobsets_go_with_their_jobs(jobset: ControlPlane, namespace: str) -> None:
    jobset.api.create(objects.jobset(GOOD, replicas=2, annotations=SUCCEEDS), namespace)
    jobset.api.create(objects.jobset(BAD, annotations=FAILS), namespace)
    ended_at(jobset, "jobsets", namespace, "Completed", "Failed")
    goes_in_two_steps(jobset, namespace, "jobset", "jobsets", *HOLDERS)


@pytest.mark.parametrize("kind", V1_REPLICAS)
def test_finished_jobs_of_the_training_operator_go(
    training_operator: ControlPlane, namespace: str, kwok_node: str, kind: str
) -> None:
    plural = f"{kind.lower()}s"
    room = {"status": {"capacity": {"ephemeral-storage": "1Ti"}, "allocatable": {"ephemeral-storage": "1Ti"}}}
    training_operator.api.patch("nodes", None, kwok_node, room, subresource="status")  # an MPI launcher asks for it
    training_operator.api.create(v1_job(kind, GOOD, annotations=SUCCEEDS), namespace)
    training_operator.api.create(v1_job(kind, BAD, annotations=FAILS), namespace)
    ended_at(training_operator, plural, namespace, "Succeeded", "Failed")
    if kind == "MPIJob":
        finish(training_operator, namespace, 2)
    goes_in_two_steps(training_operator, namespace, kind.lower(), plural, "services", *HOLDERS)


def test_finished_rayjobs_go_with_their_clusters(kuberay: ControlPlane, namespace: str) -> None:
    """Their clusters run on, so that people are warned before."""
    api = kuberay.api
    for name in (GOOD, BAD):
        api.create(ray_job(name), namespace)
    api.wait_pods(namespace, 4, labels="ray.io/cluster")  # not those that submit
    end_ray_job(api, namespace, GOOD)
    end_ray_job(api, namespace, BAD, failed=True)
    harness = Harness(kuberay.keeper_kubeconfig(), namespace)
    assert set(harness.subjects()) == {f"rayjob/{GOOD}", f"rayjob/{BAD}"}
    for minutes, name in ((61, GOOD), (60, BAD)):
        harness.later(minutes=minutes)
        first = harness.again()
        assert [line.ref and line.ref.name for line in first.warnings] == [name]
        assert first.outcomes == []
        assert uid(api, "rayjobs", namespace, name)
        assert reclaimed(passes(harness)) == {f"rayjob/{name}": Action.REMOVE}
        assert uid(api, "rayjobs", namespace, name) is None
    kuberay.until(lambda: not left(api, namespace, "rayjobs", "rayclusters", *HOLDERS), "nothing is left", 120)


@pytest.mark.parametrize("release", ["trainer-v2.1.0", "trainer-v2.3.0"])
def test_finished_trainjobs_go_as_a_whole(plane: ControlPlane, namespace: str, release: str) -> None:
    """C5.5"""
    plane.need(release)
    for name, ends in ((GOOD, SUCCEEDS), (BAD, FAILS)):
        plane.api.create(objects.training_runtime(name, annotations=ends), namespace)
        plane.api.create(objects.train_job(name, name), namespace)
    ended_at(plane, "trainjobs", namespace, "Complete", "Failed")
    goes_in_two_steps(plane, namespace, "trainjob", *CHAIN)


def test_a_failed_trainjob_goes_after_an_hour_in_every_namespace_in_scope(
    trainer_v23: ControlPlane, new_namespace: Callable[[], str]
) -> None:
    """C6.7: with the policy of the CronJob in the examples, except for its scope. One that is not in scope stays."""
    api, first, second, outside = trainer_v23.api, new_namespace(), new_namespace(), new_namespace()
    for place in (first, second, outside):
        api.create(objects.training_runtime("torch", annotations=FAILS), place)
        api.create(objects.train_job(BAD, "torch"), place)
    for place in (first, second, outside):
        api.wait_condition("trainjobs", place, BAD, "Failed")
    shipped = load_text(policy_of_the_cron_job()).policy.retention
    assert shipped.failed == timedelta(minutes=60)
    harness = Harness(trainer_v23.keeper_kubeconfig(), first, second, retention={"failed": "60m"})
    harness.later(minutes=58)
    assert passes(harness) == []
    harness.later(minutes=3)
    gone = passes(harness)
    assert {(line.ref.namespace, line.ref.name) for line in gone if line.ref} == {(first, BAD), (second, BAD)}
    assert {(line.action, line.result) for line in gone} == {(Action.REMOVE, Result.RECLAIMED)}
    for place in (first, second):
        trainer_v23.until(lambda place=place: not left(api, place, *CHAIN), "nothing of it is left")
    assert api.names("trainjobs", outside) == {BAD}


def policy_of_the_cron_job() -> str:
    with (EXAMPLES / "cronjob.yaml").open() as file:
        made = [one for one in YAML(typ="safe").load_all(file) if one["kind"] == "ConfigMap"]
    return str(made[0]["data"]["policy.yaml"])


@pytest.fixture
def kubeflow_system(plane: ControlPlane) -> Iterator[str]:
    plane.api.apply({"kind": "Namespace", "metadata": {"name": "kubeflow-system"}})
    yield "kubeflow-system"
    plane.drop_namespace("kubeflow-system")


def test_kubeflow_system_is_a_namespace_like_others(trainer_v23: ControlPlane, kubeflow_system: str) -> None:
    """TrainJobs there are work; what carries our own name is not, wherever it is."""
    api = trainer_v23.api
    api.create(objects.training_runtime("torch", annotations=SUCCEEDS), kubeflow_system)
    api.create(objects.train_job(GOOD, "torch"), kubeflow_system)
    ours = labelled(objects.job("ours", annotations=SUCCEEDS), {"app.kubernetes.io/name": "gpukeeper"})
    api.create(ours, kubeflow_system)
    api.wait_condition("trainjobs", kubeflow_system, GOOD, "Complete")
    api.wait_condition("jobs", kubeflow_system, "ours", "Complete")
    harness = Harness(trainer_v23.keeper_kubeconfig(), kubeflow_system)
    harness.later(days=3)
    assert reclaimed(passes(harness)) == {f"trainjob/{GOOD}": Action.REMOVE}
    trainer_v23.until(lambda: left(api, kubeflow_system, *CHAIN).keys() == {"jobs", "pods"}, "ours is left")
    assert api.names("jobs", kubeflow_system) == {"ours"}


def test_what_a_trainjob_owns_is_neither_target_nor_subject(trainer_v23: ControlPlane, namespace: str) -> None:
    """C5.5. Its JobSet and Job are Completed, too; and deleting them would train again."""
    api = trainer_v23.api
    api.create(objects.training_runtime("torch", annotations=SUCCEEDS), namespace)
    api.create(objects.train_job("run", "torch"), namespace)
    api.wait_condition("trainjobs", namespace, "run", "Complete")
    assert condition(api.get("jobsets", namespace, "run"), "Completed") == "True"
    before = {what: uid(api, what, namespace, *api.names(what, namespace)) for what in CHAIN}
    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, retention={"succeeded": "manual", "failed": "manual"})
    harness.later(days=400)
    assert list(harness.subjects()) == ["trainjob/run"]
    assert passes(harness) == []
    assert {what: uid(api, what, namespace, *api.names(what, namespace)) for what in CHAIN} == before


# Acceptance runs of before: sets that never end by themselves.


def old_set(kind: str, name: str) -> Object:
    made = objects.template(labels={"app": "gpu-accept-ddp", "set": name}, restart="Always")
    spec: Object = {"selector": {"matchLabels": {"set": name}}, "template": made}
    spec |= {"serviceName": name, "replicas": 2} if kind == "StatefulSet" else {}
    return {"kind": kind, "metadata": {"name": name, "labels": {"app": "gpu-accept-ddp"}}, "spec": spec}


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_a_set_of_an_old_acceptance_run_goes_by_label_and_age(plane: ControlPlane, namespace: str, kind: str) -> None:
    """C6.8. After a day it counts as stopped; and a set of the same age without the label is left alone."""
    api, plural = plane.api, f"{kind.lower()}s"
    api.create(old_set(kind, "old"), namespace)
    service = old_set(kind, "service")
    del service["metadata"]["labels"]
    api.create(service, namespace)
    plane.until(lambda: len(api.list("pods", namespace, labels="set=old")) >= 1, "its pods are there")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(hours=24.9)
    assert passes(harness) == [], "an hour of retention after the day is not over"
    harness.later(minutes=10)
    report = harness.again()
    assert report.outcomes == []
    assert len(report.warnings) == 1, "its pods run, so there is a warning before"
    assert reclaimed(passes(harness)) == {f"{kind.lower()}/old": Action.REMOVE}
    plane.until(lambda: not api.list("pods", namespace, labels="set=old"), "its pods are gone")
    assert api.names(plural, namespace) == {"service"}
    assert api.list("pods", namespace, labels="set=service")


def test_the_recorded_end_of_an_acceptance_run_counts_before_its_age(plane: ControlPlane, namespace: str) -> None:
    now = datetime.now(UTC).isoformat()
    plane.api.create(annotated(old_set("StatefulSet", "old"), {"gpukeeper.io/run-ended": now}), namespace)
    plane.api.wait_pods(namespace, 2)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(minutes=62)
    assert reclaimed(passes(harness)) == {"statefulset/old": Action.REMOVE}
    plane.until(lambda: not left(plane.api, namespace, "statefulsets", "pods"), "nothing is left")


# When: what the namespace, the workload and other tools say.


def finished_job(plane: ControlPlane, namespace: str, made: Object | None = None) -> None:
    made = made or objects.job("train")
    made["spec"]["template"]["metadata"]["annotations"] |= SUCCEEDS
    plane.api.create(made, namespace)
    plane.api.wait_condition("jobs", namespace, made["metadata"]["name"], "Complete")


@pytest.mark.parametrize(("environment", "hours"), [("ci", 0.1), ("production", 49), (None, 1.1)])
def test_the_label_of_a_namespace_shows_which_retention(
    plane: ControlPlane, namespace: str, environment: str | None, hours: float
) -> None:
    """C5.1"""
    if environment:
        plane.api.patch(
            "namespaces", None, namespace, {"metadata": {"labels": {"gpukeeper.io/environment": environment}}}
        )
    finished_job(plane, namespace)
    environments = {"ci": {"succeeded": "5m", "failed": "1h"}, "production": {"succeeded": "2d", "failed": "3d"}}
    harness = Harness(plane.keeper_kubeconfig(), namespace, environments=environments)
    harness.later(hours=hours * 0.8)
    assert passes(harness) == []
    harness.later(hours=hours * 0.2)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}
    plane.until(lambda: not left(plane.api, namespace, *HOLDERS), "nothing is left")


@pytest.mark.parametrize(("ttl", "before", "after"), [("10m", 9, 11), ("3h", 179, 181)])
def test_a_workload_says_its_own_ttl(
    plane: ControlPlane, namespace: str, ttl: str, before: float, after: float
) -> None:
    """C5.2. Shorter or longer than the policy's hour."""
    finished_job(plane, namespace, marked(objects.job("train"), ttl=ttl))
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(minutes=before)
    assert passes(harness) == []
    harness.later(minutes=after - before)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}
    plane.until(lambda: not left(plane.api, namespace, *HOLDERS), "nothing is left")


def test_a_hold_on_the_object_keeps_it_until_then(plane: ControlPlane, namespace: str) -> None:
    until = (datetime.now(UTC) + timedelta(hours=5)).isoformat()
    finished_job(plane, namespace, marked(objects.job("train"), hold_until=until))
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(hours=4.9)
    assert passes(harness) == []
    assert harness.decisions()["job/train"].rule == "hold"
    harness.later(hours=0.2)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}


@pytest.mark.parametrize(
    ("said", "days"), [({"ttl": "10 parsecs"}, 100), ({"ttl": "-5m"}, 100), ({"hold_until": "tomorrow"}, 29)]
)
def test_a_mark_that_cannot_be_read_keeps_and_complains(
    plane: ControlPlane, namespace: str, said: dict[str, str], days: int
) -> None:
    """A hold that cannot be read ends with retention.max, 30 days after the end."""
    finished_job(plane, namespace, marked(objects.job("train"), **said))
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(days=days)
    assert passes(harness) == []
    assert uid(plane.api, "jobs", namespace, "train")
    complaints = [line.what for line in harness.ledger.lines if isinstance(line, Complaint)]
    assert len(complaints) == 1, complaints
    assert next(iter(said.values())) in complaints[0]
    assert harness.decisions()["job/train"].verdict is Verdict.UNKNOWN
    if "hold_until" in said:
        harness.later(days=2)
        assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}


def test_the_ttl_of_another_tool_counts_only_where_the_policy_names_it(plane: ControlPlane, namespace: str) -> None:
    finished_job(plane, namespace, annotated(objects.job("train"), {"janitor/ttl": "5m"}))
    deaf = Harness(plane.keeper_kubeconfig(), namespace)
    deaf.later(minutes=30)
    assert passes(deaf) == []
    harness = Harness(plane.keeper_kubeconfig(), namespace, ttl={"foreign": ["janitor/ttl"]})
    harness.later(minutes=4)
    assert passes(harness) == []
    harness.later(minutes=2)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}
    plane.until(lambda: not left(plane.api, namespace, *HOLDERS), "nothing is left")


def test_a_ttl_that_kubernetes_itself_keeps_is_left_to_it(plane: ControlPlane, namespace: str) -> None:
    """C5.2"""
    finished_job(plane, namespace, objects.job("train", ttl=3))
    harness = Harness(plane.keeper_kubeconfig(), namespace, retention={"succeeded": "0s"})
    decision = harness.decisions()["job/train"]
    assert (decision.rule, decision.verdict) == ("own_ttl", Verdict.WAIT)
    assert passes(harness) == []
    plane.api.wait_gone("jobs", namespace, "train")
    assert passes(harness) == []
    assert harness.outcomes() == [], "nothing of that was ours"


def test_a_ttl_that_kubernetes_does_not_keep_is_kept_a_minute_later(plane: ControlPlane, namespace: str) -> None:
    finished_job(plane, namespace, objects.job("train", ttl=600))
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(minutes=10.5)
    assert passes(harness) == []
    harness.later(minutes=1)
    line = the_end(passes(harness))
    assert line.result is Result.RECLAIMED
    assert "the platform has not removed it" in line.reason
    plane.until(lambda: not left(plane.api, namespace, *HOLDERS), "nothing is left")


# What is not a finished root.


def test_a_finished_job_goes_and_its_cronjob_stays(plane: ControlPlane, namespace: str) -> None:
    inner = objects.job("unused", annotations=SUCCEEDS)["spec"]
    spec = {"schedule": "0 0 1 1 *", "suspend": True, "jobTemplate": {"spec": inner}}
    cron = plane.api.create({"kind": "CronJob", "metadata": {"name": "nightly"}, "spec": spec}, namespace)
    reference = {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": cron["metadata"]["uid"]}
    run = objects.job("nightly-1")
    run["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
    finished_job(plane, namespace, run)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(minutes=61)
    assert reclaimed(passes(harness)) == {"job/nightly-1": Action.REMOVE}
    plane.until(
        lambda: left(plane.api, namespace, "cronjobs", *HOLDERS) == {"cronjobs": {"nightly"}}, "only the CronJob"
    )


def test_a_job_that_succeeded_after_a_failure_succeeded(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job("train", backoff=3), namespace)
    finish(plane, namespace, exit_code=1)
    finish(plane, namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")
    assert (plane.api.get("jobs", namespace, "train") or {})["status"]["failed"] == 1
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(minutes=61)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}


def test_running_work_is_never_touched(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job("train", parallelism=2), namespace)
    plane.api.create(objects.pod("alone"), namespace)
    before = {pod["metadata"]["uid"] for pod in plane.api.wait_pods(namespace, 3)}
    harness = Harness(
        plane.keeper_kubeconfig(), namespace, retention={"succeeded": "0s", "failed": "0s", "stopped": "0s"}
    )
    harness.later(days=365)
    assert passes(harness) == []
    assert {pod["metadata"]["uid"] for pod in plane.api.wait_pods(namespace, 3)} == before


def test_one_name_in_two_namespaces_and_of_two_kinds(
    jobset: ControlPlane, namespace: str, new_namespace: Callable[[], str]
) -> None:
    """Only what ended goes, of exactly that kind and namespace."""
    api, other = jobset.api, new_namespace()
    api.create(objects.job("train"), other)
    api.create(objects.jobset("train"), namespace)
    api.create(objects.pod("train"), namespace)
    api.wait_pods(other, 1)
    api.wait_pods(namespace, 2)
    finished_job(jobset, namespace)
    read = [
        partial(uid, api, what, place, "train")
        for what, place in (("jobs", other), ("jobsets", namespace), ("pods", namespace))
    ]
    before = [one() for one in read]
    harness = Harness(jobset.keeper_kubeconfig(), namespace, other)
    harness.later(minutes=61)
    line = the_end(passes(harness))
    assert line.ref is not None
    assert (line.ref.kind, line.ref.namespace, line.ref.name) == ("job", namespace, "train")
    assert uid(api, "jobs", namespace, "train") is None
    assert [one() for one in read] == before
    api.wait_pods(namespace, 2)
    api.wait_pods(other, 1)


def test_kinds_that_are_not_installed_are_absent() -> None:
    """A cluster without any of the training kinds is whole: nothing in it is unseen."""
    with control_plane() as bare:
        bare.gpu_node("n1")
        namespace = bare.new_namespace()
        finished_job(bare, namespace)
        harness = Harness(bare.keeper_kubeconfig(), namespace)
        harness.later(minutes=61)
        report = harness.again()
        assert report.survey.unseen == []
        assert reclaimed([*report.outcomes, *passes(harness)]) == {"job/train": Action.REMOVE}
        bare.until(lambda: not left(bare.api, namespace, *HOLDERS), "nothing is left")

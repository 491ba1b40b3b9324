"""With few rights: what may not be read is unseen, never empty; what may not be done is refused by its name; what is
granted later counts at the next pass. Roles only, as in a namespace of somebody else's cluster.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.reclaim import look_and_plan
from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.event import Passed, Vanished
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from tests import forked
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import ended_pod, unplaced
from tests.real.kube.harness import Harness, policy
from tests.real.kube.runs import passes, reclaimed

Rule = dict[str, Any]
SEE: list[Rule] = [
    {"resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list", "watch"]},
    {
        "apiGroups": ["apps"],
        "resources": ["deployments", "statefulsets", "replicasets", "daemonsets"],
        "verbs": ["get", "list", "watch"],
    },
    *(
        {"apiGroups": [group], "resources": ["*"], "verbs": ["get", "list", "watch"]}
        for group in ("jobset.x-k8s.io", "trainer.kubeflow.org", "kubeflow.org", "ray.io")
    ),
]
NAMESPACE: Rule = {"resources": ["namespaces"], "verbs": ["get"]}
EVIDENCE: list[Rule] = [
    {"resources": ["pods/log"], "verbs": ["get"]},
    {"resources": ["events"], "verbs": ["list", "create"]},
]
REMOVE: list[Rule] = [
    {"resources": ["pods"], "verbs": ["delete"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["delete"]},
]
ALL = [*SEE, NAMESPACE, *EVIDENCE, *REMOVE]
AT_ONCE = {"cluster": {"grace": "0s"}}


def without(rules: list[Rule], resource: str, *verbs: str) -> list[Rule]:
    """The same rules but for these verbs (all of them: none named) of a resource."""
    left = []
    for rule in rules:
        if resource in rule["resources"]:
            kept = [verb for verb in rule["verbs"] if verbs and verb not in verbs]
            others = [one for one in rule["resources"] if one != resource]
            left += [{**rule, "resources": others}] if others else []
            left += [{**rule, "resources": [resource], "verbs": kept}] if kept else []
        else:
            left.append(rule)
    return left


def bench_of(plane: ControlPlane, user: str, *namespaces: str, **more: Any) -> Harness:
    return Harness(plane.kubeconfig(user), *namespaces, classes=AT_ONCE, **more)


def finished_job(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job("train", annotations={"test/exit-code": "0"}), namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")


def unseen(harness: Harness) -> dict[str, str]:
    (*_, last) = [line for line in harness.ledger.lines if isinstance(line, Passed)]
    return dict(one.split(": ", 1) for one in last.unseen)


@pytest.mark.smoke
def test_in_its_namespace_it_works_and_sees_nothing_else(
    plane: ControlPlane, namespace: str, new_namespace: Callable[..., str]
) -> None:
    other = new_namespace("other")
    for where in (namespace, other):
        ended_pod(plane.api, where, "run")
    harness = bench_of(plane, plane.new_user(ALL, namespace=namespace), namespace)
    harness.later(minutes=61)
    assert set(harness.subjects()) == {"pod/run"}
    assert {one.ref.namespace for one in harness.subjects().values()} == {namespace}
    report = harness.again()
    assert ([one.result for one in report.outcomes], report.survey.unseen) == ([Result.RECLAIMED], [])
    assert plane.api.names("pods", namespace) == set()
    assert plane.api.names("pods", other) == {"run"}


def test_a_namespace_that_may_not_be_listed_is_unseen_and_never_empty(
    plane: ControlPlane, namespace: str, new_namespace: Callable[..., str]
) -> None:
    """The right is taken away while gpukeeper knows what was there: nothing of it vanishes, nothing is removed."""
    other = new_namespace("other")
    user = plane.new_user(ALL, namespace=namespace)
    right = plane.grant(user, ALL, namespace=other)
    ended_pod(plane.api, namespace, "run")
    for number in range(3):
        ended_pod(plane.api, other, f"run-{number}")
    harness = bench_of(plane, user, namespace, other)
    assert harness.again().survey.counts.seen == 4
    plane.revoke(right, namespace=other)
    plane.until(lambda: not plane.api_as(user).call("GET", f"/api/v1/namespaces/{other}/pods").ok, "the right is gone")
    harness.later(minutes=61)
    report = harness.again()
    assert [one.result for one in report.outcomes] == [Result.RECLAIMED], "its own namespace goes on"
    assert f"pods in {other}" in unseen(harness)
    assert f"jobs in {other}" in unseen(harness)
    assert "cannot list resource" in unseen(harness)[f"pods in {other}"]
    assert (report.survey.missing, report.survey.counts.vanished) == ([], 0)
    assert not [line for line in harness.ledger.lines if isinstance(line, Vanished)]
    assert len(harness.run(harness.ledger.present("kubernetes", harness.platform.place))) == 3
    assert plane.api.names("pods", other) == {"run-0", "run-1", "run-2"}
    plane.grant(user, ALL, namespace=other)
    plane.until(lambda: plane.api_as(user).call("GET", f"/api/v1/namespaces/{other}/pods").ok, "the right is back")
    assert len(harness.again().reclaimed) == 3


def test_a_list_of_all_namespaces_that_may_not_be_made_is_unseen(plane: ControlPlane, namespace: str) -> None:
    """Patterns need the whole cluster's list; with Roles only there is none, and that is said."""
    ended_pod(plane.api, namespace, "run")
    harness = bench_of(plane, plane.new_user(ALL, namespace=namespace), f"{namespace}*")
    harness.later(minutes=61)
    report = harness.again()
    assert (report.survey.counts.seen, report.outcomes) == (0, [])
    assert "pods" in unseen(harness)
    assert plane.api.names("pods", namespace) == {"run"}


@pytest.mark.usefixtures("kwok_node")
def test_without_a_right_on_pods_no_root_goes(plane: ControlPlane, namespace: str) -> None:
    """Whether something lives below it cannot be known then."""
    finished_job(plane, namespace)
    user = plane.new_user(without(ALL, "pods"), namespace=namespace)
    harness = bench_of(plane, user, namespace)
    harness.later(days=5)
    report = harness.again()
    assert report.outcomes == []
    assert list(unseen(harness)) == [f"pods in {namespace}"]
    found = harness.run(look_and_plan(harness.keeper, harness.platform, harness.book)).survey.decisions
    (said,) = [one for one in found if one.seen.ref.kind == "job"]
    assert (said.action, said.verdict) == (Action.KEEP, Verdict.UNKNOWN)
    assert "whether its children still run is unknown" in said.reason
    looked = harness.run(harness.platform.read(said.seen.ref))
    assert isinstance(looked, Subject)
    assert isinstance(looked.live_children, Unknown)
    plane.grant(user, [SEE[0]], namespace=namespace)
    plane.until(lambda: plane.api_as(user).call("GET", f"/api/v1/namespaces/{namespace}/pods").ok, "the right is there")
    assert len(harness.again().reclaimed) == 1
    assert plane.api.list("jobs", namespace) == []
    plane.until(lambda: plane.api.list("pods", namespace) == [], "the garbage collector removed the pods")


@pytest.mark.usefixtures("kwok_node")
def test_without_the_right_to_delete_it_is_refused_by_name(plane: ControlPlane, namespace: str) -> None:
    finished_job(plane, namespace)
    ended_pod(plane.api, namespace, "run")
    user = plane.new_user(without(ALL, "jobs", "delete"), namespace=namespace)
    harness = bench_of(plane, user, namespace)
    harness.later(minutes=61)
    report = harness.again()
    found = {one.ref.kind: one for one in report.outcomes if one.ref is not None}
    assert (found["job"].result, found["pod"].result) == (Result.REFUSED, Result.RECLAIMED)
    assert f"gpukeeper may not delete jobs.batch in namespace {namespace}" in found["job"].reason
    assert plane.api.names("jobs", namespace) == {"train"}
    plane.grant(user, REMOVE, namespace=namespace)
    trial = {"apiVersion": "batch/v1", "kind": "DeleteOptions", "dryRun": ["All"]}  # a query is ignored beside a body
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/train"
    plane.until(lambda: plane.api_as(user).call("DELETE", path, trial).ok, "the right to delete is there")
    harness.later(minutes=21)  # what was refused is not tried again at once
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}
    assert plane.api.list("jobs", namespace) == []


@pytest.mark.usefixtures("kwok_node")
def test_without_a_right_on_logs_it_is_kept(plane: ControlPlane, namespace: str) -> None:
    """C5.4. Nobody gets a log back."""
    finished_job(plane, namespace)
    user = plane.new_user(without(ALL, "pods/log"), namespace=namespace)
    harness = bench_of(plane, user, namespace)
    harness.later(minutes=61)
    (closed,) = harness.again().outcomes
    assert closed.result is Result.NOT_CAPTURED
    assert 'cannot get resource "pods/log"' in closed.reason
    assert plane.api.names("jobs", namespace) == {"train"}
    assert harness.cluster.asked["DELETE"] == 0
    plane.grant(user, EVIDENCE, namespace=namespace)
    (pod,) = plane.api.names("pods", namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
    plane.until(lambda: plane.api_as(user).call("GET", path).ok, "the right is there")
    harness.later(minutes=21)
    assert len(harness.again().reclaimed) == 1


def test_without_a_right_on_events_its_evidence_reports_it(plane: ControlPlane, namespace: str) -> None:
    """The cluster forgets them after an hour: no reason to keep."""
    ended_pod(plane.api, namespace, "run")
    harness = bench_of(plane, plane.new_user(without(ALL, "events"), namespace=namespace), namespace)
    harness.later(minutes=61)
    assert len(harness.again().reclaimed) == 1
    (saved,) = harness.evidence.saved.values()
    assert b"cannot list resource" in saved.files["events.json"], list(saved.files)


def test_without_a_right_on_its_namespace_only_what_that_says_is_unknown(plane: ControlPlane, namespace: str) -> None:
    """Nobody's environment is known then; where a policy tells environments apart, that keeps."""
    ended_pod(plane.api, namespace, "run")
    user = plane.new_user(without(ALL, "namespaces"), namespace=namespace)
    other = {"production": {"succeeded": "20d", "failed": "30d"}}
    harness = bench_of(plane, user, namespace, environments=other)
    harness.later(minutes=61)
    subject = harness.subjects()["pod/run"]
    assert isinstance(subject.environment, Unknown)
    assert isinstance(subject.owner, Unknown)
    assert harness.again().outcomes == []
    assert harness.decisions()["pod/run"].verdict is Verdict.UNKNOWN
    plain = bench_of(plane, user, namespace)
    plain.later(minutes=61)
    assert len(plain.again().reclaimed) == 1, "without environments nothing depends on it"


def test_without_any_right_everything_is_unseen(plane: ControlPlane, namespace: str) -> None:
    """C6.2"""
    ended_pod(plane.api, namespace, "run")
    harness = bench_of(plane, plane.new_user(), namespace)
    harness.later(minutes=61)
    report = harness.again()
    assert (report.survey.counts.seen, report.outcomes) == (0, [])
    assert {f"pods in {namespace}", f"jobs in {namespace}"} <= unseen(harness).keys()
    assert plane.api.names("pods", namespace) == {"run"}


def test_an_owner_that_may_not_be_read_keeps_its_pod(plane: ControlPlane, namespace: str) -> None:
    """A pod of a Job is part of it, whether or not the Job may be read."""
    job = plane.api.create(objects.job("train", parallelism=0, gpus=0), namespace)
    part = unplaced("part")
    part["metadata"]["ownerReferences"] = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": "train",
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
    ]
    plane.api.create(part, namespace)
    harness = bench_of(plane, plane.new_user(without(ALL, "jobs"), namespace=namespace), namespace)
    harness.later(days=90)
    assert harness.again().outcomes == []
    assert plane.api.names("pods", namespace) == {"part"}


def run_command(
    plane: ControlPlane, user: str, folder: Path, text: str, *words: str
) -> subprocess.CompletedProcess[str]:
    rules = folder / "policy.yaml"
    rules.write_text(text)
    env = {**forked.environment(), "HOME": str(folder), "KUBECONFIG": str(plane.kubeconfig(user))}
    env |= {"GPUKEEPER_STATE": str(folder / "state"), "GPUKEEPER_POLICY": str(rules)}
    return subprocess.CompletedProcess(words, *forked.run("gpukeeper", words, env))


def test_the_rights_to_look_are_enough_for_a_plan(plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """get, list and watch of kinds and pods in one namespace: the smallest Role of the manual."""
    ended_pod(plane.api, namespace, "run")
    user = plane.new_user([*SEE, NAMESPACE], namespace=namespace)
    now = {"succeeded": "0s", "failed": "0s", "stopped": "0s"}
    said = run_command(plane, user, tmp_path, policy([namespace], retention=now, mode="plan"), "plan")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "pod/run" in said.stdout
    assert plane.api.names("pods", namespace) == {"run"}


def test_what_could_not_be_seen_is_reported_by_words_and_exit(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    ended_pod(plane.api, namespace, "run")
    user = plane.new_user([*without(SEE, "pods"), NAMESPACE], namespace=namespace)
    said = run_command(plane, user, tmp_path, policy([namespace]), "plan")
    assert f"pods in {namespace} could not be read" in said.stderr
    said = run_command(plane, user, tmp_path, policy([namespace]), "apply", "--yes")
    assert said.returncode == 3, said.stdout + said.stderr
    assert f"pods in {namespace} could not be read" in said.stderr
    assert plane.api.names("pods", namespace) == {"run"}

"""From the API's words to subjects, and what the rules make of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.config.layers import BUILT_IN
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, View
from gpukeeper.model.policy import AtFinish, ClassSettings, PlaceScope, Policy
from gpukeeper.model.subject import EMPTY, Memory, Outcome, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.builtin import DAEMONSET, DEPLOYMENT, JOB, REPLICASET, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB, V1_KINDS
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB, RAYSERVICE
from gpukeeper.platforms.kubernetes.marks import NamespaceFacts, TranslationSettings
from gpukeeper.platforms.kubernetes.translate import pod_subject, root_subject
from tests.unit.platforms.kubernetes.examples import (
    AT,
    NOW,
    UID,
    ago,
    condition,
    gpu_container,
    pod,
    root,
    terminated,
    totals,
)

PYTORCH = V1_KINDS[0]
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NOWHERE = NamespaceFacts()
NO_PODS = PodTotals()
PLAIN = TranslationSettings()
GPU_TEMPLATE = {"template": {"spec": {"containers": [gpu_container(2)]}}}
CPU = [{"name": "main", "image": "registry.example/tool:2", "resources": {"requests": {"cpu": "1"}}}]
CPU_TEMPLATE = {"template": {"spec": {"containers": CPU}}}


def subject_of(
    kind: Kind = JOB,
    pods: PodTotals = NO_PODS,
    around: NamespaceFacts = NOWHERE,
    settings: TranslationSettings = PLAIN,
    **parts: Any,
) -> Subject:
    return root_subject(kind, root(**parts), pods, around, AT, settings)


def pod_of(phase: str = "Running", around: NamespaceFacts = NOWHERE, **parts: Any) -> Subject:
    return pod_subject(pod(phase, **parts), around, AT, PLAIN)


def done(type_: str = "Complete", at: str | None = ago(hours=2), **status: Any) -> dict[str, Any]:
    return {"conditions": [condition(type_, at)], "startTime": ago(hours=5), **status}


def decided(subject: Subject, memory: Memory = EMPTY, at_finish: AtFinish = AtFinish.NONE) -> Decision:
    classes = {
        name: ClassSettings(untouchable=given.get("untouchable", False)) for name, given in BUILT_IN["classes"].items()
    }
    policy = Policy(scope={"kubernetes": PlaceScope()}, classes=classes, at_finish=at_finish)
    return decide(View(subject, memory=memory), Rulebook(policy), NOW)


# Which thing


def test_who_it_is() -> None:
    subject = subject_of(TRAINJOB, generation=4, resourceVersion="99")
    assert subject.ref == Ref("kubernetes", "lab", "trainjob", "run-7", UID, "team-a")
    assert (subject.seen.incarnation, subject.seen.version, subject.seen.at) == ("1", "99", NOW)
    assert pod_of(generation=2).seen.incarnation == "1"


def test_one_name_in_two_namespaces_and_two_kinds_is_four_things() -> None:
    kinds, places = (JOB, TRAINJOB), ("team-a", "team-b")
    assert len({subject_of(kind, namespace=place).ref.path for kind in kinds for place in places}) == 4


# State


BACK_OFF = {
    "name": "main",
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "back-off pulling image nowhere:1"}},
    "lastState": {},
    "restartCount": 0,
}
RUNS = {"name": "init", "state": {"running": {"startedAt": ago(hours=1)}}}
ENDED_ONCE = {"terminated": {"exitCode": 1, "finishedAt": ago(hours=1)}}
BEGUN = {"startTime": ago(hours=5)}
LIVING = totals(pod(name="w-0"))
PENDING = totals(pod("Pending", name="w-0", node=""))
DEAD = totals(pod("Failed", name="w-0"))


@pytest.mark.parametrize(
    ("kind", "pods", "parts", "state"),
    [
        (JOB, LIVING, {"status": {"startTime": ago(hours=1)}}, State.RUNNING),
        (JOB, NO_PODS, {"status": {"startTime": ago(hours=1)}}, State.RUNNING),
        (JOB, NO_PODS, {}, State.CREATED),
        (JOB, PENDING, {}, State.CREATED),
        (JOB, DEAD, {}, State.RUNNING),  # it tries again
        (JOB, NO_PODS, {"spec": {"suspend": True}}, State.SUSPENDED),
        (JOB, LIVING, {"spec": {"suspend": True}}, State.RUNNING),  # not yet
        (JOB, PENDING, {"spec": {"suspend": True}}, State.CREATED),  # not yet either: a node may still be found
        (JOB, NO_PODS, {"status": done()}, State.ENDED),
        (JOB, NO_PODS, {"spec": {"suspend": True}, "status": done()}, State.ENDED),
        (JOB, LIVING, {"status": {"conditions": [condition("FailureTarget", ago(hours=1))]}}, State.RUNNING),
        (JOB, LIVING, {"status": done(), "deletionTimestamp": ago(minutes=1)}, State.REMOVING),
        (JOBSET, NO_PODS, {"spec": {"suspend": True}}, State.SUSPENDED),
        (JOBSET, PENDING, {}, State.CREATED),
        (TRAINJOB, LIVING, {}, State.RUNNING),
        (TRAINJOB, PENDING, {}, State.CREATED),
        (TRAINJOB, PENDING, {"status": {"jobsStatus": [{"name": "node", "failed": 1}]}}, State.RUNNING),
        (PYTORCH, NO_PODS, {"spec": {"runPolicy": {"suspend": True}}}, State.SUSPENDED),
        (PYTORCH, NO_PODS, {"spec": {"suspend": True}}, State.CREATED),  # at the wrong level: it does nothing
        (RAYJOB, LIVING, {"status": {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING"}}, State.ENDED),
        (RAYJOB, NO_PODS, {"spec": {"suspend": True}, "status": {"jobDeploymentStatus": "Suspended"}}, State.SUSPENDED),
        (RAYCLUSTER, NO_PODS, {"spec": {"suspend": True}}, State.SUSPENDED),
        (RAYCLUSTER, LIVING, {}, State.RUNNING),
        (RAYSERVICE, PENDING, {}, State.RUNNING),  # it may have served for months
        (DEPLOYMENT, NO_PODS, {"spec": {"replicas": 0}}, State.SUSPENDED),
        (DEPLOYMENT, LIVING, {"spec": {"replicas": 0}}, State.RUNNING),
        (DEPLOYMENT, PENDING, {"spec": {"replicas": 1}}, State.RUNNING),
        (DEPLOYMENT, NO_PODS, {}, State.RUNNING),
        (STATEFULSET, NO_PODS, {"spec": {"replicas": 0}}, State.SUSPENDED),
        (DAEMONSET, LIVING, {}, State.RUNNING),
    ],
)
def test_states_of_roots(kind: Kind, pods: PodTotals, parts: dict[str, Any], state: State) -> None:
    assert subject_of(kind, pods, **parts).state is state


@pytest.mark.parametrize(
    ("phase", "parts", "state"),
    [
        ("Pending", {"node": ""}, State.CREATED),
        ("Pending", {"status": {"containerStatuses": [BACK_OFF]}}, State.CREATED),
        ("Pending", {"status": {"initContainerStatuses": [RUNS], "containerStatuses": [BACK_OFF]}}, State.RUNNING),
        ("Pending", {"status": {"containerStatuses": [{**BACK_OFF, "restartCount": 1}]}}, State.RUNNING),
        ("Pending", {"status": {"containerStatuses": [{**BACK_OFF, "lastState": ENDED_ONCE}]}}, State.RUNNING),
        ("Pending", {"status": {"containerStatuses": [{"name": "main"}]}}, State.RUNNING),
        ("Running", {"status": {"containerStatuses": [BACK_OFF]}}, State.RUNNING),
        ("Running", {}, State.RUNNING),
        ("Running", {"status": {"conditions": [condition("Ready", ago(days=9), "False")]}}, State.RUNNING),
        ("Succeeded", {}, State.ENDED),
        ("Failed", {}, State.ENDED),
        ("Running", {"deletionTimestamp": ago(minutes=1)}, State.REMOVING),
    ],
)
def test_states_of_pods(phase: str, parts: dict[str, Any], state: State) -> None:
    assert pod_of(phase, **parts).state is state


def test_a_pod_that_its_node_has_not_reported_yet_is_neither_created_nor_running() -> None:
    """Seen as running once, it would count as started for ever."""
    for subject in (pod_of("Pending"), subject_of(JOB, totals(pod("Pending", name="a")), status=BEGUN)):
        assert isinstance(subject.state, Unknown)
        assert "not reported yet" in subject.starting
        assert decided(subject).action is Action.KEEP


def waiting(**parts: Any) -> PodTotals:
    return totals(pod("Pending", status={"containerStatuses": [BACK_OFF]}, **{"name": "a", **parts}))


def test_work_whose_image_cannot_be_pulled_holds_its_gpus_and_never_started() -> None:
    begun = ago(hours=5, minutes=-1)
    for subject in (
        subject_of(JOB, waiting(creationTimestamp=begun), status={"startTime": begun}),
        subject_of(TRAINJOB, waiting()),
        pod_of("Pending", status={"containerStatuses": [BACK_OFF], "startTime": ago(hours=5)}),
    ):
        assert (subject.state, subject.started, len(subject.devices)) == (State.CREATED, None, 1)
        decision = decided(subject)
        assert (decision.rule, decision.action) == ("never_started", Action.REMOVE)
        assert "ImagePullBackOff: back-off pulling image nowhere:1" in decision.reason


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        ({}, {"creationTimestamp": ago(hours=3)}),  # it replaces one that may have run
        ({"failed": 1}, {}),
        ({"succeeded": 1}, {}),
        ({"conditions": [condition("Suspended", ago(hours=5), "False")]}, {}),  # resumed: it may have run before
        ({}, {"creationTimestamp": "0001-01-01T00:00:00Z"}),
    ],
)
@pytest.mark.parametrize("pending", [True, False])
def test_a_job_that_may_have_run_before_counts_as_started(
    job: dict[str, Any], pods: dict[str, Any], *, pending: bool
) -> None:
    given = {"name": "a", "creationTimestamp": ago(hours=5), **pods}
    below = totals(pod("Pending", node="", **given)) if pending else waiting(**given)
    assert subject_of(JOB, below, status={**BEGUN, **job}).state is State.RUNNING


def test_an_unschedulable_job_never_started() -> None:
    """Its controller gives it a start time as soon as it makes its pods."""
    below = totals(*(pod("Pending", node="", name=name, creationTimestamp=ago(hours=5)) for name in "ab"))
    subject = subject_of(JOB, below, status=BEGUN)
    assert (subject.state, subject.started, subject.devices) == (State.CREATED, None, ())
    assert decided(subject).rule == "never_started"


@pytest.mark.parametrize("phase", ["Unknown", "", "Pondering"])
def test_a_phase_nobody_knows_is_unknown(phase: str) -> None:
    assert isinstance(pod_of(phase).state, Unknown)


@pytest.mark.parametrize("kind", [JOB, JOBSET, TRAINJOB, RAYCLUSTER, DEPLOYMENT])
@pytest.mark.parametrize("spec", [{}, {"suspend": True, "replicas": 0}])
def test_pods_that_could_not_be_listed_may_run(kind: Kind, spec: dict[str, Any]) -> None:
    subject = subject_of(kind, PodTotals(unclear="pods: 403"), spec=spec)
    assert subject.state == Unknown("pods: 403")
    assert subject.devices == Unknown("pods: 403")
    assert decided(subject).action is Action.KEEP


# Times


def test_the_start_is_that_of_the_root_else_of_its_first_pod() -> None:
    ran = totals(pod(name="a", status={"startTime": ago(hours=1)}), pod(name="b", status={"startTime": ago(hours=3)}))
    assert subject_of(JOB, ran, status={"startTime": ago(hours=2)}).started == NOW - 2 * HOUR
    assert subject_of(TRAINJOB, ran).started == NOW - 3 * HOUR
    assert subject_of(TRAINJOB).started is None
    assert isinstance(subject_of(JOB, ran, status={"startTime": "0001-01-01T00:00:00Z"}).started, Unknown)
    assert pod_of(status={"startTime": ago(hours=1)}).started == NOW - HOUR


def test_the_creation_may_be_missing() -> None:
    assert subject_of(JOB).created == NOW - 6 * HOUR
    assert isinstance(subject_of(JOB, creationTimestamp=None).created, Unknown)


FUTURE = (NOW + HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("at", [None, "0001-01-01T00:00:00Z", "1969-06-01T00:00:00Z", FUTURE, "yesterday"])
def test_an_odd_end_is_reported_and_counts_from_when_it_was_first_seen(at: str | None) -> None:
    for subject in (
        subject_of(JOB, status=done(at=at)),
        pod_of("Succeeded", status={"containerStatuses": [terminated(at)]}),
    ):
        assert subject.state is State.ENDED
        assert isinstance(subject.ended, Unknown)
        assert any(one.startswith("its end time is unknown") for one in subject.findings)
        assert decided(subject).action is Action.KEEP
        seen = Memory(incarnation=subject.seen.incarnation, state="ended", first_seen_ended=NOW - 23 * HOUR)
        assert decided(subject, seen).action is Action.KEEP
        long_ago = Memory(incarnation=subject.seen.incarnation, state="ended", first_seen_ended=NOW - 25 * HOUR)
        assert decided(subject, long_ago).action is Action.REMOVE


def test_a_refused_rayjob_counts_from_when_it_was_first_seen() -> None:
    subject = subject_of(RAYJOB, status={"jobDeploymentStatus": "ValidationFailed"})
    assert (subject.state, subject.outcome) == (State.ENDED, Outcome.FAILED)
    assert subject.ended == Unknown("this RayJob does not record its end time")


def test_what_cannot_be_told_from_its_status_keeps_and_is_reported() -> None:
    over = subject_of(JOB, status={"conditions": [condition("Failed", ago(days=90), "Unknown")]})
    assert isinstance(over.state, Unknown)
    assert "whether it has ended is unknown: its condition Failed is 'Unknown'" in over.findings
    how = {"jobDeploymentStatus": "Complete", "jobStatus": "RUNNING", "endTime": ago(days=90)}
    outcome = subject_of(RAYJOB, status=how, creationTimestamp=ago(days=91))
    assert isinstance(outcome.outcome, Unknown)
    assert any(one.startswith("its outcome is unknown") for one in outcome.findings)
    for subject in (over, outcome):
        assert decided(subject).action is Action.KEEP


# What lives below it


@pytest.mark.parametrize("kind", [PYTORCH, TRAINJOB, JOBSET, JOB])
def test_success_does_not_hide_workers_that_run_on(kind: Kind) -> None:
    """The status' own counters look clean then."""
    over = kind.succeeded[0]
    pods = totals(pod("Succeeded", name="m-0"), pod(name="w-0"), pod("Running", name="log", containers=CPU))
    status = done(over, replicaStatuses={"Worker": {"active": 0, "succeeded": 1}}, active=0)
    subject = subject_of(kind, pods, status=status)
    assert (subject.state, subject.live_children, subject.dead_children) == (State.ENDED, 1, 1)
    assert subject.devices == ("w-0/0",)
    assert decided(subject, at_finish=AtFinish.RUNNING).action is Action.TRIM
    assert decided(subject, at_finish=AtFinish.NONE).action is Action.KEEP


def test_a_failed_rayjob_whose_job_runs_on_is_over() -> None:
    status = {
        "jobDeploymentStatus": "Failed",
        "jobStatus": "RUNNING",
        "endTime": ago(days=10),
        "startTime": ago(days=11),
    }
    subject = subject_of(RAYJOB, LIVING, status=status, creationTimestamp=ago(days=11))
    assert (subject.state, subject.outcome, subject.live_children) == (State.ENDED, Outcome.FAILED, 1)
    assert decided(subject).action is Action.WARN  # its cluster runs and goes with it, so somebody is told first


def test_a_count_that_is_not_to_be_trusted_keeps_what_ended() -> None:
    subject = subject_of(
        JOB, PodTotals(unclear="pods: 500"), status=done(at=ago(days=40)), creationTimestamp=ago(days=41)
    )
    assert subject.live_children == subject.dead_children == Unknown("pods: 500")
    assert decided(subject).action is Action.KEEP


def test_while_it_runs_it_has_no_children_to_end() -> None:
    subject = subject_of(JOB, totals(pod(name="a"), pod("Failed", name="b")), status={"startTime": ago(hours=1)})
    assert (subject.live_children, subject.dead_children, subject.ended, subject.outcome) == (0, 0, None, None)
    assert subject.devices == ("a/0",)
    assert subject_of(JOB, NO_PODS, status={"startTime": ago(hours=1)}).devices == ()


def test_the_devices_of_a_pod() -> None:
    both = [gpu_container(1), gpu_container(1, "nvidia.com/mig-1g.10gb", name="small")]
    running = pod_of(containers=both)
    assert (running.devices, running.slices) == (("run-7/0", "run-7/1"), ("run-7/1",))
    assert pod_of("Pending", node="", containers=both).devices == ()
    assert pod_of("Succeeded", containers=both).devices == ()
    claim = {"resourceClaims": [{"name": "gpu"}]}
    assert isinstance(pod_of(spec=claim).devices, Unknown)
    assert pod_of("Succeeded", spec=claim).devices == ()


def test_a_silent_node_is_a_finding() -> None:
    subject = subject_of(JOB, totals(pod("Unknown", name="w-9")), status=done())
    assert any("w-9" in one for one in subject.findings)
    assert subject.live_children == 1


@pytest.mark.parametrize(
    ("kind", "for_good"),
    [
        (JOB, True),
        (JOBSET, True),
        (TRAINJOB, True),
        (PYTORCH, True),
        (RAYJOB, True),
        (RAYCLUSTER, False),
        (DEPLOYMENT, False),
    ],
)
def test_what_ends_for_good(kind: Kind, for_good: bool) -> None:
    assert subject_of(kind).ends_for_good is for_good


def test_a_pod_that_never_restarts_ends_for_good() -> None:
    assert pod_of().ends_for_good
    assert not pod_of(spec={"restartPolicy": "OnFailure"}).ends_for_good


# Retention by how it ended


def test_a_success_after_retries_has_the_time_of_a_success() -> None:
    subject = subject_of(JOB, status=done(at=ago(hours=25), failed=2), creationTimestamp=ago(days=2))
    assert subject.outcome is Outcome.SUCCEEDED
    assert (decided(subject).action, decided(subject).rule) == (Action.REMOVE, "retention")
    failed = subject_of(JOB, status=done("Failed", ago(hours=25)), creationTimestamp=ago(days=2))
    assert decided(failed).action is Action.KEEP


def test_a_garbled_marker_keeps_what_ended_and_complains() -> None:
    subject = subject_of(
        JOB, status=done(at=ago(days=3)), creationTimestamp=ago(days=4), annotations={"gpukeeper.io/ttl": "10ay"}
    )
    decision = decided(subject)
    assert decision.action is Action.KEEP
    assert any("10ay" in one for one in decision.complaints)
    assert any("10ay" in one for one in subject.findings)


def test_a_copy_of_another_cluster_is_kept() -> None:
    labels = {"kueue.x-k8s.io/multikueue-origin": "multikueue"}
    subject = subject_of(JOB, status=done(at=ago(days=3)), creationTimestamp=ago(days=4), labels=labels)
    assert decided(subject).action is Action.KEEP


def test_a_mark_copied_to_a_part_makes_it_no_target() -> None:
    """A Deployment's annotations are copied to its ReplicaSets."""
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "u", "controller": True}
    parts: dict[str, Any] = {"annotations": {"gpukeeper.io/ttl": "0s"}, "ownerReferences": [owner]}
    copied = subject_of(REPLICASET, LIVING, **parts)
    assert copied.root == Unknown("it is owned by Deployment web")
    assert decided(copied).action is Action.KEEP
    finished = pod_of("Succeeded", **parts, creationTimestamp=ago(days=90))
    assert isinstance(finished.root, Unknown)
    assert decided(finished).action is Action.KEEP


def test_what_was_found_above_it_counts() -> None:
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "Notebook", "name": "nb", "uid": "u", "controller": True}
    told = root(ownerReferences=[owner])
    given = root_subject(STATEFULSET, told, LIVING, NOWHERE, AT, TranslationSettings(), part_of="kubernetes/lab/a/x/nb")
    assert given.root == "kubernetes/lab/a/x/nb"
    assert root_subject(STATEFULSET, told, LIVING, NOWHERE, AT, TranslationSettings(), part_of=None).root is None


def test_a_run_of_a_cronjob_is_a_root() -> None:
    owner = {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": "u", "controller": True}
    assert subject_of(JOB, ownerReferences=[owner]).root is None


# Holds and marks of pods and namespaces


def test_a_pod_that_must_not_be_moved_holds_its_running_root() -> None:
    pods = totals(pod(name="w-0", annotations={"karpenter.sh/do-not-disrupt": "true"}))
    running = subject_of(JOB, pods, status={"startTime": ago(hours=1)})
    assert running.marks.hold_until is not None
    assert any("karpenter.sh/do-not-disrupt" in one for one in running.evidence)
    assert (decided(running).action, decided(running).rule) == (Action.KEEP, "hold")
    ageless = subject_of(TRAINJOB, pods, creationTimestamp=None)  # nothing bounds the hold
    assert (decided(ageless).action, decided(ageless).rule) == (Action.KEEP, "hold")
    assert subject_of(JOB, pods, status=done()).marks.hold_until is None
    assert pod_of(annotations={"karpenter.sh/do-not-disrupt": "true"}).marks.hold_until is not None


def test_a_namespace_can_hold_its_running_work() -> None:
    held = NamespaceFacts(held="namespace team-a has downscaler/exclude")
    assert subject_of(DEPLOYMENT, LIVING, held).marks.hold_until is not None
    assert pod_of(around=held).marks.hold_until is not None
    assert pod_of("Succeeded", held).marks.hold_until is None


def test_kuberay_goes_first_and_that_is_reported() -> None:
    spec = {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 3600, "clusterSelector": None}
    status = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED", "endTime": ago(minutes=30)}
    subject = subject_of(RAYJOB, LIVING, spec=spec, status=status)
    assert subject.marks.hold_until == NOW + timedelta(minutes=31)
    assert "KubeRay itself cleans up 1h after the end; gpukeeper waits for that" in subject.evidence
    assert decided(subject, at_finish=AtFinish.RUNNING).action is Action.KEEP


def test_a_borrowed_cluster_is_named() -> None:
    subject = subject_of(RAYJOB, spec={"clusterSelector": {"ray.io/cluster": "shared"}})
    assert "its RayCluster is shared (clusterSelector) and stays" in subject.evidence


# Class


@pytest.mark.parametrize(
    ("kind", "pods", "parts", "class_"),
    [
        (JOB, NO_PODS, {}, "cluster"),
        (JOB, NO_PODS, {"spec": CPU_TEMPLATE}, "cluster"),
        (TRAINJOB, NO_PODS, {"namespace": "kubeflow-system"}, "cluster"),  # beside the operator
        (JOB, NO_PODS, {"namespace": "kube-system"}, "infrastructure"),
        (DEPLOYMENT, LIVING, {"labels": {"app.kubernetes.io/name": "gpukeeper"}}, "infrastructure"),
        (JOB, NO_PODS, {"labels": {"app.kubernetes.io/part-of": "gpukeeper"}}, "infrastructure"),
        (DAEMONSET, LIVING, {"spec": GPU_TEMPLATE}, "infrastructure"),
        (RAYSERVICE, LIVING, {}, "serving"),
        (RAYSERVICE, NO_PODS, {}, "serving"),
        (DEPLOYMENT, NO_PODS, {"spec": GPU_TEMPLATE}, "cluster"),
        (DEPLOYMENT, NO_PODS, {"spec": CPU_TEMPLATE}, "without-gpu"),
        (DEPLOYMENT, LIVING, {"spec": CPU_TEMPLATE}, "cluster"),  # an old pod still has one
        (DEPLOYMENT, PodTotals(unclear="pods: 403"), {"spec": CPU_TEMPLATE}, "cluster"),
        (STATEFULSET, totals(pod(containers=CPU)), {"spec": CPU_TEMPLATE}, "without-gpu"),
        (RAYCLUSTER, NO_PODS, {"spec": {"headGroupSpec": CPU_TEMPLATE}}, "without-gpu"),
        (
            RAYCLUSTER,
            NO_PODS,
            {"spec": {"headGroupSpec": CPU_TEMPLATE, "workerGroupSpecs": [GPU_TEMPLATE]}},
            "cluster",
        ),
        (
            DEPLOYMENT,
            NO_PODS,
            {"spec": {"template": {"spec": {"containers": CPU, "resourceClaims": [{"name": "gpu"}]}}}},
            "cluster",  # the claim may be one
        ),
    ],
)
def test_classes(kind: Kind, pods: PodTotals, parts: dict[str, Any], class_: str) -> None:
    assert subject_of(kind, pods, **parts).class_ == class_


def test_classes_of_pods() -> None:
    assert pod_of().class_ == "cluster"
    assert pod_of("Succeeded", containers=CPU).class_ == "cluster"
    assert pod_of(annotations={"kubernetes.io/config.mirror": "abc"}).class_ == "infrastructure"
    assert pod_of("Succeeded", namespace="kube-system").class_ == "infrastructure"


# Owner, environment, labels


PROFILE = NamespaceFacts("research", "ann", "namespace team-a is the Kubeflow profile of ann")
TRUSTED = TranslationSettings(owner_labels=("site/user",))


@pytest.mark.parametrize(
    ("metadata", "namespace", "settings", "owner", "verified", "findings"),
    [
        ({}, NOWHERE, TRUSTED, None, False, 0),
        ({"labels": {"site/user": "bob"}}, NOWHERE, TRUSTED, "bob", True, 0),
        ({"labels": {"site/user": "bob"}}, NOWHERE, TranslationSettings(), None, False, 0),  # nobody trusts it
        ({}, PROFILE, TRUSTED, "ann", True, 0),
        ({"labels": {"site/user": "bob"}}, PROFILE, TRUSTED, "bob", False, 1),  # both are trusted
        ({"labels": {"site/user": "ann"}}, PROFILE, TRUSTED, "ann", True, 0),
        ({"labels": {"gpukeeper.io/owner": "eve"}}, NOWHERE, TRUSTED, "eve", False, 0),
        ({"annotations": {"gpukeeper.io/owner": "eve"}}, NOWHERE, TRUSTED, "eve", False, 0),
        ({"annotations": {"gpukeeper.io/owner": "eve"}}, PROFILE, TRUSTED, "ann", True, 1),
        ({"labels": {"gpukeeper.io/owner": "eve", "site/user": "bob"}}, NOWHERE, TRUSTED, "bob", True, 0),
        ({"labels": {"site/user": "  "}}, NOWHERE, TRUSTED, None, False, 0),
    ],
)
def test_whose_it_is(
    metadata: dict[str, Any],
    namespace: NamespaceFacts,
    settings: TranslationSettings,
    owner: str | None,
    verified: bool,
    findings: int,
) -> None:
    subject = subject_of(JOB, NO_PODS, namespace, settings, **metadata)
    assert (subject.owner, subject.owner_verified, len(subject.findings)) == (owner, verified, findings)
    assert owner is None or any(owner in one for one in subject.evidence)


def test_a_namespace_that_could_not_be_read_leaves_the_owner_unknown() -> None:
    silent = NamespaceFacts(Unknown("403"), Unknown("403"))
    claimed = subject_of(JOB, NO_PODS, silent, annotations={"gpukeeper.io/owner": "eve"})
    assert (claimed.owner, claimed.environment) == (Unknown("403"), Unknown("403"))
    assert not claimed.owner_verified
    assert subject_of(JOB, NO_PODS, silent, TRUSTED, labels={"site/user": "bob"}).owner == "bob"


def test_labels_carry_the_image_and_nobody_passes_for_another() -> None:
    subject = subject_of(JOB, spec=GPU_TEMPLATE, labels={"app": "x", "image": "trusted:1"})
    assert subject.labels == {"app": "x", "image": "registry.example/train:1"}
    assert subject_of(TRAINJOB, labels={"image": "trusted:1"}).labels == {}
    assert pod_of(labels={"image": "trusted:1"}).labels["image"] == "registry.example/train:1"


def test_what_the_policy_says_about_reading() -> None:
    policy = Policy(owner_labels=("site/user",), foreign_ttl=("janitor/ttl",))
    assert TranslationSettings.of(policy) == TranslationSettings(("site/user",), ("janitor/ttl",), False)
    aged = subject_of(JOB, settings=TranslationSettings.of(policy), status=done(), annotations={"janitor/ttl": "5h"})
    assert aged.marks.ttl == HOUR

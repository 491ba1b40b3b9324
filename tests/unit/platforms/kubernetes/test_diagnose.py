"""Why is it still there? A tree and sentences, each with what to do; from objects as a cluster writes them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.model.subject import Cause, Diagnosis, Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.diagnose import Controllers, diagnose
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from tests.unit.platforms.kubernetes.examples import NOW, ago, condition, gpu_container, meta, pod_json
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden, silent
from tests.unit.platforms.kubernetes.test_controllers import deployment, lease
from tests.unit.platforms.kubernetes.test_owners import reference, thing

Told = dict[str, Any]
JOBSET_HERE = deployment("jobset-controller-manager", image="registry.k8s.io/jobset/jobset:v0.10.1")


def said(cluster: StoredCluster, one: Told, **ref: str) -> Diagnosis:
    found = asked(cluster, one, **ref)
    assert isinstance(found, Diagnosis)
    return found


def asked(cluster: StoredCluster, one: Told, **ref: str) -> Diagnosis | Unknown:
    named = {"name": one["metadata"]["name"], "uid": one["metadata"]["uid"], "kind": one["kind"].lower(), **ref}
    wanted = Ref("kubernetes", "lab", namespace="team-a", **named)
    return asyncio.run(diagnose(cluster.as_cluster, cluster.served, wanted, NOW))


def one_of(found: Diagnosis, words: str) -> Cause:
    hits = [cause for cause in found.causes if words in cause.words]
    assert len(hits) == 1, f"{words!r} is in {len(hits)} of {[cause.words for cause in found.causes]}"
    return hits[0]


def none_of(found: Diagnosis, *words: str) -> None:
    for word in words:
        assert not [cause.words for cause in found.causes if word in cause.words], word


OPENAPI = "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"


def described(*fields: str, kind: str = "TrainJob") -> Told:
    """A group as the API server describes it."""
    spec = {"type": "object", "properties": {name: {"type": "object"} for name in ("runtimeRef", *fields)}}
    named = [{"group": "trainer.kubeflow.org", "kind": kind, "version": "v1alpha1"}]
    schema = {
        "type": "object",
        "properties": {"kind": {"type": "string"}, "spec": spec},
        "x-kubernetes-group-version-kind": named,
    }
    other = {"type": "object", "properties": {"spec": {"properties": {"ttlSecondsAfterFinished": {}}}}}
    return {"openapi": "3.0.0", "components": {"schemas": {"other": other, f"io.trainer.{kind}": schema}}}


def train(
    *conditions: Told, version: str = "v2.3.0", runtime_ttl: int | None = None, jobset: Told | None = None, **parts: Any
) -> tuple[StoredCluster, Told]:
    """A TrainJob with its runtime, its JobSet and both controllers."""
    one = thing("TrainJob", "run-7", **parts)
    one["spec"] = {
        "runtimeRef": {"name": "torch", "kind": "ClusterTrainingRuntime", "apiGroup": "trainer.kubeflow.org"}
    }
    one["status"] = {"conditions": list(conditions)}
    inner = {} if runtime_ttl is None else {"ttlSecondsAfterFinished": runtime_ttl}
    runtime = {
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "torch", "uid": "torch"},
        "spec": {"template": {"spec": {"replicatedJobs": [{"name": "node"}], **inner}}},
    }
    image = f"ghcr.io/kubeflow/trainer/trainer-controller-manager:{version}"
    held = lease(NOW - timedelta(seconds=2))
    cluster = StoredCluster(one, runtime, deployment(image=image), held, JOBSET_HERE, *([jobset] if jobset else []))
    cluster.documents[OPENAPI] = described()
    return cluster, one


COMPLETE = condition("Complete", ago(hours=2), reason="JobsCompleted")
FAILED = condition("Failed", ago(hours=2), reason="FailedJobs")


def test_a_complete_trainjob_has_no_ttl_and_ours_takes_it() -> None:
    cluster, one = train(COMPLETE)
    found = said(cluster, one)
    assert found.tree[0].startswith("trainjob/run-7  succeeded 2h ago, created 6h ago, this kind has no TTL, uid ")
    assert any("controller Kubeflow Trainer v2.3.0" in line and "1 of 1 ready" in line for line in found.tree)
    cause = one_of(found, "a TrainJob has no TTL in this cluster (its CRD has no spec.ttlSecondsAfterFinished)")
    assert "annotation gpukeeper.io/ttl" in cause.remedy
    none_of(found, "is set in", "did not end", "was created", "no longer exists", "does not run")


@pytest.mark.parametrize("document", [None, {}, described("ttlSecondsAfterFinished", kind="Other")])
def test_where_the_crd_cannot_be_read_that_is_reported_and_what_is_known_counts(document: Told | None) -> None:
    cluster, one = train(COMPLETE)
    if document is None:
        cluster.refused[OPENAPI] = forbidden("path")
    cluster.documents[OPENAPI] = document
    found = said(cluster, one)
    cause = one_of(found, "a TrainJob has no TTL in any release that gpukeeper knows (whether a TrainJob of this")
    assert "is unknown" in cause.words
    assert "this kind has no TTL" not in found.tree[0]


def test_a_trainjob_whose_crd_has_a_ttl_is_left_to_its_controller() -> None:
    cluster, one = train(COMPLETE)
    cluster.documents[OPENAPI] = described("ttlSecondsAfterFinished")
    found = said(cluster, one)
    assert "no TTL, uid" in found.tree[0]
    cause = one_of(found, "it has no TTL (spec.ttlSecondsAfterFinished)")
    assert "unless its runtime names one for it" in cause.words
    none_of(found, "a TrainJob has no TTL")

    one["spec"]["ttlSecondsAfterFinished"] = 3 * 3600
    found = said(cluster, one)
    assert "TTL 3h, uid" in found.tree[0]
    one_of(found, "its TTL of 3h expires in 1h; then Kubeflow Trainer removes it")
    one["spec"]["ttlSecondsAfterFinished"] = 60
    one_of(said(cluster, one), "its TTL of 1m expired 1h59m ago, but Kubeflow Trainer has not removed it")


def test_a_ttl_that_nobody_can_vouch_for_is_not_left_to_the_platform() -> None:
    cluster, one = train(COMPLETE)
    del cluster.documents[OPENAPI]
    one["spec"]["ttlSecondsAfterFinished"] = 60
    found = said(cluster, one)
    none_of(found, "its TTL of")
    assert len([cause for cause in found.causes if "is unknown" in cause.words]) == 2, "a note, and no TTL"


def test_only_a_trainjob_is_checked() -> None:
    job = thing("Job", "train")
    cluster = StoredCluster(job)
    said(cluster, job)
    assert OPENAPI not in cluster.asked


def test_a_ttl_that_the_api_server_dropped_is_named_with_its_right_place() -> None:
    applied = '{"apiVersion":"kubeflow.org/v1","kind":"PyTorchJob","spec":{"ttlSecondsAfterFinished":600}}'
    one = thing("PyTorchJob", "train", annotations={"kubectl.kubernetes.io/last-applied-configuration": applied})
    one["status"] = {"conditions": [condition("Succeeded", ago(hours=2))]}
    cause = one_of(said(StoredCluster(one), one), "spec.ttlSecondsAfterFinished: 600 was applied")
    assert cause.words.endswith("no effect; use spec.runPolicy.ttlSecondsAfterFinished")


@pytest.mark.parametrize(
    ("version", "ended", "words"),
    [
        ("v2.0.0", COMPLETE, "Kubeflow Trainer v2.0.0 does not recreate it"),
        ("v2.1.0", COMPLETE, "Kubeflow Trainer v2.1.0 recreates it at once"),
        ("v2.3.0", COMPLETE, "Kubeflow Trainer v2.3.0 does not recreate it"),
        ("v2.3.0", FAILED, "Kubeflow Trainer v2.3.0 recreates it at once"),
        ("latest", COMPLETE, "it may be recreated"),
    ],
)
def test_a_ttl_in_the_runtime_is_at_the_wrong_level(version: str, ended: Told, words: str) -> None:
    cluster, one = train(ended, version=version, runtime_ttl=300)
    cause = one_of(said(cluster, one), "is set in its runtime (ClusterTrainingRuntime torch)")
    assert "removes only the JobSet" in cause.words
    assert words in cause.words
    again = "recreates it" in words
    assert ("gpukeeper.io/ttl: 300s" in cause.remedy) is not again
    assert ("kubectl -n team-a delete trainjob run-7" in cause.remedy) is again
    assert ("run-7-runtime-snapshot" in cause.remedy) is (again and version == "v2.3.0")


def test_a_ttl_in_the_jobset_is_at_the_wrong_level() -> None:
    cluster, one = train(COMPLETE)
    jobset = thing("JobSet", "run-7", one, creationTimestamp=ago(hours=6))
    jobset["spec"] = {"ttlSecondsAfterFinished": 60}
    cluster.objects.append(jobset)
    found = said(cluster, one)
    assert "ttlSecondsAfterFinished: 60 is set in its JobSet" in one_of(found, "is set in").words
    assert "jobset/run-7  not finished, created 6h ago, TTL 1m, uid jobset-run-7" in found.tree[1]


def test_a_jobset_made_after_the_end_was_recreated() -> None:
    cluster, one = train(COMPLETE, version="v2.1.0", runtime_ttl=5)
    jobset = thing("JobSet", "run-7", one, creationTimestamp=ago(minutes=119))
    job = thing("Job", "run-7-node-0", jobset, creationTimestamp=ago(minutes=119))
    worker = {**pod_json(containers=[gpu_container(8)]), "metadata": thing("Pod", "w", job)["metadata"]}
    cluster.objects += [jobset, job, worker]
    found = said(cluster, one)
    cause = one_of(found, "after the TrainJob ended")
    assert "jobset/run-7 was created 1h59m ago, 1m after" in cause.words
    assert "(v2.1.0) recreated it" in cause.words
    assert "1 pod below it did not end, with 8 GPUs" in one_of(found, "it has finished").words
    assert "      pod/w  Running on node-1, 8 GPUs" in found.tree[3]


def test_a_trainjob_that_runs_again_after_it_failed_is_reported() -> None:
    cluster, one = train(version="v2.3.0", runtime_ttl=5)
    cluster.objects.append(thing("JobSet", "run-7", one, creationTimestamp=ago(minutes=1)))
    cause = one_of(said(cluster, one), "younger than the TrainJob")
    assert "removes its end condition" in cause.words
    assert "Remove the TrainJob" in cause.remedy


def test_the_endless_foreground_loop() -> None:
    parts = {"finalizers": ["foregroundDeletion"], "deletionTimestamp": ago(minutes=9), "deletionGracePeriodSeconds": 0}
    cluster, one = train(FAILED, **parts)
    cluster.objects.append(thing("JobSet", "run-7", one, creationTimestamp=ago(seconds=1)))
    cause = one_of(said(cluster, one), "the finalizer foregroundDeletion blocks it")
    assert "9m ago" in cause.words
    assert "recreates jobset/run-7" in cause.words
    assert "Waiting does not help" in cause.words
    assert "kubernetes.release: [foregroundDeletion]" in cause.remedy


RAY = {"finalizers": ["ray.io/rayjob-finalizer"], "deletionTimestamp": ago(hours=1), "deletionGracePeriodSeconds": 0}
OPERATOR = "kuberay-operator"
STALE = lease(NOW - timedelta(days=1), "ray-operator-leader")


def rayjob(status: str = "Complete", spec: Told | None = None, **parts: Any) -> Told:
    one = thing("RayJob", "tune", **parts)
    one["spec"] = spec or {}
    one["status"] = {"jobDeploymentStatus": status, "jobStatus": "RUNNING", "endTime": ago(hours=3)}
    return one


def test_a_finalizer_whose_controller_is_gone() -> None:
    one = rayjob(**RAY)
    off = deployment(OPERATOR, wanted=0, ready=0, image="quay.io/kuberay/operator:v1.4.2")
    cluster = StoredCluster(one, off, STALE)
    first = one_of(said(cluster, one), "the finalizer ray.io/rayjob-finalizer")
    assert "1h ago" in first.words
    assert "Whether it will ever complete is unknown" in first.words, "one look proves nothing"
    passed = 0.0
    controllers = Controllers(cluster.as_cluster, lambda: passed)
    ref = Ref("kubernetes", "lab", "rayjob", "tune", "rayjob-tune", "team-a")
    asyncio.run(diagnose(cluster.as_cluster, cluster.served, ref, NOW, controllers))
    passed = 20.0
    found = asyncio.run(diagnose(cluster.as_cluster, cluster.served, ref, NOW + timedelta(seconds=20), controllers))
    assert isinstance(found, Diagnosis)
    second = one_of(found, "the finalizer ray.io/rayjob-finalizer")
    assert "KubeRay does not run (Deployment kubeflow-system/kuberay-operator is scaled to 0" in second.words
    assert "Waiting does not help" in second.words
    assert "Start its controller again" in second.remedy
    assert "Start it again" in one_of(found, "KubeRay does not run: ").remedy
    assert any(line.startswith("controller KubeRay v1.4.2: not running: ") for line in found.tree)


def test_a_finalizer_whose_controller_may_not_be_read() -> None:
    one = rayjob(**RAY)
    cluster = StoredCluster(one)
    cluster.refused = {"/deployments": forbidden("deployments"), "/leases": forbidden("leases")}
    cause = one_of(said(cluster, one), "the finalizer ray.io/rayjob-finalizer")
    assert "whether KubeRay runs is unknown" in cause.words


def test_a_removal_that_is_in_progress_is_waited_for() -> None:
    one = rayjob(**{**RAY, "deletionTimestamp": ago(seconds=5)})
    assert one_of(said(StoredCluster(one), one), "its removal is in progress, for 5s").remedy.startswith("Wait")


def test_a_blocked_pod_below_is_named() -> None:
    job = thing("Job", "run-7", finalizers=["foregroundDeletion"], deletionTimestamp=ago(minutes=9))
    stuck = thing(
        "Pod", "run-7-x", job, deletionTimestamp=ago(minutes=9), finalizers=["batch.kubernetes.io/job-tracking"]
    )
    found = said(StoredCluster(job, stuck), job)
    assert "not deleted yet: pod/run-7-x (finalizer batch" in one_of(found, "foregroundDeletion").words
    assert one_of(found, "pod/run-7-x: its removal").words.count("its Job exists and must count it first") == 1


def test_a_pod_whose_job_is_gone_is_proven_to_be_stuck() -> None:
    job = thing("Job", "run-7")
    left = thing(
        "Pod", "run-7-x", job, deletionTimestamp=ago(minutes=9), finalizers=["batch.kubernetes.io/job-tracking"]
    )
    left["status"] = {"phase": "Succeeded"}
    found = said(StoredCluster(left), left)
    assert "its owner Job run-7 (uid job-run-7) no longer exists" in one_of(found, "was left behind").words
    assert "Waiting does not help" in one_of(found, "its Job no longer exists, and nothing else counts it").words


def test_no_end_is_written_and_what_is_waited_for() -> None:
    job = thing("Job", "run-7")
    job["spec"] = {"ttlSecondsAfterFinished": 60}
    announced = condition("SuccessCriteriaMet", ago(minutes=5), reason="CompletionsReached")
    job["status"] = {"conditions": [announced, condition("Complete", ago(minutes=5), "False")]}
    running = thing("Pod", "run-7-x", job)
    found = said(StoredCluster(job, running), job)
    cause = one_of(found, "it has not ended: no condition Complete or Failed is True")
    assert "only SuccessCriteriaMet; 1 pod not ended yet" in cause.words
    assert "SuccessCriteriaMet was set 5m ago" in one_of(found, "was set").words
    none_of(found, "TTL")


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ([], "it has no pods: its controller has to create them"),
        ([{"status": {"phase": "Pending"}, "spec": {"containers": []}}], "1 of 1 pod not scheduled yet"),
        ([{"status": {"phase": "Unknown"}}], "the node of pod p0 does not respond"),
        ([{"status": {"phase": "Failed"}}], "all of its pods (1) have ended"),
    ],
)
def test_what_an_unfinished_job_waits_for(pods: list[Told], words: str) -> None:
    job = thing("Job", "run-7")
    made = [{**thing("Pod", f"p{n}", job), **one} for n, one in enumerate(pods)]
    assert words in one_of(said(StoredCluster(job, *made), job), "it has not ended").words


def test_a_pod_that_its_node_cannot_start_is_explained_in_the_words_of_the_kubelet() -> None:
    job = thing("Job", "run-7")
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "nowhere:1"'}}
    pods = [
        {
            **thing("Pod", f"p{n}", job),
            "spec": {"nodeName": "node-1", "containers": [gpu_container(2)]},
            "status": {"phase": "Pending", "containerStatuses": [{"name": "main", "state": waits}]},
        }
        for n in range(4)
    ]
    found = said(StoredCluster(job, *pods), job)
    assert "4 of 4 pods not started yet" in one_of(found, "it has not ended").words
    words = 'pod p0 on node-1 has not started, and holds 2 GPUs: ImagePullBackOff: Back-off pulling image "nowhere:1"'
    assert one_of(found, "pod p0 on node-1").words == words
    one_of(found, "and 1 more pods have not started")


def test_an_end_without_a_time() -> None:
    one = thing("PyTorchJob", "run-7")
    one["spec"] = {"runPolicy": {"ttlSecondsAfterFinished": 60}}
    one["status"] = {"conditions": [condition("Succeeded", None)]}
    found = said(StoredCluster(one), one)
    assert (
        "gpukeeper counts from the time at which it first saw it ended"
        in one_of(found, "its end time is unknown").remedy
    )


def finished_job(ttl: int | None, **parts: Any) -> Told:
    job = thing("Job", "run-7", **parts)
    job["spec"] = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    job["status"] = {"conditions": [condition("Complete", ago(hours=1))]}
    return job


def test_ttls_of_controllers_none_running_and_late() -> None:
    none = finished_job(None)
    assert "spec.ttlSecondsAfterFinished" in one_of(said(StoredCluster(none), none), "it has no TTL").words
    running = finished_job(7200)
    assert "expires in 1h" in one_of(said(StoredCluster(running), running), "its TTL of 2h").words
    late = finished_job(600)
    cause = one_of(said(StoredCluster(late), late), "its TTL of 10m expired 50m ago")
    assert "kube-controller-manager has not removed it" in cause.words


@pytest.mark.parametrize(
    ("where", "value", "words", "remedy"),
    [
        ("spec", {"managedBy": "kueue.x-k8s.io/multikueue"}, "(managedBy)", "ask the admin of that controller"),
        ("labels", {"kueue.x-k8s.io/multikueue-origin": "hub"}, "MultiKueue", "on the cluster that sent it"),
        ("annotations", {"argocd.argoproj.io/tracking-id": "app:x"}, "Argo CD", "remove it from Git"),
        ("labels", {"kustomize.toolkit.fluxcd.io/name": "apps"}, "Flux", "remove it from Git"),
        ("labels", {"kueue.x-k8s.io/queue-name": "gpus"}, "queued by Kueue", "spec.active: false"),
    ],
)
def test_whose_it_is_elsewhere(where: str, value: Told, words: str, remedy: str) -> None:
    job = finished_job(None, **({} if where == "spec" else {where: value}))
    job["spec"] |= value if where == "spec" else {}
    assert remedy in one_of(said(StoredCluster(job), job), words).remedy


def test_a_borrowed_raycluster_is_never_removed_on_its_account() -> None:
    one = rayjob(spec={"clusterSelector": {"ray.io/cluster": "shared"}})
    cause = one_of(said(StoredCluster(one), one), "a RayCluster that it does not own")
    assert "clusterSelector ray.io/cluster=shared" in cause.words
    assert "not removed with it" in cause.remedy


def test_a_finished_rayjob_keeps_its_cluster_by_default() -> None:
    one = rayjob()
    ray = thing("RayCluster", "tune-x", one)
    worker = {**pod_json(containers=[gpu_container(4)]), "metadata": thing("Pod", "w", ray)["metadata"]}
    found = said(StoredCluster(one, ray, worker), one)
    assert "shutdownAfterJobFinishes" in one_of(found, "KubeRay keeps the RayCluster").remedy
    assert "with 4 GPUs" in one_of(found, "it has finished").words
    assert "the RayJob itself stays" in one_of(found, "ttlSecondsAfterFinished removes only its RayCluster").words
    unfinished = rayjob("Retrying")
    assert (
        "its deployment status is Retrying (job RUNNING)"
        in one_of(said(StoredCluster(unfinished), unfinished), "not ended").words
    )


def test_a_service_never_ends_and_a_suspended_one_waits() -> None:
    one = thing("RayCluster", "shared")
    one_of(said(StoredCluster(one), one), "a RayCluster never ends by itself")
    job = thing("Job", "run-7")
    job["spec"] = {"suspend": True}
    assert "Resume it" in one_of(said(StoredCluster(job), job), "it is suspended").remedy


def test_a_child_shows_what_it_is_part_of_and_what_removing_it_would_do() -> None:
    cluster, one = train(COMPLETE, version="v2.1.0")
    jobset = thing("JobSet", "run-7", one, creationTimestamp=ago(hours=6))
    cluster.objects.append(jobset)
    found = said(cluster, jobset)
    cause = found.causes[0]
    assert cause.words.startswith(
        "jobset/run-7 is part of trainjob/run-7: if it is removed alone, Kubeflow Trainer v2.1.0 recreates it"
    )
    assert cause.remedy.endswith("gpukeeper explain team-a/trainjob/run-7")
    assert "<- this one" in found.tree[1]
    one_of(found, "trainjob/run-7: a TrainJob has no TTL in this cluster")


def test_a_pod_of_a_running_job_would_be_recreated() -> None:
    job = thing("Job", "run-7")
    worker = thing("Pod", "w", job)
    assert "its controller recreates it" in said(StoredCluster(job, worker), worker).causes[0].words


def test_an_owner_that_is_unknown_or_may_not_be_read() -> None:
    worker = thing("Pod", "w")
    worker["metadata"]["ownerReferences"] = [
        {"apiVersion": "example.com/v1", "kind": "Dream", "name": "d", "uid": "u", "controller": True}
    ]
    found = said(StoredCluster(worker), worker)
    assert "gpukeeper keeps it" in one_of(found, "Dream d (example.com/v1), a kind that gpukeeper does not know").remedy
    job = thing("Job", "run-7")
    worker = thing("Pod", "w", job)
    cluster = StoredCluster(job, worker)
    cluster.refused["/jobs/run-7"] = forbidden("jobs")
    assert "`get` on it" in one_of(said(cluster, worker), "which may not be read").remedy


def test_a_run_of_a_cronjob_names_it() -> None:
    job = finished_job(None)
    job["metadata"]["ownerReferences"] = [
        {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": "u", "controller": True}
    ]
    assert said(StoredCluster(job), job).tree[0] == "created by CronJob nightly"


def test_the_newest_events_are_reported() -> None:
    job = finished_job(None)
    events = [
        {
            "kind": "Event",
            "metadata": meta(name=f"e{n}", uid=f"e{n}"),
            "involvedObject": {"uid": job["metadata"]["uid"] if n else "another"},
            "type": "Warning",
            "reason": "FailedDelete",
            "message": f"number {n}\nof many",
            "lastTimestamp": ago(minutes=n),
        }
        for n in range(8)
    ]
    found = said(StoredCluster(job, *events), job)
    told = [cause.words for cause in found.causes if cause.words.startswith("Event")]
    assert told[0] == "Event, 1m ago: Warning FailedDelete: number 1 of many"
    assert len(told) == 5


def test_conflicts_in_the_controllers_log_are_told_and_what_cannot_be_read_is_reported() -> None:
    cluster, one = train(COMPLETE)
    manager = pod_json(name="m", namespace="kubeflow-system", labels={"app.kubernetes.io/name": "trainer"})
    cluster.objects.append(manager)
    cluster.logs["m"] = (
        "Operation cannot be fulfilled on trainjobs run-7: the object has been modified\nall fine run-7\n"
    )
    found = said(cluster, one)
    told = [cause.words for cause in found.causes if "Kubeflow Trainer logs: Operation cannot" in cause.words]
    assert len(told) == 1
    cluster.refused = {
        "/log": forbidden("pods/log"),
        "/events": silent(),
        "/clustertrainingruntimes/torch": forbidden(),
    }
    found = said(cluster, one)
    assert [cause for cause in found.causes if "pods/log" in cause.words]
    one_of(found, "its Events could not be read")
    one_of(found, "its runtime could not be read")
    cluster.refused = {"/jobsets": silent()}
    one_of(said(cluster, one), "what is below it could not be listed completely: jobsets in team-a could not be listed")


def test_what_is_gone_or_was_made_again_is_reported() -> None:
    job = finished_job(None)
    found = said(StoredCluster(), job)
    assert found.causes == (Cause("job/run-7 no longer exists"),)
    found = said(StoredCluster(job), job, uid="before")
    assert "another Job with its name" in found.causes[0].words


def test_what_cannot_be_read_is_unknown() -> None:
    job = finished_job(None)
    cluster = StoredCluster(job)
    cluster.refused["/jobs/run-7"] = silent()
    assert isinstance(asked(cluster, job), Unknown)
    cluster.refused["/jobs/run-7"] = forbidden()
    assert isinstance(asked(cluster, job), Unknown)
    assert isinstance(asked(cluster, job, kind="dream"), Unknown)

    async def none(kind: Kind) -> str | Unknown | None:
        return None

    async def silent_discovery(kind: Kind) -> str | Unknown | None:
        return Unknown("silent")

    ref = Ref("kubernetes", "lab", "job", "run-7", "u", "team-a")
    assert isinstance(asyncio.run(diagnose(cluster.as_cluster, none, ref, NOW)), Unknown)
    assert isinstance(asyncio.run(diagnose(cluster.as_cluster, silent_discovery, ref, NOW)), Unknown)


def test_a_wide_tree_is_cut_and_the_asked_one_stays() -> None:
    job = thing("Job", "run-7")
    pods = [thing("Pod", f"p{n:02}", job) for n in range(40)]
    found = said(StoredCluster(job, *pods), pods[39])
    assert sum("pod/" in line for line in found.tree) == 12
    assert "  and 28 more" in found.tree
    assert any("pod/p39" in line and "<- this one" in line for line in found.tree)


def test_references_of_owners_are_by_uid() -> None:
    """A JobSet of the same name that names another uid is no part of it."""
    cluster, one = train(COMPLETE)
    other = thing("JobSet", "run-7")
    other["metadata"]["ownerReferences"] = [reference(one, uid="before")]
    cluster.objects.append(other)
    assert not any("jobset/run-7" in line for line in said(cluster, one).tree)

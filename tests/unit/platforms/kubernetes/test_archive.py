"""How things come back: what was stopped as it was, what was removed as a new object that stands still."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpukeeper.model.decision import Accepted, Evidence, Refused
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.capture import (
    MANIFEST,
    RESTORED_FROM,
    WAS_OWNED,
    Archive,
    ObjectCreation,
    object_creation,
)
from gpukeeper.platforms.kubernetes.kinds.builtin import DEPLOYMENT, JOB, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import QUEUE, Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.pod import GATE, POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB, RAYSERVICE
from gpukeeper.platforms.kubernetes.translate import STOPPED
from tests.unit.platforms.kubernetes.stored import NAMESPACE, Object, StoredApi, refused, with_cluster

PYTORCHJOB = BY_NAME["pytorchjob"]


async def first_version(kind: Kind) -> str | Unknown | None:
    return kind.versions[0]


def ref(kind: Kind, uid: str = "old", name: str = "x") -> Ref:
    return Ref("kubernetes", "test", kind.name, name, uid, NAMESPACE)


def captured(kind: Kind, spec: Object, **meta: Any) -> Evidence:
    """As the API server served it, with all that it adds."""
    group = f"{kind.group}/" if kind.group else ""
    told = {
        "apiVersion": group + kind.versions[0],
        "kind": kind.kind,
        "metadata": {
            "name": "x",
            "namespace": NAMESPACE,
            "uid": "old",
            "resourceVersion": "77",
            "generation": 3,
            "creationTimestamp": "2026-09-01T00:00:00Z",
            "deletionTimestamp": "2026-09-02T00:00:00Z",
            "deletionGracePeriodSeconds": 0,
            "finalizers": ["foregroundDeletion"],
            "selfLink": "/somewhere",
            "generateName": "x-",
            **meta,
        },
        "spec": spec,
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    }
    return Evidence({MANIFEST: json.dumps(told).encode()})


def restore(api: StoredApi, kind: Kind, evidence: Evidence | None, uid: str = "old") -> Any:
    return with_cluster(
        api, lambda cluster: Archive(cluster, first_version).restore_object(kind, ref(kind, uid), evidence)
    )


def body(kind: Kind, spec: Object, **meta: Any) -> Object:
    made = object_creation(kind, captured(kind, spec, **meta))
    assert isinstance(made, ObjectCreation), made
    return made.body


# What was removed.


def test_what_is_made_again_has_nothing_of_the_old_one_but_its_wish() -> None:
    made = body(JOBSET, {"replicatedJobs": []}, labels={"team": "a"}, annotations={"why": "test"})
    assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
    assert made["metadata"] == {
        "name": "x",
        "namespace": NAMESPACE,
        "labels": {"team": "a"},
        "annotations": {"why": "test", RESTORED_FROM: "old", STOPPED: '{"suspend":false}'},
    }


def test_a_job_forgets_the_uid_that_tied_its_pods_to_it() -> None:
    old = {
        "controller-uid": "old",
        "batch.kubernetes.io/controller-uid": "old",
        "job-name": "x",
        "batch.kubernetes.io/job-name": "x",
        "app": "train",
    }
    spec = {
        "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": "old"}},
        "template": {"metadata": {"labels": old}, "spec": {}},
    }
    made = body(JOB, spec, labels=old, annotations={"batch.kubernetes.io/job-tracking": ""})
    assert made["spec"] == {"template": {"metadata": {"labels": {"app": "train"}}, "spec": {}}, "suspend": True}
    assert made["metadata"]["labels"] == {"app": "train"}
    assert "batch.kubernetes.io/job-tracking" not in made["metadata"]["annotations"]


def test_a_selector_of_the_users_own_stays() -> None:
    spec = {"manualSelector": True, "selector": {"matchLabels": {"app": "x"}}, "template": {}}
    assert body(JOB, spec)["spec"]["selector"] == {"matchLabels": {"app": "x"}}


def test_owners_are_noted_and_not_accepted() -> None:
    owners = [{"kind": "CronJob", "name": "nightly", "uid": "u"}]
    meta = body(JOB, {"template": {}}, ownerReferences=owners)["metadata"]
    assert meta["annotations"][WAS_OWNED] == "CronJob/nightly"
    assert "ownerReferences" not in meta


@pytest.mark.parametrize("kind", [JOB, JOBSET, TRAINJOB, RAYCLUSTER], ids=lambda kind: kind.name)
def test_what_can_be_suspended_comes_back_suspended(kind: Kind) -> None:
    made = body(kind, {})
    assert made["spec"] == {"suspend": True}
    assert json.loads(made["metadata"]["annotations"][STOPPED]) == {"suspend": False}


def test_the_training_operators_kinds_come_back_suspended_in_their_run_policy() -> None:
    assert body(PYTORCHJOB, {})["spec"] == {"runPolicy": {"suspend": True}}


@pytest.mark.parametrize("kind", [DEPLOYMENT, STATEFULSET], ids=lambda kind: kind.name)
def test_sets_come_back_without_replicas_and_know_how_many_they_had(kind: Kind) -> None:
    made = body(kind, {"replicas": 4}, annotations={"deployment.kubernetes.io/revision": "2"})
    assert made["spec"] == {"replicas": 0}
    assert json.loads(made["metadata"]["annotations"][STOPPED]) == {"replicas": 4}
    assert "deployment.kubernetes.io/revision" not in made["metadata"]["annotations"]


def test_a_note_of_our_own_stop_before_the_removal_stays() -> None:
    made = body(DEPLOYMENT, {"replicas": 0}, annotations={STOPPED: '{"replicas":3}'})
    assert json.loads(made["metadata"]["annotations"][STOPPED]) == {"replicas": 3}


def test_what_its_owner_had_suspended_gets_no_note() -> None:
    assert STOPPED not in body(JOB, {"suspend": True, "template": {}})["metadata"]["annotations"]


def test_a_pod_comes_back_behind_a_gate_and_on_no_node() -> None:
    spec = {
        "nodeName": "node-3",
        "containers": [],
        "priority": 5,
        "ephemeralContainers": [],
        "schedulingGates": [{"name": "other"}],
    }
    assert body(POD, spec)["spec"] == {"containers": [], "schedulingGates": [{"name": "other"}, {"name": GATE}]}


def test_a_ray_job_is_made_so_that_kuberay_takes_it_suspended() -> None:
    made = body(RAYJOB, {"entrypoint": "python x.py"})
    assert made["spec"] == {"entrypoint": "python x.py", "suspend": True, "shutdownAfterJobFinishes": True}
    assert json.loads(made["metadata"]["annotations"][STOPPED]) == {"suspend": False, "shutdownAfterJobFinishes": False}


@pytest.mark.parametrize(
    ("kind", "spec", "labels", "words"),
    [
        (RAYSERVICE, {}, {}, "starting at once"),
        (RAYJOB, {"clusterSelector": {"a": "b"}}, {}, "shared RayCluster"),
        (RAYJOB, {"deletionStrategy": {"deletionRules": []}}, {}, "does not accept it suspended"),
        (POD, {"containers": []}, {QUEUE: "q"}, "Kueue controls"),
    ],
)
def test_what_cannot_stand_still_is_not_made(kind: Kind, spec: Object, labels: Object, words: str) -> None:
    made = object_creation(kind, captured(kind, spec, labels=labels))
    assert isinstance(made, Refused)
    assert words in made.why
    assert "manifest.json" in made.why


def test_kueue_gets_it_back_only_when_it_is_told_to_go() -> None:
    api = StoredApi()
    assert restore(api, JOB, captured(JOB, {"template": {}}, labels={QUEUE: "gpus"})) == Accepted(resumed=False)
    [(path, made)] = api.objects.items()
    assert (made["metadata"]["labels"], made["spec"]["suspend"]) == ({}, True)
    assert restore(api, JOB, None) == Accepted(resumed=True)
    now = api.objects[path]
    assert (now["metadata"]["labels"], now["spec"]["suspend"]) == ({QUEUE: "gpus"}, True)


def test_the_first_restore_makes_it_and_the_second_sets_it_going() -> None:
    api = StoredApi()
    assert restore(api, DEPLOYMENT, captured(DEPLOYMENT, {"replicas": 2})) == Accepted(resumed=False)
    [(path, made)] = api.objects.items()
    assert made["spec"] == {"replicas": 0}
    assert restore(api, DEPLOYMENT, captured(DEPLOYMENT, {"replicas": 2})) == Accepted(resumed=True)
    assert api.objects[path]["spec"] == {"replicas": 2}
    assert STOPPED not in api.objects[path]["metadata"]["annotations"]
    answer = restore(api, DEPLOYMENT, None)
    assert answer == Refused("it is not stopped: it was already restored")


def test_a_pod_is_let_go_by_the_second_restore() -> None:
    api = StoredApi()
    evidence = captured(POD, {"containers": [], "nodeName": "n"})
    assert restore(api, POD, evidence) == Accepted(resumed=False)
    [(path, made)] = api.objects.items()
    assert made["spec"]["schedulingGates"] == [{"name": GATE}]
    assert restore(api, POD, evidence) == Accepted(resumed=True)
    assert api.objects[path]["spec"]["schedulingGates"] == []
    assert isinstance(restore(api, POD, evidence), Refused)


def test_a_ray_job_gets_its_own_setting_back_when_it_goes() -> None:
    api = StoredApi()
    evidence = captured(RAYJOB, {"entrypoint": "x"})
    restore(api, RAYJOB, evidence)
    assert restore(api, RAYJOB, evidence) == Accepted(resumed=True)
    [made] = api.objects.values()
    assert made["spec"] == {"entrypoint": "x", "suspend": False, "shutdownAfterJobFinishes": False}


def test_a_name_that_is_taken_is_reported() -> None:
    api = StoredApi()
    api.put(JOB, {"metadata": {"name": "x", "uid": "another"}})
    answer = restore(api, JOB, captured(JOB, {"template": {}}))
    assert isinstance(answer, Refused)
    assert "an object with that name exists" in answer.why
    assert api.writes() == []


def test_a_name_that_is_taken_in_that_moment_is_reported() -> None:
    api = StoredApi()
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    api.answers[f"POST {path}"] = [refused(409, "AlreadyExists", "exists")]
    answer = restore(api, JOB, captured(JOB, {"template": {}}))
    assert isinstance(answer, Refused)
    assert "an object with that name exists" in answer.why


def test_a_namespace_that_is_gone_is_reported() -> None:
    api = StoredApi()
    api.namespaces.clear()
    answer = restore(api, JOB, captured(JOB, {"template": {}}))
    assert answer == Refused(f"its namespace {NAMESPACE} does not exist; create it, then try again")


@pytest.mark.parametrize(
    ("said", "kind_of", "words"),
    [
        (refused(403, "Forbidden", "no"), Refused, "may not create jobs.batch"),
        (refused(422, "Invalid", "spec.x is gone"), Refused, "rejects the captured manifest"),
        (refused(504, "Timeout", "slow"), Unknown, "504"),
    ],
)
def test_a_refusal_to_make_it_gives_the_reason(said: Any, kind_of: type, words: str) -> None:
    api = StoredApi()
    api.answers[f"POST /apis/batch/v1/namespaces/{NAMESPACE}/jobs"] = [said]
    answer = restore(api, JOB, captured(JOB, {"template": {}}))
    assert isinstance(answer, kind_of)
    assert words in answer.why  # type: ignore[attr-defined]


@pytest.mark.parametrize("files", [{}, {MANIFEST: b"{"}, {MANIFEST: b'{"kind": "Job"}'}, {MANIFEST: b"[]"}])
def test_evidence_that_cannot_be_read_makes_nothing(files: dict[str, bytes]) -> None:
    api = StoredApi()
    assert isinstance(restore(api, JOB, Evidence(files)), Refused)
    assert api.writes() == []


def test_without_evidence_what_is_gone_stays_gone() -> None:
    assert restore(StoredApi(), JOB, None) == Refused("it no longer exists and no evidence of it was captured")


def test_a_cluster_that_cannot_say_whether_it_is_there_makes_nothing() -> None:
    api = StoredApi()
    path = JOB.path("v1", NAMESPACE, "x")
    api.answers[f"GET {path}"] = [refused(404, "NotFound", "the server could not find the requested resource")]
    assert isinstance(restore(api, JOB, captured(JOB, {"template": {}})), Unknown)
    assert api.writes() == []


# What was stopped.


def test_a_suspension_is_lifted_under_conditions_and_its_note_goes() -> None:
    api = StoredApi()
    noted = {"name": "x", "uid": "old", "annotations": {STOPPED: '{"suspend":false}'}}
    path = api.put(PYTORCHJOB, {"metadata": noted, "spec": {"runPolicy": {"suspend": True}}})
    version = api.objects[path]["metadata"]["resourceVersion"]
    assert restore(api, PYTORCHJOB, None) == Accepted(resumed=True)
    assert api.objects[path]["spec"] == {"runPolicy": {"suspend": False}}
    assert api.objects[path]["metadata"]["annotations"] == {}
    sent = api.body_of(f"PATCH {path}")["metadata"]
    assert (sent["uid"], sent["resourceVersion"]) == ("old", version)


def test_without_a_note_the_evidence_counts() -> None:
    api = StoredApi()
    path = api.put(DEPLOYMENT, {"metadata": {"name": "x", "uid": "old"}, "spec": {"replicas": 0}})
    assert restore(api, DEPLOYMENT, captured(DEPLOYMENT, {"replicas": 3})) == Accepted(resumed=True)
    assert api.objects[path]["spec"] == {"replicas": 3}


def test_a_garbled_note_counts_as_none() -> None:
    api = StoredApi()
    noted = {"name": "x", "uid": "old", "annotations": {STOPPED: "three"}}
    path = api.put(DEPLOYMENT, {"metadata": noted, "spec": {"replicas": 0}})
    answer = restore(api, DEPLOYMENT, None)
    assert isinstance(answer, Refused)
    assert "cannot be read" in answer.why
    assert restore(api, DEPLOYMENT, captured(DEPLOYMENT, {"replicas": 3})) == Accepted(resumed=True)
    assert api.objects[path]["spec"] == {"replicas": 3}


def test_what_another_user_suspended_is_left_to_them() -> None:
    api = StoredApi()
    api.put(JOB, {"metadata": {"name": "x", "uid": "old"}, "spec": {"suspend": True}})
    answer = restore(api, JOB, None)
    assert isinstance(answer, Refused)
    assert "it is not recorded that gpukeeper stopped it" in answer.why
    answer = restore(api, JOB, captured(JOB, {"suspend": True}))
    assert answer == Refused("it was suspended before gpukeeper stopped it, so it stays suspended")
    assert api.writes() == []


def test_what_a_user_resumed_is_not_touched() -> None:
    api = StoredApi()
    api.put(JOB, {"metadata": {"name": "x", "uid": "old"}, "spec": {"suspend": False}})
    answer = restore(api, JOB, captured(JOB, {}))
    assert answer == Refused("it is not stopped: it was already restored")
    assert api.writes() == []


def test_a_change_in_the_same_moment_wins() -> None:
    api = StoredApi()
    noted = {"name": "x", "uid": "old", "annotations": {STOPPED: '{"suspend":false}'}}
    path = api.put(JOB, {"metadata": noted, "spec": {"suspend": True}})
    once = [f"PATCH {path}"]

    def resume(call: str) -> None:
        if call in once:
            once.remove(call)
            api.objects[path]["spec"] = {"suspend": False}
            api.touch(path)

    api.before = resume
    assert restore(api, JOB, None) == Refused("it is not stopped: it was already restored")
    assert len(api.writes()) == 1


def test_what_its_controller_writes_meanwhile_does_not_keep_it_down() -> None:
    api = StoredApi()
    noted = {"name": "x", "uid": "old", "annotations": {STOPPED: '{"suspend":false}'}}
    path = api.put(JOB, {"metadata": noted, "spec": {"suspend": True}})
    once = [f"PATCH {path}"]

    def update(call: str) -> None:
        if call in once:
            once.remove(call)
            api.touch(path)

    api.before = update
    assert restore(api, JOB, None) == Accepted(resumed=True)
    assert api.objects[path]["spec"] == {"suspend": False}
    api.objects[path]["spec"] = {"suspend": True}
    api.before = lambda call: api.touch(path) if call.startswith("PATCH") else None
    assert restore(api, JOB, captured(JOB, {})) == Refused("it keeps changing; try again later")


def test_what_is_being_removed_is_not_brought_back() -> None:
    api = StoredApi()
    gone = {"name": "x", "uid": "old", "deletionTimestamp": "2026-09-01T00:00:00Z"}
    api.put(JOB, {"metadata": gone, "spec": {"suspend": True}})
    assert restore(api, JOB, None) == Refused("it is being removed")

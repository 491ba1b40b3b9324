"""What is sent to a cluster when something is removed, stopped, trimmed or freed, and what its answers mean."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec
import pytest

from gpukeeper.clients.kubernetes.wire import Pod, Root
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.subject import Gone, Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.acts import ClusterActions, ReadAgain
from gpukeeper.platforms.kubernetes.kinds.builtin import DEPLOYMENT, JOB, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME, KINDS
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB, RAYSERVICE
from gpukeeper.platforms.kubernetes.translate import STOPPED
from tests.unit.platforms.kubernetes.stored import MISFIT, NAMESPACE, Object, StoredApi, refused, with_cluster

T = TypeVar("T")
AT = datetime(2026, 9, 1, 12, tzinfo=UTC)
PYTORCHJOB = BY_NAME["pytorchjob"]
BUDGET = "Cannot evict pod as it would violate the pod's disruption budget."


async def first_version(kind: Kind) -> str | Unknown | None:
    return kind.versions[0]


def act(api: StoredApi, what: Callable[[ClusterActions], Awaitable[T]]) -> T:
    return with_cluster(api, lambda cluster: what(ClusterActions(cluster, first_version)))


def seen(api: StoredApi, kind: Kind, path: str, state: State = State.ENDED, **facts: Any) -> Subject:
    """As a look at it gives, of what matters here."""
    meta = api.objects[path]["metadata"]
    ref = Ref("kubernetes", "test", kind.name, meta["name"], meta["uid"], meta["namespace"])
    now = Seen(ref, str(meta["generation"]), meta["resourceVersion"], AT)
    return Subject(seen=now, state=state, created=AT - timedelta(days=1), **facts)


def decoded(api: StoredApi, path: str) -> Root:
    return msgspec.json.decode(json.dumps(api.objects[path]), type=Root)


def pod_of(api: StoredApi, path: str) -> Pod:
    return msgspec.json.decode(json.dumps(api.objects[path]), type=Pod)


def looks(api: StoredApi, kind: Kind, path: str, state: State = State.ENDED, **facts: Any) -> ReadAgain:
    async def read() -> Subject | Gone | Unknown:
        return seen(api, kind, path, state, **facts)

    return read


async def never() -> Subject | Gone | Unknown:
    raise AssertionError("nothing was to be looked at again")


def remove(
    api: StoredApi,
    kind: Kind,
    fresh: Subject,
    again: ReadAgain = never,
) -> Any:
    return act(api, lambda acts: acts.remove(kind, fresh, again))


# Removing.


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_delete_names_uid_version_and_propagation_and_no_grace(kind: Kind) -> None:
    api = StoredApi()
    path = api.put(kind, {"metadata": {"name": "x"}})
    fresh = seen(api, kind, path)
    assert remove(api, kind, fresh) == Accepted()
    assert api.body_of(f"DELETE {path}") == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "uid-x", "resourceVersion": fresh.seen.version},
        "propagationPolicy": "Foreground" if kind is JOBSET else "Background",
    }


def test_what_is_being_removed_gets_no_second_delete() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x", "deletionTimestamp": "2026-09-01T00:00:00Z"}})
    assert remove(api, JOB, seen(api, JOB, path, State.REMOVING)) == Changed("its removal is already in progress")
    assert api.asked == []


def test_a_name_that_was_taken_again_is_kept() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path)
    api.put(JOB, {"metadata": {"name": "x", "uid": "another"}})
    assert remove(api, JOB, fresh, looks(api, JOB, path)) == Changed("another object has its name now")
    assert path in api.objects
    assert len(api.writes()) == 1


def test_an_unrelated_update_is_read_and_does_not_keep_it() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path)
    api.touch(path, seen="by somebody")
    newer = api.objects[path]["metadata"]["resourceVersion"]
    assert remove(api, JOB, fresh, looks(api, JOB, path)) == Accepted()
    assert api.body_of(f"DELETE {path}")["preconditions"] == {"uid": "uid-x", "resourceVersion": newer}


def test_a_fact_that_changed_keeps_it_and_is_named() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path, live_children=0)
    api.touch(path)
    answer = remove(api, JOB, fresh, looks(api, JOB, path, live_children=2))
    assert answer == Changed("its live_children changed since it was read")
    assert path in api.objects


def test_a_removal_that_began_meanwhile_is_left_alone() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path)
    api.touch(path)
    answer = remove(api, JOB, fresh, looks(api, JOB, path, State.REMOVING))
    assert answer == Changed("its removal is already in progress")
    assert path in api.objects


@pytest.mark.parametrize("state", [State.ENDED, State.RUNNING])
def test_updates_without_end_cannot_keep_what_ended_and_do_keep_what_runs(state: State) -> None:
    api = StoredApi()
    path = api.put(JOBSET, {"metadata": {"name": "x"}})
    fresh = seen(api, JOBSET, path, state)

    def update(call: str) -> None:
        if call.startswith("DELETE"):
            api.touch(path)

    api.before = update
    answer = remove(api, JOBSET, fresh, looks(api, JOBSET, path, state))
    assert len(api.writes()) == 4
    conditions = [body["preconditions"] for call, body in zip(api.asked, api.bodies, strict=True) if "DELETE" in call]
    assert all("resourceVersion" in one for one in conditions[:3])
    if state is State.ENDED:
        assert answer == Accepted()
        assert conditions[3] == {"uid": "uid-x"}
    else:
        assert answer == Changed("it changed since it was read")
        assert "resourceVersion" in conditions[3]
        assert path in api.objects


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (Unknown("nobody answers"), Unknown("nobody answers")),
        (Gone(Ref("kubernetes", "test", "job", "x", "uid-x", NAMESPACE), AT), Changed("it is already gone")),
    ],
)
def test_a_read_after_a_conflict_that_finds_nothing_ends_it(found: Gone | Unknown, answer: object) -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path)
    api.touch(path)

    async def read() -> Subject | Gone | Unknown:
        return found

    assert remove(api, JOB, fresh, read) == answer
    assert path in api.objects


def test_what_is_gone_already_was_not_removed_by_us() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path)
    del api.objects[path]
    assert remove(api, JOB, fresh) == Changed("it is already gone")


@pytest.mark.parametrize(
    ("said", "kind_of", "words"),
    [
        (refused(403, "Forbidden", "jobs is forbidden"), Refused, "may not delete jobs.batch in namespace team-a"),
        (refused(401, "Unauthorized", "Unauthorized"), Refused, "does not accept the credentials of gpukeeper"),
        (refused(400, "BadRequest", "what?"), Refused, "This is a bug in gpukeeper"),
        (refused(422, "Invalid", "no", causes=[{"reason": "FieldValueInvalid"}]), Refused, "bug in gpukeeper"),
        (
            refused(400, "", 'admission webhook "x" denied the request: keep'),
            Refused,
            "admission policy of the cluster",
        ),
        (refused(500, "InternalError", "etcd"), Unknown, "500"),
        (refused(503, "ServiceUnavailable", "later"), Unknown, "503"),
        (refused(504, "Timeout", "too slow"), Unknown, "504"),
        (refused(404, "NotFound", "the server could not find the requested resource"), Unknown, "does not prove"),
        ("<html>bad gateway</html>", Unknown, "502"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_each_refusal_of_a_delete_shows_what_it_is(said: Any, kind_of: type, words: str) -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    api.answers[f"DELETE {path}"] = [said]
    answer = remove(api, JOB, seen(api, JOB, path))
    assert isinstance(answer, kind_of)
    assert words in answer.why  # type: ignore[attr-defined]
    assert api.writes() == [f"DELETE {path}"]


def test_a_busy_server_did_nothing() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    api.answers[f"DELETE {path}"] = [refused(429, "TooManyRequests", "slow down")] * 4
    answer = remove(api, JOB, seen(api, JOB, path))
    assert isinstance(answer, Refused)
    assert "overloaded and did nothing" in answer.why


@pytest.mark.parametrize("version", [None, Unknown("nobody answers")])
def test_a_kind_that_is_not_served_is_not_requested(version: Unknown | None) -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    fresh = seen(api, JOB, path)

    async def serves(_kind: Kind) -> str | Unknown | None:
        return version

    answer = with_cluster(api, lambda cluster: ClusterActions(cluster, serves).remove(JOB, fresh, never))
    assert isinstance(answer, Refused if version is None else Unknown)
    assert api.asked == []


# Bare pods.


def a_pod(name: str = "p", phase: str = "Running", owner: tuple[str, str] | None = None, **meta: Any) -> Object:
    owners = [{"kind": owner[0], "name": owner[1], "uid": f"uid-{owner[1]}", "controller": True}] if owner else []
    return {"metadata": {"name": name, "ownerReferences": owners, **meta}, "status": {"phase": phase}}


@pytest.mark.parametrize("state", [State.RUNNING, State.CREATED, State.PAUSED])
def test_a_pod_that_is_not_over_is_evicted_under_the_same_conditions(state: State) -> None:
    api = StoredApi()
    path = api.put(POD, a_pod())
    fresh = seen(api, POD, path, state)
    assert remove(api, POD, fresh) == Accepted()
    assert api.writes() == [f"POST {path}/eviction"]
    sent = api.body_of(f"POST {path}/eviction")
    assert sent["deleteOptions"] == {"preconditions": {"uid": "uid-p", "resourceVersion": fresh.seen.version}}
    assert (sent["apiVersion"], sent["metadata"]) == ("policy/v1", {"name": "p", "namespace": NAMESPACE})


def test_a_pod_whose_state_is_unknown_is_never_plainly_deleted() -> None:
    api = StoredApi()
    path = api.put(POD, a_pod())
    fresh = msgspec.structs.replace(seen(api, POD, path), state=Unknown("its node does not answer"))
    remove(api, POD, fresh)
    assert api.writes() == [f"POST {path}/eviction"]


def test_a_stop_of_a_pod_is_an_eviction() -> None:
    api = StoredApi()
    path = api.put(POD, a_pod())
    fresh = seen(api, POD, path, State.RUNNING)
    assert act(api, lambda acts: acts.stop(POD, fresh, pod_of(api, path))) == Accepted()
    assert api.writes() == [f"POST {path}/eviction"]


def test_a_disruption_budget_means_not_now() -> None:
    api = StoredApi()
    path = api.put(POD, a_pod())
    budget = refused(429, "TooManyRequests", BUDGET, causes=[{"reason": "DisruptionBudget"}])
    api.answers[f"POST {path}/eviction"] = [budget]
    answer = remove(api, POD, seen(api, POD, path, State.RUNNING))
    assert answer == Refused(f"a PodDisruptionBudget does not allow the eviction now: {BUDGET}")
    assert len(api.writes()) == 1


def test_two_budgets_on_one_pod_are_told_to_an_admin() -> None:
    api = StoredApi()
    path = api.put(POD, a_pod())
    words = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
    api.answers[f"POST {path}/eviction"] = [refused(500, "InternalError", words)]
    answer = remove(api, POD, seen(api, POD, path, State.RUNNING))
    assert isinstance(answer, Refused)
    assert "more than one PodDisruptionBudget" in answer.why


# Stopping.


def stop(api: StoredApi, kind: Kind, path: str, again: ReadAgain | None = None) -> Any:
    fresh, root = seen(api, kind, path, State.RUNNING), decoded(api, path)
    return act(api, lambda acts: acts.stop(kind, fresh, root, again))


@pytest.mark.parametrize("kind", [JOB, JOBSET, TRAINJOB, RAYCLUSTER], ids=lambda kind: kind.name)
def test_a_suspension_is_one_write_with_conditions_and_a_note(kind: Kind) -> None:
    api = StoredApi()
    path = api.put(kind, {"metadata": {"name": "x"}, "spec": {}})
    version = api.objects[path]["metadata"]["resourceVersion"]
    assert stop(api, kind, path) == Accepted()
    assert api.writes() == [f"PATCH {path}"]
    sent = api.body_of(f"PATCH {path}")
    assert (sent["metadata"]["uid"], sent["metadata"]["resourceVersion"]) == ("uid-x", version)
    assert api.objects[path]["spec"] == {"suspend": True}
    note = {"suspend": False, "incarnation": "1", "generation": api.objects[path]["metadata"]["generation"]}
    assert json.loads(api.objects[path]["metadata"]["annotations"][STOPPED]) == note


def test_kinds_of_the_training_operator_are_suspended_in_their_run_policy() -> None:
    api = StoredApi()
    path = api.put(PYTORCHJOB, {"metadata": {"name": "x"}, "spec": {"runPolicy": {"backoffLimit": 3}}})
    assert stop(api, PYTORCHJOB, path) == Accepted()
    assert api.objects[path]["spec"] == {"runPolicy": {"backoffLimit": 3, "suspend": True}}


def test_a_suspension_of_what_changed_is_refused_by_the_server() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}, "spec": {}})
    fresh, root = seen(api, JOB, path, State.RUNNING), decoded(api, path)
    api.touch(path)
    answer = act(api, lambda acts: acts.stop(JOB, fresh, root))
    assert answer == Changed("it changed since it was read")
    assert api.objects[path]["spec"] == {}


def test_a_suspension_looks_again_where_it_can() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}, "spec": {}})
    fresh, root = seen(api, JOB, path, State.RUNNING), decoded(api, path)
    api.touch(path)
    again = looks(api, JOB, path, State.RUNNING)
    assert act(api, lambda acts: acts.stop(JOB, fresh, root, again)) == Accepted()


def test_scaling_to_zero_writes_the_count_down_first() -> None:
    api = StoredApi()
    path = api.put(DEPLOYMENT, {"metadata": {"name": "x"}, "spec": {"replicas": 3}})
    assert stop(api, DEPLOYMENT, path) == Accepted()
    assert api.writes() == [f"PATCH {path}", f"PATCH {path}/scale"]
    assert "spec" not in api.body_of(f"PATCH {path}")
    assert api.objects[path]["spec"] == {"replicas": 0}
    # The real server counts annotations of a Deployment, too: one generation more than this one makes.
    note = {"replicas": 3, "incarnation": "1", "generation": api.objects[path]["metadata"]["generation"] + 1}
    assert json.loads(api.objects[path]["metadata"]["annotations"][STOPPED]) == note
    assert set(api.body_of(f"PATCH {path}/scale")["metadata"]) == {"uid", "resourceVersion"}


def test_a_count_that_is_not_written_is_one() -> None:
    api = StoredApi()
    path = api.put(STATEFULSET, {"metadata": {"name": "x"}, "spec": {}})
    assert stop(api, STATEFULSET, path) == Accepted()
    note = {"replicas": 1, "incarnation": "1", "generation": api.objects[path]["metadata"]["generation"]}
    assert json.loads(api.objects[path]["metadata"]["annotations"][STOPPED]) == note


def test_its_controllers_own_write_in_between_does_not_undo_the_stop() -> None:
    api = StoredApi()
    path = api.put(DEPLOYMENT, {"metadata": {"name": "x"}, "spec": {"replicas": 3}})
    once = [f"PATCH {path}/scale"]

    def update(call: str) -> None:
        if call in once:
            once.remove(call)
            api.touch(path)

    api.before = update
    assert stop(api, DEPLOYMENT, path) == Accepted()
    assert api.objects[path]["spec"] == {"replicas": 0}


def test_whoever_scales_in_the_same_moment_wins_and_no_note_stays() -> None:
    api = StoredApi()
    path = api.put(DEPLOYMENT, {"metadata": {"name": "x"}, "spec": {"replicas": 3}})
    once = [f"PATCH {path}/scale"]

    def update(call: str) -> None:
        if call in once:
            once.remove(call)
            api.objects[path]["spec"]["replicas"] = 5
            api.objects[path]["metadata"]["generation"] += 1
            api.touch(path)

    api.before = update
    assert stop(api, DEPLOYMENT, path) == Changed("it was changed at the same time")
    assert api.objects[path]["spec"] == {"replicas": 5}
    assert api.objects[path]["metadata"]["annotations"] == {}


def test_without_the_right_to_scale_no_note_stays() -> None:
    api = StoredApi()
    path = api.put(DEPLOYMENT, {"metadata": {"name": "x"}, "spec": {"replicas": 3}})
    api.answers[f"PATCH {path}/scale"] = [refused(403, "Forbidden", "no")]
    answer = stop(api, DEPLOYMENT, path)
    assert isinstance(answer, Refused)
    assert "patch deployments/scale.apps in namespace team-a" in answer.why
    assert api.objects[path]["metadata"]["annotations"] == {}


def test_a_stop_whose_answer_is_lost_keeps_its_note() -> None:
    api = StoredApi()
    path = api.put(DEPLOYMENT, {"metadata": {"name": "x"}, "spec": {"replicas": 3}})
    api.answers[f"PATCH {path}/scale"] = [refused(504, "Timeout", "too slow")]
    assert isinstance(stop(api, DEPLOYMENT, path), Unknown)
    assert STOPPED in api.objects[path]["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("kind", "told", "words"),
    [
        (JOB, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}, "Kueue manages its suspension"),
        (
            STATEFULSET,
            {"spec": {"replicas": 2, "persistentVolumeClaimRetentionPolicy": {"whenScaled": "Delete"}}},
            "lose its volumes",
        ),
        (RAYJOB, {"spec": {"clusterSelector": {"ray.io/cluster": "shared"}}}, "a shared RayCluster"),
        (RAYJOB, {"spec": {}}, "shutdownAfterJobFinishes"),
        (RAYSERVICE, {}, "can only be removed"),
    ],
)
def test_what_must_not_be_stopped_is_refused_without_a_write(kind: Kind, told: Object, words: str) -> None:
    api = StoredApi()
    path = api.put(kind, {**told, "metadata": {"name": "x", **told.get("metadata", {})}})
    answer = stop(api, kind, path)
    assert isinstance(answer, Refused)
    assert words in answer.why
    assert api.asked == []


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(JOB, {"suspend": True}), (PYTORCHJOB, {"runPolicy": {"suspend": True}}), (DEPLOYMENT, {"replicas": 0})],
)
def test_what_is_stopped_is_not_stopped_again(kind: Kind, spec: Object) -> None:
    api = StoredApi()
    path = api.put(kind, {"metadata": {"name": "x"}, "spec": spec})
    assert stop(api, kind, path) == Changed("it is already stopped")
    assert api.asked == []


def test_a_ray_job_whose_cluster_goes_with_it_is_suspended() -> None:
    api = StoredApi()
    path = api.put(RAYJOB, {"metadata": {"name": "x"}, "spec": {"shutdownAfterJobFinishes": True}})
    assert stop(api, RAYJOB, path) == Accepted()
    assert api.objects[path]["spec"]["suspend"] is True


def test_another_root_of_the_name_is_not_stopped() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}, "spec": {}})
    fresh = seen(api, JOB, path, State.RUNNING)
    api.put(JOB, {"metadata": {"name": "x", "uid": "another"}, "spec": {}})
    root = decoded(api, path)
    assert act(api, lambda acts: acts.stop(JOB, fresh, root)) == Changed("another object has its name now")
    assert api.asked == []


def test_a_stop_that_did_not_come_about_leaves_no_note() -> None:
    api = StoredApi()
    noted = {"name": "x", "annotations": {STOPPED: '{"replicas":3}', "team": "a"}}
    path = api.put(DEPLOYMENT, {"metadata": noted, "spec": {"replicas": 3}})
    ref = seen(api, DEPLOYMENT, path).ref
    act(api, lambda acts: acts.revert_stop(DEPLOYMENT, ref))
    assert api.objects[path]["metadata"]["annotations"] == {"team": "a"}


def test_the_note_of_what_is_stopped_stays() -> None:
    api = StoredApi()
    path = api.put(
        DEPLOYMENT,
        {"metadata": {"name": "x", "annotations": {STOPPED: '{"replicas":3}'}}, "spec": {"replicas": 0}},
    )
    ref = seen(api, DEPLOYMENT, path).ref
    act(api, lambda acts: acts.revert_stop(DEPLOYMENT, ref))
    assert api.writes() == []


# Trimming.


def trim(api: StoredApi, kind: Kind, path: str, pods: list[str], *, everything: bool = False, **facts: Any) -> Any:
    fresh, root = seen(api, kind, path, **facts), decoded(api, path)
    below = [pod_of(api, one) for one in pods]
    return act(api, lambda acts: acts.trim(kind, fresh, root, below, everything=everything))


@pytest.mark.parametrize(("everything", "policy"), [(False, "Running"), (True, "All")])
def test_the_training_operator_is_told_to_clean_up(everything: bool, policy: str) -> None:
    api = StoredApi()
    path = api.put(PYTORCHJOB, {"metadata": {"name": "x"}, "spec": {"runPolicy": {"suspend": False}}})
    version = api.objects[path]["metadata"]["resourceVersion"]
    assert trim(api, PYTORCHJOB, path, [], everything=everything) == Accepted()
    assert api.objects[path]["spec"]["runPolicy"] == {"suspend": False, "cleanPodPolicy": policy}
    assert api.body_of(f"PATCH {path}")["metadata"] == {"uid": "uid-x", "resourceVersion": version}


def test_an_operator_that_does_not_clean_up_is_named() -> None:
    api = StoredApi()
    path = api.put(PYTORCHJOB, {"metadata": {"name": "x"}, "spec": {"runPolicy": {"cleanPodPolicy": "Running"}}})
    answer = trim(api, PYTORCHJOB, path, [])
    assert isinstance(answer, Refused)
    assert "check that it runs" in answer.why
    assert api.asked == []


def a_ray_job(api: StoredApi, owner: str = "uid-x", **spec: Any) -> tuple[str, str]:
    path = api.put(RAYJOB, {"metadata": {"name": "x"}, "spec": spec, "status": {"rayClusterName": "x-abc"}})
    owners = [{"kind": "RayJob", "name": "x", "uid": owner, "controller": True}]
    return path, api.put(RAYCLUSTER, {"metadata": {"name": "x-abc", "ownerReferences": owners}, "spec": {}})


def test_the_cluster_of_a_ray_job_is_suspended_under_its_own_conditions() -> None:
    api = StoredApi()
    path, cluster = a_ray_job(api)
    version = api.objects[cluster]["metadata"]["resourceVersion"]
    assert trim(api, RAYJOB, path, [api.put(POD, a_pod())]) == Accepted()
    assert api.writes() == [f"PATCH {cluster}"]
    sent = api.body_of(f"PATCH {cluster}")
    assert (sent["metadata"]["uid"], sent["metadata"]["resourceVersion"]) == ("uid-x-abc", version)
    assert api.objects[cluster]["spec"] == {"suspend": True}


def test_a_borrowed_ray_cluster_is_never_touched() -> None:
    api = StoredApi()
    path, _ = a_ray_job(api, owner="somebody")
    assert trim(api, RAYJOB, path, [api.put(POD, a_pod())]) == Refused("RayCluster x-abc is not controlled by it")
    path, _ = a_ray_job(api, clusterSelector={"ray.io/cluster": "x-abc"})
    assert isinstance(trim(api, RAYJOB, path, [api.put(POD, a_pod())]), Refused)
    assert api.writes() == []


def test_living_pods_of_a_job_that_is_over_are_evicted_and_the_job_stays() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    alive = api.put(POD, a_pod("alive", owner=("Job", "x")))
    dead = api.put(POD, a_pod("dead", "Failed", owner=("Job", "x")))
    assert trim(api, JOB, path, [alive, dead]) == Accepted()
    assert api.writes() == [f"POST {alive}/eviction"]


def test_everything_takes_the_ended_pods_too_each_under_its_own_conditions() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    alive = api.put(POD, a_pod("alive"))
    dead = api.put(POD, a_pod("dead", "Failed"))
    version = api.objects[dead]["metadata"]["resourceVersion"]
    assert trim(api, JOB, path, [alive, dead], everything=True) == Accepted()
    assert api.writes() == [f"POST {alive}/eviction", f"DELETE {dead}"]
    sent = api.body_of(f"DELETE {dead}")
    assert sent["preconditions"] == {"uid": "uid-dead", "resourceVersion": version}
    assert sent["propagationPolicy"] == "Background"
    assert path in api.objects


def test_the_jobs_of_a_jobset_that_is_over_are_suspended() -> None:
    api = StoredApi()
    path = api.put(JOBSET, {"metadata": {"name": "x"}})
    owners = [{"kind": "JobSet", "name": "x", "uid": "uid-x", "controller": True}]
    job = api.put(JOB, {"metadata": {"name": "x-node-0", "ownerReferences": owners}, "spec": {}})
    pods = [api.put(POD, a_pod(name, owner=("Job", "x-node-0"))) for name in ("a", "b")]
    assert trim(api, JOBSET, path, pods) == Accepted()
    assert api.writes() == [f"PATCH {job}"]
    assert api.objects[job]["spec"] == {"suspend": True}


def test_a_train_job_is_suspended_before_its_jobset_or_it_would_be_resumed() -> None:
    api = StoredApi()
    path = api.put(TRAINJOB, {"metadata": {"name": "x"}, "spec": {}})
    owners = [{"kind": "TrainJob", "name": "x", "uid": "uid-x", "controller": True}]
    jobset = api.put(JOBSET, {"metadata": {"name": "x", "uid": "js", "ownerReferences": owners}, "spec": {}})
    assert trim(api, TRAINJOB, path, [api.put(POD, a_pod())]) == Accepted()
    assert api.writes() == [f"PATCH {path}", f"PATCH {jobset}"]
    assert api.objects[path]["spec"] == api.objects[jobset]["spec"] == {"suspend": True}


def test_nothing_is_picked_off_a_root_that_goes_on() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    answer = trim(api, JOB, path, [api.put(POD, a_pod())], everything=True, state=State.RUNNING)
    assert isinstance(answer, Changed)
    assert api.asked == []


def test_a_kind_without_a_gentle_lever_reports_that_it_must_go_itself() -> None:
    api = StoredApi()
    path = api.put(RAYSERVICE, {"metadata": {"name": "x"}})
    answer = trim(api, RAYSERVICE, path, [api.put(POD, a_pod())])
    assert answer == Refused("only the removal of a RayService ends its running pods")


def test_a_pod_that_changed_is_passed_over_and_a_missing_right_is_reported() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    one, two = api.put(POD, a_pod("one", "Failed")), api.put(POD, a_pod("two", "Failed"))
    api.answers[f"DELETE {one}"] = [refused(409, "Conflict", "changed")]
    assert trim(api, JOB, path, [one, two], everything=True) == Accepted()
    two = api.put(POD, a_pod("two", "Failed"))
    api.answers[f"DELETE {one}"] = [refused(403, "Forbidden", "no")]
    answer = trim(api, JOB, path, [one, two], everything=True)
    assert isinstance(answer, Refused)
    assert "may not delete pods in namespace team-a" in answer.why


@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_a_pod_that_is_going_already_is_left_alone(phase: str) -> None:
    api = StoredApi()
    path, going = api.put(JOB, {"metadata": {"name": "x"}}), a_pod("going", phase, owner=("Job", "x"))
    going["metadata"]["deletionTimestamp"] = "2026-09-01T00:00:00Z"
    assert trim(api, JOB, path, [api.put(POD, going)], everything=True) == Changed("no pods are left below it")
    assert api.writes() == []


def test_where_nothing_is_left_nothing_is_done() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    assert trim(api, JOB, path, []) == Changed("no pods are left below it")


# Releasing.


def stuck(api: StoredApi, *finalizers: str, deleted: bool = True) -> str:
    meta: Object = {"name": "x", "finalizers": list(finalizers)}
    meta |= {"deletionTimestamp": "2026-09-01T00:00:00Z"} if deleted else {}
    return api.put(TRAINJOB, {"metadata": meta})


def release(api: StoredApi, path: str, root: Root | None = None, finalizer: str = "foregroundDeletion") -> Any:
    fresh = seen(api, TRAINJOB, path, State.REMOVING)
    now = root or decoded(api, path)
    return act(api, lambda acts: acts.release(TRAINJOB, fresh, now, finalizer))


def test_exactly_one_finalizer_is_taken_off_after_tests_of_uid_version_and_place() -> None:
    api = StoredApi()
    path = stuck(api, "example.com/mine", "foregroundDeletion")
    version = api.objects[path]["metadata"]["resourceVersion"]
    assert release(api, path) == Accepted()
    assert api.body_of(f"PATCH {path}") == [
        {"op": "test", "path": "/metadata/uid", "value": "uid-x"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "test", "path": "/metadata/finalizers/1", "value": "foregroundDeletion"},
        {"op": "remove", "path": "/metadata/finalizers/1"},
    ]
    assert api.objects[path]["metadata"]["finalizers"] == ["example.com/mine"]


def test_a_finalizer_stays_on_what_nobody_removes() -> None:
    api = StoredApi()
    path = stuck(api, "foregroundDeletion", deleted=False)
    assert isinstance(release(api, path), Refused)
    assert api.asked == []


def test_a_finalizer_that_is_not_there_is_not_looked_for() -> None:
    api = StoredApi()
    assert release(api, stuck(api, "example.com/mine")) == Changed(
        "the finalizer foregroundDeletion was already removed"
    )
    assert api.asked == []


def test_a_finalizer_that_went_meanwhile_refuses_the_whole_patch() -> None:
    api = StoredApi()
    path = stuck(api, "foregroundDeletion", "example.com/mine")
    before = decoded(api, path)
    api.objects[path]["metadata"]["finalizers"].pop(0)
    api.touch(path)
    assert release(api, path, before) == Changed("the finalizer foregroundDeletion was already removed")
    assert api.objects[path]["metadata"]["finalizers"] == ["example.com/mine"]


def test_a_controller_in_circles_cannot_keep_its_finalizer() -> None:
    api = StoredApi()
    path = stuck(api, "foregroundDeletion")
    before = decoded(api, path)
    api.touch(path)
    assert release(api, path, before) == Accepted()
    assert api.objects[path]["metadata"]["finalizers"] == []


def test_a_change_at_every_try_gives_up() -> None:
    api = StoredApi()
    path = stuck(api, "foregroundDeletion")
    api.before = lambda call: api.touch(path) if call.startswith("PATCH") else None
    assert release(api, path) == Changed("it changed since it was read")
    assert api.objects[path]["metadata"]["finalizers"] == ["foregroundDeletion"]
    assert len(api.writes()) == 4


def test_a_failed_test_is_a_change_and_a_refused_value_is_our_bug() -> None:
    api = StoredApi()
    path = stuck(api, "foregroundDeletion")
    api.answers[f"PATCH {path}"] = [refused(422, "Invalid", MISFIT)] * 4
    assert isinstance(release(api, path), Changed)
    api.answers[f"PATCH {path}"] = [refused(422, "Invalid", "x is invalid", causes=[{"reason": "FieldValueForbidden"}])]
    answer = release(api, path)
    assert isinstance(answer, Refused)
    assert "bug in gpukeeper" in answer.why

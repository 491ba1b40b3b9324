"""What keeps a removal from ending, and when it is proven that nobody will act. Everything else waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.model.subject import Blocked
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.finalizers import (
    FINALIZERS,
    FOREGROUND,
    JOB_TRACKING,
    KUEUE,
    NODE,
    ORPHAN,
    Alive,
    ControllerState,
    Down,
    blocked,
    controllers_of,
)
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import BUILT_IN, TreeNode
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import CONTROLLER as KUBERAY
from gpukeeper.platforms.kubernetes.kinds.ray import RAYJOB
from gpukeeper.platforms.kubernetes.owners import Descendants
from tests.unit.platforms.kubernetes.examples import NOW, UID, ago, pod, root

NONE = Descendants()
RAY_FINALIZER = "ray.io/rayjob-finalizer"
GONE = Down("no Deployment kuberay-operator in any namespace")


def removed(*finalizers: str, since: str = ago(minutes=10), **parts: Any) -> Any:
    return root(finalizers=list(finalizers), deletionTimestamp=since, deletionGracePeriodSeconds=0, **parts).metadata


def child(kind: str = "JobSet", *, made: str = ago(seconds=2), **parts: Any) -> Descendants:
    node = TreeNode(BY_NAME[kind.lower()], root(name="run-7", uid="child", creationTimestamp=made, **parts))
    return Descendants({UID: (node,)})


def rayjob(controller_state: ControllerState | None, **parts: Any) -> Blocked | None:
    known = {} if controller_state is None else {KUBERAY.name: controller_state}
    return blocked(removed(RAY_FINALIZER, **parts), RAYJOB, NONE, known, NOW)


@pytest.mark.parametrize("since", [ago(seconds=0), ago(seconds=59), ago(seconds=60), ago(seconds=-30)])
def test_a_removal_within_its_grace_is_not_blocked(since: str) -> None:
    assert rayjob(GONE, since=since) is None


def test_what_is_not_being_removed_is_not_blocked() -> None:
    assert blocked(root(finalizers=[RAY_FINALIZER]).metadata, RAYJOB, NONE, {KUBERAY.name: GONE}, NOW) is None
    assert rayjob(GONE, since="0001-01-01T00:00:00Z") is None


def test_a_grace_is_counted_in_the_time_of_the_removal_and_not_in_since() -> None:
    said = root(finalizers=[RAY_FINALIZER], deletionTimestamp=ago(seconds=61), deletionGracePeriodSeconds=30).metadata
    found = blocked(said, RAYJOB, NONE, {}, NOW)
    assert found is not None
    assert found.since == NOW - timedelta(seconds=91)


def test_a_controller_that_is_gone_proves_it() -> None:
    found = rayjob(GONE)
    assert found == Blocked(
        RAY_FINALIZER,
        NOW - timedelta(minutes=10),
        True,
        "it belongs to KubeRay, which stops the Ray job first, and KubeRay does not run"
        " (no Deployment kuberay-operator in any namespace)",
    )


@pytest.mark.parametrize("controller_state", [Unknown("may not list deployments"), None])
def test_a_controller_that_cannot_be_read_proves_nothing(controller_state: ControllerState | None) -> None:
    found = rayjob(controller_state)
    assert found is not None
    assert isinstance(found.proven, Unknown)


def test_a_controller_that_runs_must_act_itself() -> None:
    found = rayjob(Alive("1 of 1 ready", "v1.4.2"))
    assert found is not None
    assert found.proven is False
    assert "KubeRay runs" in found.why


def test_a_finalizer_that_is_unknown_is_never_proven() -> None:
    found = blocked(removed("example.com/mine"), RAYJOB, NONE, {}, NOW)
    assert found is not None
    assert isinstance(found.proven, Unknown)
    assert "example.com/mine" in found.proven.why


@pytest.mark.parametrize("name", [ORPHAN, "kubernetes.io/pvc-protection", "trainer.kubeflow.org/resource-in-use"])
def test_what_must_not_be_taken_off_is_not_proven_by_a_controller_that_is_gone(name: str) -> None:
    """Without its controller it would lose what it protects."""
    found = blocked(removed(name), RAYJOB, NONE, {FINALIZERS[name].controller.name: Down("gone")}, NOW)
    assert found is not None
    assert found.proven is False


def test_the_endless_loop_is_proven_by_a_child_made_after_the_removal_was_requested() -> None:
    found = blocked(removed(FOREGROUND), TRAINJOB, child(), {}, NOW)
    assert found is not None
    assert (found.by, found.proven) == (FOREGROUND, True)
    assert "recreates jobset/run-7" in found.why
    assert "last 9m58s after" in found.why


@pytest.mark.parametrize(
    ("below", "why"),
    [
        (child(made=ago(hours=1)), "an ordinary child that has not gone yet"),
        (child(made=ago(minutes=10)), "made in the second of the removal"),
        (child(made=ago(minutes=9, seconds=30)), "made once more, which the collector may win"),
        (child(made=ago(minutes=9), deletionTimestamp=ago(minutes=8)), "made once more, and stuck itself"),
        (child("Job", made=ago(seconds=2)), "no kind that a TrainJob makes"),
        (child(made="yesterday"), "no time"),
    ],
)
def test_any_other_child_is_waited_for(below: Descendants, why: str) -> None:
    found = blocked(removed(FOREGROUND), TRAINJOB, below, {}, NOW)
    assert found is not None
    assert found.proven is False, why
    assert "not deleted yet" in found.why


def test_a_child_of_another_user_is_no_loop() -> None:
    node = TreeNode(JOBSET, root(uid="child", creationTimestamp=ago(seconds=1)))
    found = blocked(removed(FOREGROUND), TRAINJOB, Descendants({"another-uid": (node,)}), {}, NOW)
    assert found is not None
    assert "is left below it" in found.why


def test_nothing_left_below_is_proven_after_five_minutes_by_a_complete_list_only() -> None:
    late = removed(FOREGROUND, since=ago(minutes=6))
    soon = removed(FOREGROUND, since=ago(minutes=4))
    partial = Descendants(unseen=("jobs in team-a could not be listed: 403",))
    cases = [
        (late, NONE, True),
        (soon, NONE, False),
        (late, partial, Unknown),
        (late, Descendants(narrowed=True), Unknown),
        (late, Unknown("silent"), Unknown),
    ]
    for said, below, wanted in cases:
        found = blocked(said, TRAINJOB, below, {}, NOW)
        assert found is not None
        assert isinstance(found.proven, Unknown) if wanted is Unknown else found.proven is wanted


def test_the_loop_is_proven_even_where_the_list_is_not_complete() -> None:
    below = Descendants(child().below, ("pods could not be listed",))
    found = blocked(removed(FOREGROUND), TRAINJOB, below, {}, NOW)
    assert found is not None
    assert found.proven is True


@pytest.mark.parametrize(
    ("phase", "owner_gone", "proven"),
    [
        ("Succeeded", True, True),
        ("Failed", True, True),
        ("Running", True, False),
        ("", True, False),
        ("Succeeded", False, False),
        ("Succeeded", Unknown("jobs may not be read"), Unknown),
    ],
)
def test_a_pod_that_its_job_counts(phase: str, owner_gone: bool | Unknown, proven: Any) -> None:
    one = pod(phase, finalizers=[JOB_TRACKING], deletionTimestamp=ago(minutes=10), deletionGracePeriodSeconds=30)
    found = blocked(one.metadata, POD, NONE, {BUILT_IN.name: GONE}, NOW, pod=one, owner_gone=owner_gone)
    assert found is not None
    assert isinstance(found.proven, Unknown) if proven is Unknown else found.proven is proven


def test_a_pod_without_finalizers_waits_for_its_node() -> None:
    one = pod("Running", deletionTimestamp=ago(minutes=10), deletionGracePeriodSeconds=30)
    found = blocked(one.metadata, POD, NONE, {}, NOW, pod=one)
    assert found is not None
    assert (found.by, found.proven) == (NODE, False)


def test_of_several_the_proven_one_is_named_else_the_first() -> None:
    known = {KUEUE.name: Down("scaled to 0"), KUBERAY.name: Alive("ready")}
    both = removed(RAY_FINALIZER, "kueue.x-k8s.io/managed")
    found = blocked(both, RAYJOB, NONE, known, NOW)
    assert found is not None
    assert (found.by, found.proven) == ("kueue.x-k8s.io/managed", True)
    found = blocked(both, RAYJOB, NONE, {**known, KUEUE.name: Alive("ready")}, NOW)
    assert found is not None
    assert found.by == RAY_FINALIZER


def test_who_must_act_before_it_goes() -> None:
    said = removed(RAY_FINALIZER, "example.com/mine", FOREGROUND, "ray.io/gcs-ft-redis-cleanup-finalizer")
    assert controllers_of(said) == (KUBERAY, BUILT_IN)

"""Six things that the real controllers do and that leave GPUs or objects behind. Each is provoked first, so that the
test says that it is still so; then gpukeeper makes it end well, and it stays that way."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.subject import State
from gpukeeper.platforms.kubernetes import finalizers
from gpukeeper.platforms.kubernetes.finalizers import FOREGROUND
from tests.real.kube import objects
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import (
    CHAIN,
    HOLDERS,
    finish,
    gave_back,
    is_true,
    left,
    passes,
    reclaimed,
    stays_so,
    the_end,
    uid,
)

pytestmark = pytest.mark.usefixtures("kwok_node")
RUN = "run"
HELD = "example.com/held"


def train(plane: ControlPlane, namespace: str, *, ttl: int | None = None, **of_pods: Any) -> None:
    plane.api.create(objects.training_runtime("torch", ttl=ttl, **of_pods), namespace)
    plane.api.create(objects.train_job(RUN, "torch"), namespace)


def another(plane: ControlPlane, namespace: str, before: str | None) -> str:
    """The uid of the JobSet that was made instead of that one."""
    found: str = plane.until(
        lambda: (now := uid(plane.api, "jobsets", namespace, RUN)) and now != before and now, "a new JobSet", 40
    )
    return found


def ends_well(plane: ControlPlane, namespace: str, *what: str) -> None:
    plane.until(lambda: not left(plane.api, namespace, *what), "everything is gone")
    stays_so(lambda: not left(plane.api, namespace, *what), "something came back")


def test_1_v21_makes_the_jobset_of_a_complete_trainjob_again(trainer_v21: ControlPlane, namespace: str) -> None:
    api = trainer_v21.api
    train(trainer_v21, namespace, ttl=2)
    finish(trainer_v21, namespace)
    api.wait_condition("trainjobs", namespace, RUN, "Complete")
    first = uid(api, "jobsets", namespace, RUN)
    another(trainer_v21, namespace, first)
    (pod,) = api.wait_pods(namespace, 1)
    assert pod["spec"]["nodeName"], "it has a GPU again"
    assert is_true(api.get("trainjobs", namespace, RUN), "Complete"), "and the TrainJob still says Complete"

    harness = Harness(trainer_v21.keeper_kubeconfig(), namespace)
    seen = harness.subjects()["trainjob/run"]
    assert (seen.state, seen.live_children) == (State.ENDED, 1)
    harness.later(minutes=61)
    first_pass = harness.again()
    assert len(first_pass.warnings) == 1
    assert first_pass.outcomes == []
    line = the_end(passes(harness))
    assert (line.action, line.result, gave_back(line, 1)) == (Action.REMOVE, Result.RECLAIMED, True), line
    ends_well(trainer_v21, namespace, *CHAIN)


def test_2_v23_leaves_a_complete_trainjob_for_ever(trainer_v23: ControlPlane, namespace: str) -> None:
    api = trainer_v23.api
    train(trainer_v23, namespace, ttl=1)
    finish(trainer_v23, namespace)
    api.wait_condition("trainjobs", namespace, RUN, "Complete")
    trainer_v23.until(lambda: left(api, namespace, *CHAIN) == {"trainjobs": {RUN}}, "only the TrainJob is left", 120)
    stays_so(lambda: left(api, namespace, *CHAIN) == {"trainjobs": {RUN}}, "it went by itself: not so any more")

    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace)
    harness.later(minutes=61)
    assert reclaimed(passes(harness)) == {"trainjob/run": Action.REMOVE}
    ends_well(trainer_v23, namespace, *CHAIN)


def test_3_v23_forgets_that_a_trainjob_failed_and_trains_again(trainer_v23: ControlPlane, namespace: str) -> None:
    """Where it is seen as failed its retention ends it, in the background; it is not made again on the way."""
    api = trainer_v23.api
    train(trainer_v23, namespace, ttl=3)
    for _ in range(2):
        before = uid(api, "jobsets", namespace, RUN)
        finish(trainer_v23, namespace, exit_code=1)
        api.wait_condition("trainjobs", namespace, RUN, "Failed")
        before = uid(api, "jobsets", namespace, RUN)
        another(trainer_v23, namespace, before)
        api.wait_for("trainjobs", namespace, RUN, lambda one: not is_true(one, "Failed"), 20, words="Failed is lost")
    assert uid(api, "trainjobs", namespace, RUN), "it is the same TrainJob"

    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, retention={"succeeded": "0s", "failed": "0s"})
    assert passes(harness) == [], "it runs, so nothing is due"
    finish(trainer_v23, namespace, exit_code=1)
    api.wait_condition("trainjobs", namespace, RUN, "Failed")
    assert reclaimed(passes(harness)) == {"trainjob/run": Action.REMOVE}
    ends_well(trainer_v23, namespace, *CHAIN)


def removed_in_the_foreground(plane: ControlPlane, namespace: str) -> Object:
    """A failed TrainJob whose JobSet was made anew after somebody's Foreground removal.

    The trainer and the garbage collector race for it. So the old JobSet is held by a finalizer until the collector has
    removed everything below it; the collector is then paused, and stays so: only the trainer acts when it is let go.
    """
    api = plane.api
    train(plane, namespace)
    finish(plane, namespace, exit_code=1)
    api.wait_condition("trainjobs", namespace, RUN, "Failed")
    before = uid(api, "jobsets", namespace, RUN)
    api.patch("jobsets", namespace, RUN, {"metadata": {"finalizers": [HELD]}})
    api.delete("trainjobs", namespace, RUN, propagation="Foreground")
    asked_for = datetime.now(UTC)
    api.wait_for("jobsets", namespace, RUN, only_held, 40, words="everything below the JobSet is gone")
    plane.until(lambda: datetime.now(UTC) > asked_for + timedelta(seconds=1), "what is made now is made later")
    plane.programs["kube-controller-manager"].pause()
    api.patch("jobsets", namespace, RUN, {"metadata": {"finalizers": None}})
    another(plane, namespace, before)
    seen = api.get("trainjobs", namespace, RUN)
    assert seen is not None, "nobody could end its removal"
    return seen


def only_held(jobset: Object | None) -> bool:
    assert jobset is not None, "it went although a finalizer held it"
    meta = jobset["metadata"]
    return "deletionTimestamp" in meta and meta["finalizers"] == [HELD]


def test_4_v23_never_ends_a_foreground_removal_of_a_failed_trainjob(
    trainer_v23: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7.3. Somebody's kubectl did that. The one finalizer goes, when the policy allows it, and then everything. That
    half a minute has to lie in between is tested in tests/unit/platforms/kubernetes/test_finalizers.py."""
    monkeypatch.setattr(finalizers, "CIRCLE", timedelta(0))
    try:
        seen = removed_in_the_foreground(trainer_v23, namespace)
        assert FOREGROUND in seen["metadata"]["finalizers"]
        careful = Harness(trainer_v23.keeper_kubeconfig(), namespace)
        careful.later(minutes=2)
        decision = careful.decisions()["trainjob/run"]
        assert (decision.rule, decision.action) == ("stuck_removal", Action.KEEP), "not without a word of the policy"
        assert "kubernetes.release does not name foregroundDeletion" in decision.reason
        harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, kubernetes={"release": [FOREGROUND]})
        harness.later(minutes=2)
        report = harness.again()
        assert [line.action for line in report.outcomes] == [Action.RELEASE]
        assert [line.result for line in report.outcomes] == [Result.RECLAIMED], report.outcomes
    finally:
        trainer_v23.programs["kube-controller-manager"].resume()
    ends_well(trainer_v23, namespace, *CHAIN)


def test_5_workers_outlive_a_pytorchjob_and_its_status_hides_them(
    training_operator: ControlPlane, namespace: str
) -> None:
    api = training_operator.api
    api.create(objects.pytorch_job(RUN, workers=2), namespace)
    api.wait_pods(namespace, 3)
    training_operator.finish_pod(namespace, f"{RUN}-master-0")
    api.wait_condition("pytorchjobs", namespace, RUN, "Succeeded")
    api.wait_for(
        "pytorchjobs",
        namespace,
        RUN,
        lambda over: over and over["status"]["replicaStatuses"]["Worker"].get("succeeded") == 2,
        words="it says that its workers succeeded",
    )
    api.wait_pods(namespace, 2)
    stays_so(lambda: len(api.list("pods", namespace, fields="status.phase=Running")) == 2, "they ended", 1)

    harness = Harness(training_operator.keeper_kubeconfig(), namespace)
    assert harness.subjects()[f"pytorchjob/{RUN}"].live_children == 2, "the pods were counted, not the status"
    harness.later(minutes=61)
    assert len(harness.again().warnings) == 1
    api.wait_pods(namespace, 2)
    line = the_end(passes(harness))
    assert (line.action, line.result, gave_back(line, 2)) == (Action.REMOVE, Result.RECLAIMED, True), line
    ends_well(training_operator, namespace, "pytorchjobs", *HOLDERS)


def test_6_a_ray_cluster_gives_its_gpus_back_by_suspension_and_returns(kuberay: ControlPlane, namespace: str) -> None:
    api = kuberay.api
    api.create(objects.ray_cluster("ray", workers=2), namespace)
    api.wait_pods(namespace, 3)
    stays_so(lambda: len(api.list("pods", namespace)) == 3, "an idle cluster ended by itself", 1)

    harness = Harness(kuberay.keeper_kubeconfig(), namespace)
    assert harness.ask("root", "stop", "raycluster/ray", attended=True).done
    kuberay.until(lambda: not left(api, namespace, *HOLDERS), "its pods are gone")
    stays_so(lambda: not left(api, namespace, *HOLDERS), "a pod came back")
    seen = api.get("rayclusters", namespace, "ray")
    assert seen is not None
    assert seen["spec"]["suspend"] is True
    assert harness.ask("root", "restore", "raycluster/ray").done
    api.wait_pods(namespace, 3)

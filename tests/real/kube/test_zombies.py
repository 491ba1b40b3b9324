"""A root that is over while its children run and hold GPUs: reported or trimmed as at_finish says, or it goes as a
whole after a warning. And a run that ends, expires and runs again without end."""

from __future__ import annotations

import pytest

from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.event import WarningSent
from gpukeeper.model.subject import State
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import (
    CHAIN,
    FAILS,
    HOLDERS,
    SUCCEEDS,
    end_ray_job,
    finish,
    gave_back,
    is_true,
    labelled,
    left,
    passes,
    ray_job,
    reclaimed,
    stays_so,
    the_end,
    uid,
)

pytestmark = pytest.mark.usefixtures("kwok_node")
RUN = "run"


def zombie(plane: ControlPlane, namespace: str) -> None:
    """A PyTorchJob that is over, with two workers that are not."""
    plane.api.create(objects.pytorch_job(RUN, workers=2), namespace)
    plane.api.wait_pods(namespace, 3)
    plane.finish_pod(namespace, f"{RUN}-master-0")
    plane.api.wait_condition("pytorchjobs", namespace, RUN, "Succeeded")


def test_living_workers_are_reported_where_nothing_is_reported(training_operator: ControlPlane, namespace: str) -> None:
    """C5.3"""
    zombie(training_operator, namespace)
    harness = Harness(training_operator.keeper_kubeconfig(), namespace)
    harness.later(minutes=30)
    decision = harness.decisions()["pytorchjob/run"]
    assert (decision.rule, decision.verdict, decision.action) == ("live_children", Verdict.REPORT, Action.KEEP)
    assert "2 of its children still run and hold GPUs" in decision.reason
    assert decision.gpus == 2
    assert passes(harness) == []
    training_operator.api.wait_pods(namespace, 2)


def test_living_workers_are_trimmed_and_master_and_job_stay(training_operator: ControlPlane, namespace: str) -> None:
    """C5.3"""
    zombie(training_operator, namespace)
    before = uid(training_operator.api, "pytorchjobs", namespace, RUN)
    harness = Harness(training_operator.keeper_kubeconfig(), namespace, at_finish="Running")
    assert passes(harness) == [], "its operator has five minutes"
    harness.later(minutes=30)
    (line,) = passes(harness)
    assert (line.action, line.rule, line.result) == (Action.TRIM, "live_children", Result.RECLAIMED)
    assert line.gpus_back == 2
    assert isinstance(line.gpu_hours, float)
    assert line.gpu_hours == pytest.approx(1.0, abs=0.1), "two GPUs, half an hour"
    assert training_operator.api.names("pods", namespace) == {f"{RUN}-master-0"}
    assert uid(training_operator.api, "pytorchjobs", namespace, RUN) == before
    assert passes(harness) == [], "once"
    harness.later(minutes=31)
    assert reclaimed(passes(harness)) == {"pytorchjob/run": Action.REMOVE}


def test_at_finish_all_takes_the_ended_pods_of_a_v1_job_too(training_operator: ControlPlane, namespace: str) -> None:
    zombie(training_operator, namespace)
    harness = Harness(training_operator.keeper_kubeconfig(), namespace, at_finish="All")
    harness.later(minutes=6)
    assert reclaimed(passes(harness)) == {"pytorchjob/run": Action.TRIM}
    training_operator.until(lambda: not training_operator.api.list("pods", namespace), "the master is gone, too")
    assert uid(training_operator.api, "pytorchjobs", namespace, RUN)


def test_a_root_with_living_workers_goes_after_a_warning(training_operator: ControlPlane, namespace: str) -> None:
    zombie(training_operator, namespace)
    lead = {"lead": "10m", "undelivered": "0s"}
    harness = Harness(training_operator.keeper_kubeconfig(), namespace, warnings=lead)
    harness.later(minutes=61)
    (warning,) = harness.again().warnings
    assert "2 of its children still run and are removed with it" in warning.message
    harness.later(minutes=9)
    assert passes(harness) == [], "the lead is not over"
    training_operator.api.wait_pods(namespace, 2)
    harness.later(minutes=2)
    line = the_end(passes(harness))
    assert (line.action, line.rule, line.result) == (Action.REMOVE, "retention", Result.RECLAIMED), line
    assert gave_back(line, 2)
    if line.by == "gpukeeper":
        assert line.gpu_hours == pytest.approx(2 * 72 / 60, abs=0.1)
    training_operator.until(lambda: not left(training_operator.api, namespace, "pytorchjobs", *HOLDERS), "all is gone")
    events = training_operator.api.list("events", namespace)
    told = [one for one in events if one.get("reason") == "WillBeReclaimed"]
    assert told, "the warning is on the object, for whoever asks kubectl"


def test_gpus_of_workers_that_end_slowly_are_added_up(training_operator: ControlPlane, namespace: str) -> None:
    """Most pods need more than a second to end. Whose work it was, and what it gave back, is known all the same."""
    slow = {"test/end-after": "3s"}
    training_operator.api.create(objects.pytorch_job(RUN, workers=2, annotations=slow), namespace)
    training_operator.api.wait_pods(namespace, 3)
    training_operator.finish_pod(namespace, f"{RUN}-master-0")
    training_operator.api.wait_condition("pytorchjobs", namespace, RUN, "Succeeded")
    harness = Harness(training_operator.keeper_kubeconfig(), namespace)
    harness.later(minutes=61)
    harness.again()
    line = the_end(passes(harness))
    training_operator.until(lambda: not left(training_operator.api, namespace, "pytorchjobs", *HOLDERS), "all is gone")
    assert (line.result, line.by, line.gpus_back) == (Result.RECLAIMED, "gpukeeper", 2)
    assert line.gpu_hours == pytest.approx(2 * 61 / 60, abs=0.1)


# TrainJobs.


def test_the_jobset_that_v21_recreated_is_trimmed_and_the_trainjob_stays(
    trainer_v21: ControlPlane, namespace: str
) -> None:
    api = trainer_v21.api
    api.create(objects.training_runtime("torch", ttl=2), namespace)
    api.create(objects.train_job(RUN, "torch"), namespace)
    finish(trainer_v21, namespace)
    api.wait_condition("trainjobs", namespace, RUN, "Complete")
    api.wait_pods(namespace, 1)
    root = uid(api, "trainjobs", namespace, RUN)
    harness = Harness(trainer_v21.keeper_kubeconfig(), namespace, at_finish="Running")
    harness.later(minutes=6)
    # The controllers may still write the new JobSet: what changed since it was read is left for the next pass.
    *before, line = passes(harness)
    assert {one.result for one in before} <= {Result.CHANGED, Result.UNKNOWN}, [
        (one.result, one.reason) for one in before
    ]
    assert (line.action, line.result, line.gpus_back) == (Action.TRIM, Result.RECLAIMED, 1), line.reason
    trainer_v21.until(lambda: not api.list("pods", namespace), "its pod is gone")
    stays_so(lambda: not api.list("pods", namespace), "a pod came back")
    assert uid(api, "trainjobs", namespace, RUN) == root
    assert is_true(api.get("trainjobs", namespace, RUN), "Complete")
    assert passes(harness) == [], "once"


def fails_and_returns(plane: ControlPlane, namespace: str, harness: Harness) -> None:
    """One turn of v2.3.0's loop, with a pass while it is over and one while it runs again."""
    finish(plane, namespace, exit_code=1)
    plane.api.wait_condition("trainjobs", namespace, RUN, "Failed")
    harness.again()
    plane.api.wait_pods(namespace, 1)
    plane.api.wait_for("trainjobs", namespace, RUN, lambda one: not is_true(one, "Failed"), 20, words="Failed is lost")


def test_a_trainjob_that_fails_and_runs_again_is_a_loop(trainer_v23: ControlPlane, namespace: str) -> None:
    api = trainer_v23.api
    api.create(objects.training_runtime("torch", ttl=3), namespace)
    api.create(objects.train_job(RUN, "torch"), namespace)
    api.wait_pods(namespace, 1)
    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, loops=2)
    harness.again()
    fails_and_returns(trainer_v23, namespace, harness)
    once = harness.decisions()["trainjob/run"]
    assert (once.rule, once.verdict, once.action) == ("restart_loop", Verdict.REPORT, Action.KEEP)
    harness.again()
    fails_and_returns(trainer_v23, namespace, harness)
    report = harness.again()
    assert [(line.rule, line.stage) for line in report.warnings] == [("restart_loop", 1)]
    assert report.outcomes == []
    assert "it ended 2 times and runs again under the same identity" in report.warnings[0].message
    line = the_end(passes(harness))
    assert (line.action, line.rule, line.result) == (Action.REMOVE, "restart_loop", Result.RECLAIMED), line
    assert gave_back(line, 1)
    trainer_v23.until(lambda: not left(api, namespace, *CHAIN), "all is gone")
    stays_so(lambda: not left(api, namespace, *CHAIN), "it came back")


def test_a_held_loop_is_left(trainer_v23: ControlPlane, namespace: str) -> None:
    api = trainer_v23.api
    api.create(objects.training_runtime("torch", ttl=2), namespace)
    api.create(objects.train_job(RUN, "torch"), namespace)
    api.wait_pods(namespace, 1)
    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, loops=1)
    harness.again()
    fails_and_returns(trainer_v23, namespace, harness)
    assert harness.ask("root", "hold", "trainjob/run", seconds=3600, reason="looking into it").done
    assert passes(harness) == []
    assert not [line for line in harness.ledger.lines if isinstance(line, WarningSent)]
    assert uid(api, "trainjobs", namespace, RUN)


# Ray.


def test_the_cluster_of_a_finished_rayjob_is_suspended(kuberay: ControlPlane, namespace: str) -> None:
    api = kuberay.api
    api.create(ray_job(RUN, workers=2), namespace)
    api.wait_pods(namespace, 3, labels="ray.io/cluster")  # not the one that submits
    end_ray_job(api, namespace, RUN)
    harness = Harness(kuberay.keeper_kubeconfig(), namespace, at_finish="Running")
    harness.later(minutes=6)
    (line,) = passes(harness)
    assert (line.action, line.result, line.gpus_back) == (Action.TRIM, Result.RECLAIMED, 2), line.reason
    (cluster,) = api.list("rayclusters", namespace)
    assert cluster["spec"]["suspend"] is True
    kuberay.until(lambda: not api.list("pods", namespace, labels="ray.io/cluster"), "head and workers are gone")
    stays_so(lambda: not api.list("pods", namespace, labels="ray.io/cluster"), "a pod came back")
    assert uid(api, "rayjobs", namespace, RUN)
    assert passes(harness) == [], "once"


@pytest.mark.parametrize("at_finish", ["Running", "All"])
def test_a_borrowed_cluster_is_never_touched_for_its_borrower(
    kuberay: ControlPlane, namespace: str, at_finish: str
) -> None:
    """Neither trimmed while the RayJob is kept nor removed with it."""
    api = kuberay.api
    lent = labelled(objects.ray_cluster("lent", workers=2), {"ray.io/cluster": "lent"})
    api.create(lent, namespace)
    api.wait_pods(namespace, 3)
    api.create(ray_job(RUN, clusterSelector={"ray.io/cluster": "lent"}), namespace)
    end_ray_job(api, namespace, RUN)
    before = uid(api, "rayclusters", namespace, "lent")
    harness = Harness(kuberay.keeper_kubeconfig(), namespace, at_finish=at_finish)
    assert harness.subjects()["rayjob/run"].live_children == 0
    harness.later(minutes=6)
    assert passes(harness) == []
    harness.later(minutes=55)
    assert reclaimed(passes(harness)) == {"rayjob/run": Action.REMOVE}
    assert uid(api, "rayjobs", namespace, RUN) is None
    stays_so(lambda: len(api.list("pods", namespace, labels="ray.io/cluster=lent")) == 3, "its pods went")
    assert uid(api, "rayclusters", namespace, "lent") == before
    assert not (api.get("rayclusters", namespace, "lent") or {})["spec"].get("suspend")


# Pods that ended.


@pytest.mark.parametrize("ends", [SUCCEEDS, FAILS], ids=["succeeds", "fails"])
def test_at_finish_all_takes_the_ended_pods_and_keeps_the_job(
    plane: ControlPlane, namespace: str, ends: dict[str, str]
) -> None:
    """C5.3"""
    plane.api.create(objects.job(RUN, parallelism=2, annotations=ends), namespace)
    plane.api.wait_condition("jobs", namespace, RUN, "Complete" if ends == SUCCEEDS else "Failed")
    job = uid(plane.api, "jobs", namespace, RUN)
    log_of = sorted(plane.api.names("pods", namespace))[0]
    harness = Harness(plane.keeper_kubeconfig(), namespace, at_finish="All")
    assert passes(harness) == []
    harness.later(minutes=6)
    assert reclaimed(passes(harness)) == {"job/run": Action.TRIM}
    assert left(plane.api, namespace, *HOLDERS) == {"jobs": {RUN}}
    assert uid(plane.api, "jobs", namespace, RUN) == job
    assert any(log_of in name for name in evidence_files(harness)), "their logs were kept before"
    assert passes(harness) == [], "once"


def test_ended_pods_stay_with_their_job_otherwise(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job(RUN, annotations=SUCCEEDS), namespace)
    plane.api.wait_condition("jobs", namespace, RUN, "Complete")
    harness = Harness(plane.keeper_kubeconfig(), namespace, at_finish="Running")
    harness.later(minutes=30)
    assert passes(harness) == []
    assert harness.subjects()["job/run"].state is State.ENDED
    assert left(plane.api, namespace, *HOLDERS).keys() == {"jobs", "pods"}


def evidence_files(harness: Harness) -> list[str]:
    return [name for one in harness.evidence.saved.values() for name in one.files]

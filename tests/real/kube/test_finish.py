"""What ended goes at its time, as a whole, from the root; never sooner, and never a part of it."""

from __future__ import annotations

import pytest

from gpukeeper.model.decision import Action, Result
from tests.real.kube import objects
from tests.real.kube.bed import ControlPlane
from tests.real.kube.bench import Bench


def finish(plane: ControlPlane, namespace: str, count: int = 1, exit_code: int = 0) -> None:
    for pod in plane.api.wait_pods(namespace, count, timeout=40):
        plane.finish_pod(namespace, pod["metadata"]["name"], exit_code)


@pytest.mark.usefixtures("kwok_node")
def test_a_finished_job_goes_with_its_pods(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job("train"), namespace)
    finish(plane, namespace)
    plane.api.wait_condition("jobs", namespace, "train", "Complete")
    bench = Bench(plane.kubeconfig(), namespace)
    assert bench.decisions()["job/train"].action is Action.KEEP
    assert bench.again().outcomes == []
    bench.later(minutes=61)
    report = bench.again()
    assert [one.result for one in report.outcomes] == [Result.RECLAIMED], report.outcomes
    assert plane.api.get("jobs", namespace, "train") is None
    assert plane.api.list("pods", namespace) == [], "no pod was left behind"

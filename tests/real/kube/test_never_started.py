"""Work that never starts: without a node, and on a real node whose kubelet cannot start it."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.subject import State
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.real_node import RealNode
from tests.real.kube.runs import passes, reclaimed

LIMIT = {"cluster": {"never_started": "2h"}}


def is_reported(api: Any, namespace: str) -> bool:
    """Its kubelet said why it waits."""
    for pod in api.list("pods", namespace):
        for one in pod["status"].get("containerStatuses", ()):
            if one["state"].get("waiting", {}).get("reason") == "ErrImageNeverPull":
                return True
    return False


@pytest.mark.smoke
def test_a_job_that_no_node_takes_never_started(plane: ControlPlane, namespace: str) -> None:
    """Its controller gives it a start time all the same."""
    plane.api.create(objects.job("train", schedulerName="nobody"), namespace)
    plane.api.wait_for("jobs", namespace, "train", lambda one: bool(one and one["status"].get("startTime")))
    plane.until(lambda: plane.api.list("pods", namespace), "its pod is there")
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=LIMIT)
    assert harness.subjects()["job/train"].state is State.CREATED
    harness.later(hours=1)
    assert harness.decisions()["job/train"].verdict is Verdict.WAIT
    harness.later(hours=2)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}
    plane.api.wait_gone("jobs", namespace, "train")


def test_a_job_whose_image_is_not_there_never_started(plane: ControlPlane, real_node: RealNode, namespace: str) -> None:
    job = objects.job("train", gpus=0, **real_node.placement)
    job["spec"]["template"]["spec"]["containers"][0]["image"] = "local/nowhere:1"
    plane.api.create(job, namespace)
    plane.until(lambda: is_reported(plane.api, namespace), "the kubelet reports it")
    harness = Harness(plane.keeper_kubeconfig(), namespace, classes=LIMIT)
    subject = harness.subjects()["job/train"]
    assert (subject.state, subject.started) == (State.CREATED, None)
    diagnosis: Any = harness.run(harness.platform.diagnose(subject.ref))
    assert [one for one in diagnosis.causes if "has not started: ErrImageNeverPull" in one.words]
    harness.later(hours=3)
    assert reclaimed(passes(harness)) == {"job/train": Action.REMOVE}
    plane.api.wait_gone("jobs", namespace, "train")

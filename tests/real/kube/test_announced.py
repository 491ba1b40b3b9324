"""What was announced about an object is on the object, and is the time that is used, whoever leads by then."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta

import pytest

from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.event import WarningSent
from tests.real.kube import objects
from tests.real.kube.api import Api
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import passes, reclaimed
from tests.real.kube.test_rights import ALL

pytestmark = pytest.mark.usefixtures("kwok_node")
RUN, WARNED = "run", "gpukeeper.io/warned"
LEAD = {"lead": "10m", "undelivered": "10m"}
LONG = {"cluster": {"grace": "0s", "max_runtime": "20m"}}


def leader(plane: ControlPlane, namespace: str, ahead: timedelta, user: str = "admin") -> Harness:
    """One that has just become it, with an empty ledger."""
    made = Harness(plane.kubeconfig(user), namespace, warnings=LEAD, classes=LONG)
    made.clock.ahead = ahead
    made.keeper.uptime.watched_from = time.monotonic()
    return made


def running_job(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job(RUN), namespace)
    plane.api.wait_pods(namespace, 1)


def warn(harness: Harness) -> WarningSent:
    (line,) = harness.again().warnings
    return line


def annotations(api: Api, plural: str, namespace: str) -> dict[str, str]:
    return dict(api.get(plural, namespace, RUN)["metadata"].get("annotations") or {})  # type: ignore[index]


def zombie(plane: ControlPlane, namespace: str) -> None:
    """A PyTorchJob that is over, with two workers that are not."""
    plane.api.create(objects.pytorch_job(RUN, workers=2), namespace)
    plane.api.wait_pods(namespace, 3)
    plane.finish_pod(namespace, f"{RUN}-master-0")
    plane.api.wait_condition("pytorchjobs", namespace, RUN, "Succeeded")


def test_a_new_leader_without_the_ledger_keeps_to_the_announced_time(plane: ControlPlane, namespace: str) -> None:
    running_job(plane, namespace)
    first = leader(plane, namespace, timedelta(minutes=11))
    line = warn(first)
    assert line.until is not None
    assert not line.delivered
    assert "UTC (in 20m)." in line.message, "with the time that is added when nobody is known to have read it"
    events = [one for one in plane.api.list("events", namespace) if one.get("reason") == "WillBeReclaimed"]
    assert [one["message"] for one in events] == [line.message]
    note = json.loads(annotations(plane.api, "jobs", namespace)[WARNED])
    assert [one["until"] for one in note["warned"]] != []

    second = leader(plane, namespace, timedelta(minutes=21))
    waiting = second.decisions()[f"job/{RUN}"]
    assert (waiting.verdict, waiting.due) == (Verdict.WAIT, line.until)
    assert passes(second) == []
    assert not [one for one in second.ledger.lines if isinstance(one, WarningSent)], "it was warned already"
    third = leader(plane, namespace, timedelta(minutes=32))
    assert reclaimed(passes(third)) == {f"job/{RUN}": Action.STOP}


def test_without_the_right_to_note_it_a_new_leader_warns_again(plane: ControlPlane, namespace: str) -> None:
    running_job(plane, namespace)
    user = plane.new_user(ALL, namespace=namespace)
    first = leader(plane, namespace, timedelta(minutes=11), user)
    line = warn(first)
    assert WARNED not in annotations(plane.api, "jobs", namespace)
    again = warn(leader(plane, namespace, timedelta(minutes=21), user))
    assert again.until is not None
    assert line.until is not None
    assert again.until > line.until


def test_children_that_at_finish_ends_are_not_announced_for_later(
    training_operator: ControlPlane, namespace: str
) -> None:
    zombie(training_operator, namespace)
    at_once = {"succeeded": "0s"}
    harness = Harness(
        training_operator.keeper_kubeconfig(), namespace, warnings=LEAD, retention=at_once, at_finish="Running"
    )
    harness.later(minutes=2)
    report = harness.again()
    assert (report.warnings, report.outcomes) == ([], [])
    harness.later(minutes=4)
    assert [line.action for line in passes(harness)][:2] == [Action.TRIM, Action.REMOVE]
    assert not [one for one in harness.ledger.lines if isinstance(one, WarningSent)]


def test_nothing_is_removed_before_its_time_when_its_children_end_meanwhile(
    training_operator: ControlPlane, namespace: str
) -> None:
    zombie(training_operator, namespace)
    harness = Harness(training_operator.keeper_kubeconfig(), namespace, warnings=LEAD)
    harness.later(minutes=61)
    line = warn(harness)
    for number in range(2):
        training_operator.finish_pod(namespace, f"{RUN}-worker-{number}")
    training_operator.until(
        lambda: harness.subjects()[f"pytorchjob/{RUN}"].live_children == 0, "the workers are seen to be over"
    )
    assert passes(harness) == []
    decision = harness.decisions()[f"pytorchjob/{RUN}"]
    assert (decision.verdict, decision.due) == (Verdict.WAIT, line.until)
    harness.later(minutes=21)
    assert isinstance(line.until, datetime)
    assert reclaimed(passes(harness)) == {f"pytorchjob/{RUN}": Action.REMOVE}

"""Many finished Jobs go with few questions, and with the same promises: captured first, only as they were read, seen to
be gone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpukeeper.model.decision import Result
from gpukeeper.model.event import Captured
from gpukeeper.model.subject import Subject
from tests.real.kube import objects
from tests.real.kube.api import condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import text
from tests.real.kube.harness import Harness
from tests.real.kube.nodes import DEFAULT_LOG
from tests.real.kube.runs import SUCCEEDS

JOBS = 24
OF_A_PASS = 60  # questions of a pass that do not depend on how many Jobs there are
pytestmark = pytest.mark.usefixtures("kwok_node")


def ended_jobs(plane: ControlPlane, namespace: str, number: int = JOBS) -> list[str]:
    names = [f"run-{n}" for n in range(number)]
    for name in names:
        plane.api.create(objects.job(name, annotations=SUCCEEDS), namespace)

    def over() -> bool:
        return all(condition(one, "Complete") == "True" for one in plane.api.list("jobs", namespace))

    def told() -> bool:
        about = {one["involvedObject"]["uid"] for one in plane.api.list("events", namespace)}
        return about >= {one["metadata"]["uid"] for one in plane.api.list("jobs", namespace)}

    plane.until(over, "all Jobs ended", 120)
    plane.until(told, "there are Events about each of them", 60)
    return names


def a_bench(plane: ControlPlane, namespace: str) -> Harness:
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.later(hours=2)
    return harness


def test_a_finished_job_goes_with_three_questions_at_most(plane: ControlPlane, namespace: str) -> None:
    names = ended_jobs(plane, namespace)
    harness = a_bench(plane, namespace)
    report = harness.again()
    asked = harness.cluster.asked
    assert sorted(line.ref.name for line in report.reclaimed if line.ref) == sorted(names), report.failed
    assert plane.api.list("jobs", namespace) == []
    assert asked["DELETE"] == JOBS
    assert sum(asked.values()) <= 3 * JOBS + OF_A_PASS, asked
    assert asked["GET"] <= JOBS + OF_A_PASS, "one for each log"
    plane.until(lambda: plane.api.list("pods", namespace) == [], "the garbage collector removed the pods")


def test_everything_is_captured_from_lists_as_from_questions(plane: ControlPlane, namespace: str) -> None:
    ended_jobs(plane, namespace)
    harness = a_bench(plane, namespace)
    harness.again()
    saved = [line for line in harness.ledger.lines if isinstance(line, Captured)]
    assert len(saved) == JOBS
    for line in saved:
        assert line.ref is not None
        evidence: Any = harness.run(harness.evidence.load(line.evidence))
        manifest = evidence.files["manifest.json"].decode()
        assert '"kind": "Job"' in manifest
        assert '"apiVersion": "batch/v1"' in manifest
        assert "managedFields" not in manifest
        assert '"SuccessfulCreate"' in evidence.files["events.json"].decode()
        (pod,) = [name for name in evidence.files if name.startswith("pods/")]
        assert '"kind": "Pod"' in evidence.files[pod].decode()
        (log,) = [content.decode() for name, content in evidence.files.items() if name.endswith(".log")]
        assert DEFAULT_LOG.splitlines()[-1] in log


def test_what_a_user_holds_after_it_was_listed_stays(plane: ControlPlane, namespace: str) -> None:
    ended_jobs(plane, namespace)
    harness = a_bench(plane, namespace)
    capture, far = harness.platform.capture, text(datetime.now(UTC) + timedelta(hours=20))

    async def held_meanwhile(subject: Subject, what: Sequence[str]) -> Any:
        taken = await capture(subject, what)
        if subject.ref.name == "run-7":
            mark = {"metadata": {"annotations": {"gpukeeper.io/hold-until": far}}}
            plane.api.patch("jobs", namespace, "run-7", mark)
        return taken

    harness.platform.capture = held_meanwhile  # type: ignore[method-assign]
    report = harness.again()
    assert len(report.reclaimed) == JOBS - 1
    (kept,) = [one for one in report.outcomes if one.result is not Result.RECLAIMED]
    assert (kept.ref and kept.ref.name, kept.result) == ("run-7", Result.CHANGED)
    assert [one["metadata"]["name"] for one in plane.api.list("jobs", namespace)] == ["run-7"]


def test_a_job_of_the_same_name_that_came_meanwhile_stays(plane: ControlPlane, namespace: str) -> None:
    ended_jobs(plane, namespace)
    harness = a_bench(plane, namespace)
    capture, new = harness.platform.capture, list[str]()

    async def replaced_meanwhile(subject: Subject, what: Sequence[str]) -> Any:
        taken = await capture(subject, what)
        if subject.ref.name == "run-7":
            plane.api.delete("jobs", namespace, "run-7", propagation="Background")
            new.append(plane.api.create(objects.job("run-7"), namespace)["metadata"]["uid"])
        return taken

    harness.platform.capture = replaced_meanwhile  # type: ignore[method-assign]
    report = harness.again()
    assert len(report.reclaimed) == JOBS - 1
    assert [one["metadata"]["uid"] for one in plane.api.list("jobs", namespace)] == new

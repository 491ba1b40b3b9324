"""Sets that an acceptance run left behind: found by label, ended by the run's end or a day, never sooner."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.model.subject import Outcome, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.builtin import DAEMONSET, DEPLOYMENT, JOB, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER
from gpukeeper.platforms.kubernetes.marks import RUN_LIMIT, NamespaceFacts, TranslationSettings, is_of_run
from gpukeeper.platforms.kubernetes.translate import root_subject
from tests.unit.platforms.kubernetes.examples import AT, NOW, ago, condition, pod, root, totals

APP = {"app": "gpu-accept-daemon"}
ENDED = "gpukeeper.io/run-ended"
FUTURE = (NOW + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


def left(kind: Kind = DAEMONSET, pods: PodTotals | None = None, **parts: Any) -> Subject:
    parts = {"labels": APP, "creationTimestamp": ago(days=3), **parts}
    return root_subject(
        kind, root(**parts), pods or totals(pod(name="n-1")), NamespaceFacts(), AT, TranslationSettings()
    )


@pytest.mark.parametrize(
    ("kind", "labels", "found"),
    [
        (DAEMONSET, {"app": "gpu-accept-daemon"}, True),
        (STATEFULSET, {"app": "gpu-accept-ddp"}, True),
        (POD, {"app": "gpu-acceptance-test"}, True),
        (JOB, {"app": "gpu-cluster-test"}, True),
        (DEPLOYMENT, {"cleanup": "auto", "role": "master"}, True),
        (DEPLOYMENT, {"cleanup": "auto", "role": "worker"}, True),
        (JOB, {"cleanup": "auto", "mode": "single-gpu"}, True),
        (JOB, {"cleanup": "auto", "mode": "multi-gpu-single-node"}, True),
        (STATEFULSET, {"cleanup": "auto", "mode": "multi-node-ddp"}, True),
        (STATEFULSET, {"cleanup": "auto"}, False),
        (STATEFULSET, {"role": "master", "mode": "multi-node-ddp"}, False),
        (STATEFULSET, {"cleanup": "auto", "mode": "production"}, False),
        (STATEFULSET, {"app": "gpu-accept"}, False),
        (STATEFULSET, None, False),
        (RAYCLUSTER, {"app": "gpu-accept-daemon"}, False),
        (TRAINJOB, {"app": "gpu-accept-daemon"}, False),
    ],
)
def test_labels_of_runs(kind: Kind, labels: dict[str, str] | None, found: bool) -> None:
    """C6.8"""
    assert is_of_run(kind, labels) is found


@pytest.mark.parametrize("kind", [DAEMONSET, STATEFULSET, DEPLOYMENT])
def test_a_recorded_end_is_the_end(kind: Kind) -> None:
    subject = left(kind, creationTimestamp=ago(hours=3), annotations={ENDED: ago(hours=2)})
    assert (subject.state, subject.outcome, subject.ended) == (
        State.ENDED,
        Outcome.STOPPED,
        NOW - timedelta(hours=2),
    )
    assert (subject.class_, subject.live_children) == ("cluster", 1)  # so that somebody is told first
    assert subject.findings == ()
    assert any("labels claim" in one for one in subject.evidence)


@pytest.mark.parametrize("kind", [DAEMONSET, STATEFULSET, DEPLOYMENT])
def test_without_a_recorded_end_a_run_ends_after_a_day(kind: Kind) -> None:
    subject = left(kind)
    assert (subject.state, subject.ended) == (State.ENDED, NOW - timedelta(days=3) + RUN_LIMIT)
    assert subject.findings == (f"an acceptance run ends within a day; this {kind.kind} was created 3d ago",)
    assert left(kind, creationTimestamp=ago(hours=24)).state is State.RUNNING


@pytest.mark.parametrize("text", ["", "done", "0001-01-01T00:00:00Z", FUTURE, ago(days=9)])
def test_a_recorded_end_nobody_can_believe_keeps(text: str) -> None:
    subject = left(annotations={ENDED: text})
    assert subject.state is State.RUNNING  # though it is three days old
    assert subject.ended is None
    assert len(subject.findings) == 1
    assert "acceptance run" in subject.findings[0]


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00Z", "1969-01-01"])
def test_nor_without_a_creation(text: str) -> None:
    assert left(creationTimestamp=None, annotations={ENDED: text}).state is State.RUNNING


def test_without_a_creation_nothing_is_old() -> None:
    assert left(creationTimestamp=None).state is State.RUNNING
    assert left(creationTimestamp="0001-01-01T00:00:00Z").state is State.RUNNING


def test_an_end_that_is_a_moment_ahead_has_not_come() -> None:
    soon = (NOW + timedelta(minutes=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    subject = left(annotations={ENDED: soon})
    assert (subject.state, subject.findings) == (State.RUNNING, ())


def test_kinds_that_end_are_judged_by_their_own_end() -> None:
    assert left(JOB, status={"startTime": ago(days=3)}).state is State.RUNNING
    failed = left(JOB, PodTotals(), status={"conditions": [condition("Failed", ago(hours=1))]})
    assert (failed.state, failed.outcome) == (State.ENDED, Outcome.FAILED)


def test_labels_are_no_way_out_of_the_system_namespace() -> None:
    assert left(namespace="kube-system").class_ == "infrastructure"


def test_a_run_that_gpukeeper_started_is_not_its_infrastructure() -> None:
    labels = {**APP, "app.kubernetes.io/part-of": "gpukeeper"}
    assert left(labels=labels).class_ == "cluster"


def test_others_of_these_kinds_never_end() -> None:
    plain = left(STATEFULSET, labels={"app": "llm"}, annotations={ENDED: ago(hours=2)})
    assert (plain.state, plain.ended) == (State.RUNNING, None)


def test_what_is_being_removed_is_left_to_that() -> None:
    assert left(deletionTimestamp=ago(minutes=1)).state is State.REMOVING


def test_children_that_could_not_be_counted_are_unknown() -> None:
    subject = left(STATEFULSET, PodTotals(unclear="pods: 403"))
    assert (subject.state, subject.live_children) == (State.ENDED, Unknown("pods: 403"))

"""Is it over, how did it end, and when: by conditions, never by counts or age."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.model.subject import Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.builtin import DEPLOYMENT, JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import NOT_ENDED, SKEW, Ending, Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB, V1_KINDS
from gpukeeper.platforms.kubernetes.kinds.pod import of_pod
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB
from tests.unit.platforms.kubernetes.examples import NOW, ago, condition, pod, root, terminated

END = ago(hours=2)
AT_END = NOW - timedelta(hours=2)
PYTORCH = V1_KINDS[0]
MPI = V1_KINDS[2]


@pytest.mark.parametrize(
    ("kind", "conditions", "outcome"),
    [
        (JOB, [condition("SuccessCriteriaMet", ago(hours=3)), condition("Complete", END)], Outcome.SUCCEEDED),
        (JOB, [condition("FailureTarget", ago(hours=3)), condition("Failed", END)], Outcome.FAILED),
        (JOBSET, [condition("StartupPolicyCompleted", ago(hours=5)), condition("Completed", END)], Outcome.SUCCEEDED),
        (JOBSET, [condition("Failed", END)], Outcome.FAILED),
        (TRAINJOB, [condition("Suspended", ago(hours=5), "False"), condition("Complete", END)], Outcome.SUCCEEDED),
        (TRAINJOB, [condition("Failed", END, reason="DeadlineExceeded")], Outcome.FAILED),
        (
            PYTORCH,
            [condition("Created", ago(hours=6)), condition("Running", END, "False"), condition("Succeeded", END)],
            Outcome.SUCCEEDED,
        ),
        (MPI, [condition("Failed", END)], Outcome.FAILED),
        (JOB, [condition("Complete", ago(hours=3)), condition("Failed", END)], Outcome.FAILED),  # kept longer
    ],
)
def test_what_is_over(kind: Kind, conditions: list[dict[str, Any]], outcome: Outcome) -> None:
    found = kind.ending(root(status={"conditions": conditions}), NOW)
    assert found == Ending(True, outcome, AT_END, found.how)


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("BackoffLimitExceeded", "BackoffLimitExceeded"),
        ("DeadlineExceeded", "DeadlineExceeded"),
        ("PyTorchJobFailed", ""),  # says nothing more
        ("", ""),
        ("words\x1b[2J of anybody", ""),
    ],
)
def test_why_it_failed_is_the_word_of_its_controller(reason: str, how: str) -> None:
    assert JOB.ending(root(status={"conditions": [condition("Failed", END, reason=reason)]}), NOW).how == how


@pytest.mark.parametrize(
    ("ended", "how"),
    [
        ([{"exitCode": 0}, {"exitCode": 3, "reason": "Error"}], "exit code 3"),
        (
            [{"exitCode": 1, "reason": "Error"}, {"exitCode": 137, "reason": "OOMKilled"}],
            "exit code 137, out of memory",
        ),
        ([], ""),
    ],
)
def test_how_a_pod_failed_is_its_exit_code_and_whether_memory_ran_out(ended: list[dict[str, Any]], how: str) -> None:
    statuses = [{"name": "main", "state": {"terminated": {**one, "finishedAt": END}}} for one in ended]
    status = {"phase": "Failed", "containerStatuses": statuses}
    assert of_pod(pod(status=status), NOW).how == how
    assert of_pod(pod(status={**status, "phase": "Succeeded"}), NOW).how == ""


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (JOB, {}),
        (JOB, {"conditions": None}),
        (JOB, {"conditions": [condition("SuccessCriteriaMet", END)]}),  # announcements: pods may still run
        (JOB, {"conditions": [condition("FailureTarget", END)]}),
        (JOB, {"conditions": [condition("Suspended", END)]}),
        (JOB, {"conditions": [condition("Failed", END, "False")]}),
        (JOB, {"failed": 2, "active": 1}),  # retries
        (JOBSET, {"conditions": [condition("Complete", END)]}),  # a Job's word, not a JobSet's
        (TRAINJOB, {"conditions": [condition("Succeeded", END)]}),
        (TRAINJOB, {"jobsStatus": [{"name": "node", "active": 0, "succeeded": 0, "failed": 1}]}),
        (PYTORCH, {"conditions": [condition("Restarting", END)], "completionTime": None}),
        (RAYCLUSTER, {"state": "failed"}),
        (DEPLOYMENT, {"conditions": [condition("Failed", END)]}),  # it never is
    ],
)
def test_what_goes_on(kind: Kind, status: dict[str, Any]) -> None:
    assert kind.ending(root(status=status), NOW) == NOT_ENDED


def test_success_after_retries_is_a_success() -> None:
    status = {"failed": 2, "succeeded": 1, "conditions": [condition("Complete", END)], "completionTime": END}
    assert JOB.ending(root(status=status), NOW).outcome is Outcome.SUCCEEDED


def test_a_condition_that_is_neither_true_nor_false_is_unknown() -> None:
    over = JOB.ending(root(status={"conditions": [condition("Failed", END, "Unknown")]}), NOW).over
    assert over == Unknown("its condition Failed is 'Unknown'")


FUTURE = (NOW + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
ODD_TIMES = [
    (None, None),
    ("", None),
    ("0001-01-01T00:00:00Z", "not a plausible time"),
    ("1969-12-31T23:59:59Z", "not a plausible time"),
    ("2026-11-15T10:00:00", "has no time zone"),
    ("yesterday", "is not a time"),
    (FUTURE, "is in the future"),
    (ago(days=400), "is before its creation"),
]


def says(at: Any, why: str | None) -> bool:
    return at is None if why is None else isinstance(at, Unknown) and why in at.why


@pytest.mark.parametrize(("text", "why"), ODD_TIMES)
@pytest.mark.parametrize("kind", [JOB, TRAINJOB, PYTORCH])
def test_an_odd_time_of_a_condition_is_an_end_without_a_time(kind: Kind, text: str | None, why: str | None) -> None:
    ending = kind.ending(root(status={"conditions": [condition("Failed", text)], "completionTime": None}), NOW)
    assert ending.over is True
    assert ending.outcome is Outcome.FAILED
    assert says(ending.at, why)


@pytest.mark.parametrize(("text", "why"), ODD_TIMES)
def test_an_odd_time_of_a_pod_or_a_rayjob_too(text: str | None, why: str | None) -> None:
    ended = of_pod(pod("Failed", status={"containerStatuses": [terminated(text, 1)]}), NOW)
    assert (ended.over, says(ended.at, why)) == (True, True)
    ray = RAYJOB.ending(root(status={"jobDeploymentStatus": "Failed", "endTime": text}), NOW)
    assert (ray.over, says(ray.at, why)) == (True, True)


@pytest.mark.parametrize("text", [None, "0001-01-01T00:00:00Z", FUTURE])
def test_the_completion_time_stands_in(text: str | None) -> None:
    status = {"conditions": [condition("Succeeded", text)], "completionTime": END}
    assert PYTORCH.ending(root(status=status), NOW).at == AT_END


def test_clocks_may_differ_a_little() -> None:
    just = (NOW + SKEW).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert JOB.ending(root(status={"conditions": [condition("Complete", just)]}), NOW).at == NOW + SKEW


@pytest.mark.parametrize(
    ("deployment", "job", "over", "outcome"),
    [
        ("Complete", "SUCCEEDED", True, Outcome.SUCCEEDED),
        ("Complete", "FAILED", True, Outcome.FAILED),
        ("Complete", "STOPPED", True, Outcome.STOPPED),
        ("Failed", "RUNNING", True, Outcome.FAILED),  # past its deadline the job's own status stays
        ("Failed", "SUCCEEDED", True, Outcome.FAILED),
        ("Failed", "", True, Outcome.FAILED),
        ("Running", "RUNNING", False, None),
        ("Running", "SUCCEEDED", False, None),  # KubeRay has not written its end yet
        ("Retrying", "FAILED", False, None),
        ("Suspended", "", False, None),
        ("Waiting", "", False, None),
        ("", "", False, None),
    ],
)
def test_a_rayjob_is_judged_by_its_deployment(deployment: str, job: str, over: bool, outcome: Outcome | None) -> None:
    status = {"jobDeploymentStatus": deployment, "jobStatus": job, "endTime": END, "startTime": ago(hours=5)}
    ending = RAYJOB.ending(root(status=status), NOW)
    assert (ending.over, ending.outcome) == (over, outcome)
    assert ending.at == (AT_END if over else None)


def test_a_refused_rayjob_ended_without_a_time() -> None:
    ending = RAYJOB.ending(root(status={"jobDeploymentStatus": "ValidationFailed"}), NOW)
    assert ending == Ending(True, Outcome.FAILED, None)


def test_what_a_rayjob_says_and_nobody_knows_is_unknown() -> None:
    assert isinstance(RAYJOB.ending(root(status={"jobDeploymentStatus": "Ascended"}), NOW).over, Unknown)
    odd = RAYJOB.ending(root(status={"jobDeploymentStatus": "Complete", "jobStatus": "RUNNING"}), NOW)
    assert (odd.over, isinstance(odd.outcome, Unknown)) == (True, True)


@pytest.mark.parametrize(
    ("status", "at"),
    [
        ({"containerStatuses": [terminated(ago(hours=3)), terminated(END, name="side")]}, AT_END),
        (
            {"initContainerStatuses": [terminated(END)], "containerStatuses": [terminated(ago(hours=3))]},
            AT_END,
        ),
        ({"containerStatuses": [terminated(None, 137), terminated(END, name="side")]}, AT_END),
        ({"conditions": [condition("DisruptionTarget", END), condition("Ready", ago(hours=1), "False")]}, AT_END),
        ({"conditions": [condition("Ready", ago(hours=1), "False")]}, None),
        ({"containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}]}, None),
        ({}, None),
    ],
)
def test_a_pod_ended_with_its_last_container(status: dict[str, Any], at: Any) -> None:
    assert of_pod(pod("Succeeded", status=status), NOW) == Ending(True, Outcome.SUCCEEDED, at)


def test_one_time_that_cannot_be_read_may_be_the_last() -> None:
    both = [terminated(ago(hours=3)), terminated("garbled", name="side")]
    assert isinstance(of_pod(pod("Succeeded", status={"containerStatuses": both}), NOW).at, Unknown)


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", ""])
def test_a_pod_that_is_not_ready_is_not_over(phase: str) -> None:
    status = {"conditions": [condition("Ready", END, "False")], "containerStatuses": [terminated(END, 1)]}
    assert of_pod(pod(phase, status=status), NOW) == NOT_ENDED

"""What the results of a run change on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.acceptance.fleet.marks import (
    AT,
    DETAILS,
    LABEL,
    RUN,
    TAINT,
    MarkPlan,
    NodeMarks,
    NodeResult,
    condition_reason,
    cut,
    label_value,
    plan_marks,
    result_of,
)
from gpukeeper.acceptance.record import Machine, Report
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import Amount, MarkSettings

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
TAINTING, ALL = MarkSettings(taint=True), MarkSettings(taint=True, max_out=Amount(share=1.0))
TAINTED = {"taints": {TAINT: "r1"}, "out": "with our taint"}


def plan(
    results: Sequence[NodeResult],
    nodes: Sequence[NodeMarks],
    settings: MarkSettings = TAINTING,
    now: datetime = NOW + timedelta(hours=2),
) -> MarkPlan:
    return plan_marks(results, nodes, settings, now)


def marks(index: int, **fields: object) -> NodeMarks:
    return msgspec.convert({"node": f"n{index}", "uid": f"u{index}", "version": "1", **fields}, NodeMarks)


def result(index: int, verdict: Grade = Grade.FAIL, run: str = "r1", at: datetime = NOW) -> NodeResult:
    return NodeResult(node=f"n{index}", run=run, at=at, verdict=verdict, code="gemm-below-floor", message="too slow")


def report(**fields: object) -> Report:
    return Report(
        **{
            "run": "r1",
            "node": "n1",
            "version": "1",
            "device": "cuda",
            "started": NOW,
            "ended": NOW,
            "profile": "quick",
            "within_s": 60.0,
            "verdict": Grade.PASS,
            "reason": "all passed",
            "machine": Machine(node="n1", gpus=()),
            **fields,
        }  # type: ignore[arg-type]
    )


def test_a_pass_is_a_label_with_run_and_date() -> None:
    (change,) = plan([result(1, Grade.PASS)], [marks(1)]).changes
    assert change.labels == {LABEL: "passed", RUN: "r1", AT: "2026-01-05"}
    assert (change.condition.status, change.taints) == ("True", {})


def test_a_failure_is_a_taint_and_a_condition_with_its_code() -> None:
    (change,) = plan([result(1)], [marks(1)]).changes
    assert (change.labels[LABEL], change.taints) == ("failed", {TAINT: "r1"})
    found = change.condition
    assert (found.status, found.reason, found.message) == ("False", "GemmBelowFloor", "run r1: too slow")


def test_without_the_setting_a_failure_is_no_taint() -> None:
    (change,) = plan([result(1)], [marks(1)], MarkSettings(taint=False)).changes
    assert (change.labels[LABEL], change.taints, change.deferred) == ("failed", {}, "")


@pytest.mark.parametrize("before", [TAINTED, {}])
def test_inconclusive_neither_takes_out_nor_returns(before: dict[str, object]) -> None:
    (change,) = plan([result(1, Grade.INCONCLUSIVE)], [marks(1, **before)]).changes
    assert (change.labels[LABEL], change.condition.status, change.taints) == ("inconclusive", "Unknown", {})


def marked(index: int, at: datetime, run: str = "r1", **fields: object) -> NodeMarks:
    details = msgspec.json.encode({"run": run, "at": at, "verdict": "FAIL", "code": "x"}).decode()
    return marks(index, annotations={DETAILS: details}, **fields)


def test_only_a_newer_pass_removes_the_taint() -> None:
    later = NOW + timedelta(hours=1)
    before = marked(1, NOW, **TAINTED)
    (change,) = plan([result(1, Grade.PASS, "r2", later)], [before]).changes
    assert change.taints == {TAINT: None}
    older = plan([result(1, Grade.PASS, "r0", NOW - timedelta(hours=1))], [before])
    assert older.changes == ()
    assert older.kept[0].why == "run r1 is newer (2026-01-05 12:00Z)"


def test_the_same_run_may_be_marked_again() -> None:
    assert plan([result(1)], [marked(1, NOW, **TAINTED)]).changes[0].taints == {}


def test_an_annotation_that_cannot_be_read_keeps_the_node_as_it_is() -> None:
    found = plan([result(1)], [marks(1, annotations={DETAILS: "{"})])
    assert found.changes == ()
    assert "cannot be read" in found.kept[0].why


def test_a_node_that_the_cluster_does_not_have_is_said() -> None:
    assert plan([result(7)], [marks(1)]).kept[0].why == "the cluster has no node of this name"


def test_the_budget_counts_nodes_that_are_out_already() -> None:
    nodes = [marks(1, out="cordoned"), *(marks(index) for index in range(2, 21))]
    tested = [result(2), result(3), *(result(index, Grade.PASS) for index in range(4, 21))]
    found = plan(tested, nodes)
    assert (found.out, found.allowed) == (1, 2)
    assert [one.node for one in found.changes if one.takes_out] == ["n2"]
    deferred = [one for one in found.changes if one.deferred]
    assert [one.deferred for one in deferred] == ["2 of 20 GPU nodes are out; at most 2 may be"]
    assert deferred[0].labels[LABEL] == "failed"


def test_when_most_nodes_fail_none_is_taken_out() -> None:
    found = plan([result(index) for index in range(10)], [marks(index) for index in range(10)], ALL)
    assert "common cause" in found.breaker
    assert not any(one.takes_out for one in found.changes)


@pytest.mark.parametrize("verdict", [Grade.PASS, Grade.WARN, Grade.FAIL, Grade.INCONCLUSIVE])
@pytest.mark.parametrize("marked_before", [TAINTED, {}])
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"device": "cpu"}, "a run on cpu"),
        ({"device": "simulated"}, "a run on simulated"),
        ({"self_test": True}, "a self-test"),
        ({"interrupted": True}, "the run was interrupted"),
    ],
)
def test_a_run_that_did_not_test_the_gpus_changes_nothing(
    fields: dict[str, object], why: str, marked_before: dict[str, object], verdict: Grade
) -> None:
    before = marks(1, **marked_before)
    assert plan([result_of(report(verdict=verdict))], [before]).changes
    found = plan([result_of(report(verdict=verdict, **fields))], [before])
    assert found.changes == ()
    assert found.kept[0].why.startswith(why)


def test_results_that_do_not_count_are_not_counted_by_the_breaker() -> None:
    nodes = [marks(index) for index in range(10)]
    failed = [result(0), result(1)]
    void = [msgspec.structs.replace(result(index, Grade.PASS), void="a self-test") for index in range(2, 10)]
    assert "2 of 2 tested nodes failed" in plan([*failed, *void], nodes, ALL).breaker
    real = [result(index, Grade.PASS) for index in range(2, 10)]
    assert plan([*failed, *real], nodes, ALL).breaker == ""


def test_nodes_without_gpus_are_not_counted() -> None:
    others = [marks(index, gpu=False, out="cordoned") for index in range(4, 99)]
    found = plan([result(1)], [*(marks(index) for index in range(4)), *others])
    assert (found.nodes, found.out, found.allowed) == (4, 0, 1)
    assert found.changes[0].takes_out


def test_a_tested_node_that_announces_no_gpu_any_more_is_counted() -> None:
    found = plan([result(1)], [marks(0), marks(1, gpu=False, out="not ready")])
    assert (found.nodes, found.out) == (2, 1)


def test_what_takes_the_others_out_is_said() -> None:
    nodes = [marks(0, out="with the taint dedicated"), *(marks(index) for index in range(1, 4))]
    (change,) = plan([result(1)], nodes).changes
    assert change.deferred == "1 of 4 GPU nodes are out (1 with the taint dedicated); at most 1 may be"


def test_a_mark_dated_in_the_future_does_not_stop_a_later_run() -> None:
    """The clock of the node was wrong: the date proves no order."""
    ahead = marked(1, NOW + timedelta(days=300), "r0")
    (change,) = plan([result(1)], [ahead]).changes
    assert change.takes_out
    assert change.note == "its mark of run r0 is dated 2026-11-01 12:00Z, in the future, and does not count"


def test_a_report_dated_in_the_future_changes_nothing_and_is_said() -> None:
    found = plan([result(1, Grade.PASS, at=NOW + timedelta(days=300))], [marked(1, NOW, "r0", **TAINTED)])
    assert found.changes == ()
    assert found.kept[0].why.startswith("the report is dated 2026-11-01 12:00Z, in the future")


def test_clocks_may_differ_by_some_minutes() -> None:
    at = NOW + timedelta(minutes=4)
    assert plan([result(1, at=at)], [marks(1)], now=NOW).changes
    assert not plan([result(1, at=NOW)], [marked(1, at, "r2")], now=NOW).changes


def test_texts_fit_what_the_api_server_accepts() -> None:
    assert label_value("a run/with spaces" + "x" * 80 + "-") == ("a-run-with-spaces" + "x" * 80)[:63]
    assert condition_reason("2-gpus") == "Code2Gpus"
    assert len(cut("ä" * 2000).encode()) <= 1024

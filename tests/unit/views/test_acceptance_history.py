"""One GPU over its acceptance runs: its figures beside its peers, and the floor they are judged by."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from gpukeeper.acceptance.judging.reference_rows import ROWS
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Grade
from gpukeeper.model.subject import Ref
from gpukeeper.views.acceptance_history import GpuHistory, gpu_history, run_lines

AT = datetime(2026, 5, 1, tzinfo=UTC)
NODE = Ref("host", "node-1", "node", "node-1", "node-1")
ROW = next(one for one in ROWS if one.check == "gemm" and one.floor is not None and "H200" in one.gpu)
FIGURE = f"{ROW.check}.{ROW.metric} {ROW.method.replace('*', '') or 'm'}"


def line_of_run(run: int, **more: object) -> NodeTested:
    given = {"verdict": Grade.PASS, "reason": "", "device": "cuda", "gpus": {"S1": Grade.PASS, "S2": Grade.PASS}}
    return NodeTested(at=AT + timedelta(days=run), ref=NODE, run=f"run-{run}", **{**given, **more})  # type: ignore[arg-type]


def history(*lines: NodeTested, model: str = "") -> GpuHistory:
    found = gpu_history(run_lines(enumerate(lines, 1)).runs, "S1", model)
    assert found is not None
    return found


def test_the_floor_is_that_of_the_newest_run_that_recorded_one() -> None:
    values = {"S1": {FIGURE: 700.0}, "S2": {FIGURE: 720.0}}
    found = history(
        line_of_run(1, values=values),
        line_of_run(2, values=values, floors={"S1": {FIGURE: 600.0}}, models={"S1": "NVIDIA X"}),
    )
    (figure,) = found.figures
    assert (found.model, figure.floor, figure.floor_from) == ("NVIDIA X", 600.0, "as judged in the run")
    assert [(one.floor, one.peers) for one in figure.points] == [(None, 720.0), (600.0, 720.0)]


def test_a_figure_that_did_not_pass_is_shown_as_such() -> None:
    found = history(line_of_run(1, values={"S1": {FIGURE: 700.0}}), line_of_run(2, not_passed={"S1": {FIGURE: 500.0}}))
    (figure,) = found.figures
    assert [(one.value, one.passed) for one in figure.points] == [(700.0, True), (500.0, False)]


def test_without_a_recorded_floor_the_reference_of_the_model_counts() -> None:
    line = line_of_run(1, values={"S1": {FIGURE: 700.0}})
    (figure,) = history(line, model="NVIDIA H200").figures
    assert (figure.floor, figure.floor_from) == (ROW.floor, "reference values of NVIDIA H200")
    for model in ("", "NVIDIA Unheard Of"):
        (figure,) = history(line, model=model).figures
        assert (figure.floor, figure.floor_from) == (None, "")


def test_a_method_without_reference_has_no_floor_of_another() -> None:
    name = f"{ROW.check}.{ROW.metric} another method"
    (figure,) = history(line_of_run(1, values={"S1": {name: 700.0}}), model="NVIDIA H200").figures
    assert figure.floor is None


def test_a_gpu_that_no_run_tested_has_no_history() -> None:
    assert gpu_history(run_lines([(1, line_of_run(1))]).runs, "S9") is None

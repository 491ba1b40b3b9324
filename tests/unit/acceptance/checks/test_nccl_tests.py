"""Reading nccl-tests: a second opinion where they are, and no pass where they are not."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.checks import nccl_tests
from gpukeeper.acceptance.record import Finding
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.checks.results import trial


def said(busbw: float = 480.0, wrong: int | None = 0, last: int = 2**33, **more: Any) -> list[dict[str, Any]]:
    sizes = [2**n for n in range(13, 34) if 2**n <= last]
    rows = [{"bytes": size, "dtype": "float", "busbw": busbw, "wrong": wrong} for size in sizes]
    first = {"rows": rows, "gpus": 8, "exit": 0, "out_of_bounds": wrong, "version": "2.19.6", "nccl": 22903} | more
    return [first, *({"by": 0} for _ in range(7))]


def read(answer: list[dict[str, Any]]) -> tuple[Finding, ...]:
    return tuple(nccl_tests.interpret(trial(answer), results.node()))


def test_a_missing_program_is_not_run_and_no_pass() -> None:
    """C1.6: nccl-tests were missing from the image that every manifest called."""
    (found,) = read([{"not_run": "nccl-tests are not installed here"}, *({"by": 0} for _ in range(7))])
    assert (found.verdict, found.code) == (Grade.SKIPPED, "nccl-tests-not-run")
    assert "This is not a pass" in found.message


def test_right_results_pass_and_the_plateau_is_reported() -> None:
    data, speed = read(said())
    assert (data.verdict, data.code) == (Grade.PASS, "nccl-tests-data-ok")
    assert (speed.metric, speed.value, speed.method) == ("all_reduce", 480.0, "nccl-tests/n8/float/plateau")


def test_wrong_results_fail() -> None:
    assert (read(said(wrong=3))[0].verdict, read(said(wrong=3))[0].code) == (Grade.FAIL, "nccl-tests-wrong-data")


def test_results_that_nobody_checked_are_not_right() -> None:
    assert read(said(wrong=None))[0].verdict is Grade.INCONCLUSIVE


def test_a_program_that_ended_badly_proves_nothing() -> None:
    assert read(said(exit=1))[0].verdict is Grade.INCONCLUSIVE


def test_small_sizes_alone_are_no_measurement() -> None:
    assert read(said(last=2**20))[1].code == "nccl-tests-missing"


def test_the_job_names_the_program_that_the_machine_has() -> None:
    serving = nccl_tests.CHECK.servings[0]
    there = results.node(environment={"nccl_tests": "opt/all_reduce_perf"})
    assert nccl_tests.request(serving, there).params == {
        "program": "opt/all_reduce_perf",
        "gpus": 8,
        "first": "8K",
        "last": "8G",
    }
    assert nccl_tests.request(serving, results.node(environment={"nccl_tests": None})).params["program"] is None

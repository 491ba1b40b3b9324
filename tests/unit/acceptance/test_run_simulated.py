"""The whole catalog on simulated machines: clean ones pass at every length, each fault has its verdict and its GPU.

Also what keeps probes, reference table and simulation together: a single GPU has no peers, so it passes only when the
methods that the simulation names are those of the table. C2.1, C2.4, C1.10
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import ProbeReply, ProbeRequest, ProbeResult, Report
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.accept_bench import run

SPANS = (60.0, 300.0, 1800.0, 14400.0)


def accepted(*, gpus: int = 8, within_s: float = 60.0, seed: int = 1, **faults: Any) -> Report:
    bench = SimulatedWorkbench(gpus=gpus, seed=seed, **faults)
    wish = RunRequest(within_s=within_s, expected=gpus)
    return run(bench, CHECKS, wish, clock=bench.clock, limits=reference.limits)[0]


@pytest.mark.parametrize("within_s", SPANS)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_clean_machine_passes_within_its_time(gpus: int, within_s: float) -> None:
    report = accepted(gpus=gpus, within_s=within_s)
    assert report.verdict is Grade.PASS, report.reason
    assert (report.ended - report.started).total_seconds() <= within_s
    assert {one.verdict for one in report.tallies} == {Grade.PASS}


@pytest.mark.parametrize("gpus", [1, 8])
def test_more_time_leaves_less_untested(gpus: int) -> None:
    left = [len(accepted(gpus=gpus, within_s=within_s).coverage) for within_s in SPANS]
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1]


def test_clean_fleets_hardly_ever_fail() -> None:
    """Twenty machines of eight: the judge's own statistics are in tests/unit/acceptance."""
    assert [seed for seed in range(20) if accepted(seed=seed).verdict is Grade.FAIL] == []


@pytest.mark.parametrize(
    ("faults", "verdict", "check", "blamed"),
    [
        ({"slow": {3: 0.08}}, Grade.FAIL, "gemm", 3),
        ({"throttle": (5,)}, Grade.FAIL, "health", 5),
        ({"missing": 1}, Grade.FAIL, "environment", None),
        ({"flip": {2: "fp8"}}, Grade.FAIL, "exact", 2),
        ({"flip": {2: "int8"}}, Grade.FAIL, "exact", 2),
        ({"training": (1,)}, Grade.FAIL, "training", 1),
        ({"memory": (6,)}, Grade.FAIL, "memory_pattern", 6),
        ({"wrong_collective": 2}, Grade.FAIL, "collectives", 2),
        ({"xid": {1: 79}}, Grade.FAIL, "health", 1),
        ({"ecc": (1,)}, Grade.FAIL, "health", 1),
        ({"links_down": (7,)}, Grade.FAIL, "health", 7),
        ({"slow_link": (1,)}, Grade.FAIL, "copies", 1),
        ({"broken": (4,)}, Grade.INCONCLUSIVE, "exact", 4),
        ({"foreign": (0,)}, Grade.INCONCLUSIVE, "health", 0),
    ],
    ids=lambda one: str(one).replace(" ", ""),
)
def test_a_fault_has_its_verdict_its_check_and_its_gpu(
    faults: dict[str, Any], verdict: Grade, check: str, blamed: int | None
) -> None:
    report = accepted(**faults)
    assert report.verdict is verdict, report.reason
    guilty = [one for one in report.findings if one.verdict is verdict and one.check == check]
    assert guilty
    assert isinstance(report.machine.gpus, tuple)
    index = {gpu.uuid: gpu.index for gpu in report.machine.gpus}
    assert {None if one.gpu is None else index[one.gpu] for one in guilty} == {blamed}
    if blamed is not None:
        assert [index[one.gpu] for one in report.tallies if one.verdict is verdict] == [blamed]


def test_a_hang_blames_its_gpu_and_takes_the_time_of_the_others() -> None:
    """They did not fail, but what did not run accepts nobody."""
    report = accepted(hang=(4,))
    assert isinstance(report.machine.gpus, tuple)
    hung = {one.gpu for one in report.findings if one.check == "gemm" and one.verdict is Grade.INCONCLUSIVE}
    assert hung == {report.machine.gpus[4].uuid}
    assert {one.verdict for one in report.tallies} == {Grade.INCONCLUSIVE}
    assert "exact-not-run" in {one.code for one in report.findings}


def test_a_check_has_the_deadline_that_was_requested_for_all_or_its_own() -> None:
    """C3.3: 300 s in older kits."""
    for asked, found in ((300.0, 300.0), (None, 410.0)):
        bench = SimulatedWorkbench(gpus=2, hang=(0,))
        wish = RunRequest(only=("gemm",), check_timeout_s=asked)
        report, _ = run(bench, CHECKS, wish, clock=bench.clock, limits=reference.limits)
        words = [one.message for one in report.findings if one.check == "gemm" and one.verdict is Grade.INCONCLUSIVE]
        assert f"no result within {found:g} s" in words[0]


@pytest.mark.parametrize("wish", [{"only": ("gemm",)}, {"skip": ("exact",)}])
def test_a_missing_gpu_is_found_whatever_was_requested(wish: dict[str, Any]) -> None:
    """C1.1"""
    bench = SimulatedWorkbench(gpus=8, missing=1)
    report, _ = run(bench, CHECKS, RunRequest(expected=8, **wish), clock=bench.clock, limits=reference.limits)
    assert report.verdict is Grade.FAIL, report.reason


def test_ranks_of_a_smaller_world_tested_no_machine() -> None:
    class Halves(SimulatedWorkbench):
        async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
            given = await super().together(gpus, job)
            return {
                rank: msgspec.structs.replace(one, result={**one.result, "world": 2})
                if isinstance(one, ProbeResult)
                else one
                for rank, one in given.items()
            }

    bench = Halves(gpus=8)
    report, _ = run(bench, CHECKS, RunRequest(only=("collectives",)), clock=bench.clock, limits=reference.limits)
    assert report.verdict is Grade.INCONCLUSIVE
    assert "2 ranks instead of 8" in report.reason


def test_a_counter_that_rose_names_the_check() -> None:
    report = accepted(ecc={3: 2})
    rose = [
        (one.check, one.counter, one.before, one.after) for one in report.deltas if one.counter.startswith("ecc_un")
    ]
    assert ("gemm", "ecc_uncorrected_volatile", 0, 2) in rose
    assert {one[0] for one in rose} == {"gemm"}


def test_what_a_run_would_have_found_is_part_of_its_report() -> None:
    power = {(one.check, one.metric): one for one in accepted().power}
    bf16 = power["gemm", "bf16"]
    assert bf16.fails_at is not None
    assert 0.03 <= bf16.fails_at <= 0.12

"""The story of an acceptance run, on a workbench whose answers are written down. C1.1, C2.1"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from gpukeeper.acceptance.check import CheckSize, RunMode, RunRequest
from gpukeeper.acceptance.record import (
    Finding,
    Machine,
    NotTested,
    ProbeFailure,
    ProbeReply,
    ProbeRequest,
    ProbeResult,
    Remedy,
)
from gpukeeper.acceptance.run import CheckRepeated, CheckStarted, ProbeStarted
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade, Health, Past
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.accept_bench import BEGIN, FLOOR, Bench, figure_check, look_check, run

GOOD, BAD = FLOOR * 1.2, FLOOR * 0.5
GEMM = figure_check("gemm")


def test_every_gpu_is_tested_and_judged() -> None:
    """C1.1: the old kit trained on GPU 0 only."""
    bench = Bench(gpus=8)
    report, steps = run(bench, [GEMM])
    assert report.verdict is Grade.PASS
    assert [(one.gpu, one.verdict) for one in report.tallies] == [(f"GPU-{n}", Grade.PASS) for n in range(8)]
    assert {who for _, who in bench.asked} == {f"GPU-{n}" for n in range(8)}
    assert isinstance(steps[0], Machine)
    assert [type(one) for one in steps[1:4]] == [CheckStarted, ProbeStarted, Finding]
    assert report.tallies[0].busy == pytest.approx(0.8)
    assert (report.started, report.ended) == (BEGIN, BEGIN + timedelta(seconds=1))


def test_a_one_off_slow_sample_does_not_fail() -> None:
    """C2.1: seen once in three tries, it is a warning and says so."""
    bench = Bench(script={("gemm", 1): (BAD, GOOD, GOOD)})
    report, steps = run(bench, [GEMM])
    assert report.verdict is Grade.WARN
    assert [one.code for one in report.findings if one.gpu == "GPU-1"] == ["gemm-below-floor-not-confirmed"]
    # All are asked again: each is judged under the load that it will have.
    assert bench.asked == [("gemm", "GPU-0"), ("gemm", "GPU-1")] * 3
    assert [one for one in steps if isinstance(one, CheckRepeated)] == [
        CheckRepeated("gemm", 2, ("GPU-1",)),
        CheckRepeated("gemm", 3, ("GPU-1",)),
    ]


@pytest.mark.parametrize(("figures", "tries"), [((BAD, BAD), 2), ((BAD, GOOD, BAD), 3)])
def test_what_is_slow_in_two_of_three_tries_fails(figures: tuple[float, ...], tries: int) -> None:
    bench = Bench(script={("gemm", 0): figures})
    report, _ = run(bench, [GEMM])
    assert report.verdict is Grade.FAIL
    assert f"2 of {tries} attempts" in report.reason
    assert bench.asked.count(("gemm", "GPU-0")) == tries


def test_a_wrong_result_is_not_asked_twice() -> None:
    """Wrong bits are no chance: one is enough."""
    bench = Bench(script={("exact", 0): (BAD, GOOD)})
    report, _ = run(bench, [figure_check("exact", confirm=False)])
    assert report.verdict is Grade.FAIL
    assert bench.asked.count(("exact", "GPU-0")) == 1


def test_what_fails_only_in_the_second_try_is_tried_a_third_time() -> None:
    bench = Bench(script={("gemm", 0): (BAD, BAD), ("gemm", 1): (GOOD, BAD, BAD)})
    report, _ = run(bench, [GEMM])
    assert [(one.gpu, one.verdict) for one in report.findings] == [("GPU-0", Grade.FAIL), ("GPU-1", Grade.FAIL)]


def test_a_crash_in_a_repetition_is_not_forgotten() -> None:
    crash = ProbeFailure(kind="crashed", words="signal 11")
    bench = Bench(script={("gemm", 1): (BAD, crash, GOOD)})
    report, _ = run(bench, [GEMM])
    assert report.verdict is Grade.INCONCLUSIVE
    assert "signal 11" in report.reason


def test_a_gpu_that_gave_no_answer_is_not_asked_again() -> None:
    """It would hang as long once more, while the others are waited for."""
    bench = Bench(script={("gemm", 0): (BAD, BAD), ("gemm", 1): (ProbeFailure(kind="timeout", words="no answer"),)})
    report, _ = run(bench, [GEMM])
    assert bench.asked.count(("gemm", "GPU-1")) == 1
    assert [one.verdict for one in report.findings] == [Grade.FAIL, Grade.INCONCLUSIVE]


def test_a_gpu_that_is_not_among_the_answers_does_not_pass() -> None:
    class Forgetful(Bench):
        async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
            given = await super().each(jobs)
            return {uuid: one for uuid, one in given.items() if (jobs[uuid].probe, uuid) != ("copies", "GPU-1")}

    report, _ = run(Forgetful(), [GEMM, figure_check("copies")])
    assert [(one.gpu, one.verdict) for one in report.tallies] == [
        ("GPU-0", Grade.PASS),
        ("GPU-1", Grade.INCONCLUSIVE),
    ]


def test_ranks_are_repeated_together() -> None:
    bench = Bench(script={("collectives", 0): (BAD, GOOD, GOOD)})
    report, steps = run(bench, [figure_check("collectives", how=RunMode.TOGETHER)])
    assert bench.asked.count(("collectives", "0")) == bench.asked.count(("collectives", "1")) == 3
    assert CheckRepeated("collectives", 2, ()) in steps
    assert [one.gpu for one in report.findings] == [None, None]
    # Three tries of a second each, in which each rank's GPU was busy for 0.8 s.
    assert [one.busy for one in report.tallies] == [pytest.approx(0.8)] * 2


def test_a_probe_that_hangs_is_inconclusive_and_the_rest_goes_on() -> None:
    hung = ProbeFailure(kind="timeout", words="no answer within 120 s")
    bench = Bench(script={("gemm", 0): (hung,)})
    report, _ = run(bench, [GEMM, figure_check("copies")])
    assert report.verdict is Grade.INCONCLUSIVE
    assert [(one.check, one.gpu, one.verdict) for one in report.findings] == [
        ("gemm", "GPU-0", Grade.INCONCLUSIVE),
        ("gemm", "GPU-1", Grade.PASS),
        ("copies", "GPU-0", Grade.PASS),
        ("copies", "GPU-1", Grade.PASS),
    ]


def test_without_torch_nothing_is_measured_and_nothing_passes() -> None:
    missing = ProbeFailure(kind="no_torch", words="No module named 'torch'")
    bench = Bench(script={("gemm", 0): (missing,), ("gemm", 1): (missing,)})
    health = look_check("health", lambda context: [_fine("GPU-0"), _fine("GPU-1")])
    report, _ = run(bench, [GEMM, health])
    assert report.verdict is Grade.INCONCLUSIVE
    assert "No module named 'torch'" in report.reason
    assert [one.check for one in report.findings if one.verdict is Grade.PASS] == ["health", "health"]


def test_an_interruption_leaves_a_partial_inconclusive_report() -> None:
    bench = Bench()
    bench.hangs_at = "copies"
    report, _ = run(bench, [GEMM, figure_check("copies"), figure_check("exact")], stop_at="copies")
    assert bench.ended == ["copies"]
    assert (report.verdict, report.interrupted) == (Grade.INCONCLUSIVE, True)
    assert {one.check for one in report.findings} == {"gemm"}
    assert [(one.check, one.why) for one in report.coverage] == [
        ("copies", "the run was interrupted"),
        ("exact", "the run was interrupted"),
    ]


def test_a_fault_that_was_seen_stays_a_fail_when_interrupted() -> None:
    bench = Bench(script={("gemm", 0): (BAD,)})
    report, _ = run(bench, [GEMM, figure_check("copies")], stop_at="copies")
    assert (report.verdict, report.interrupted) == (Grade.FAIL, True)
    assert report.reason.startswith("The run was interrupted")


def test_the_time_is_kept_and_what_was_left_out_is_named() -> None:
    """Checks that took longer than thought take the time of those after them."""
    slow = CheckSize(depth=0, seconds=10, worth=2, what="some", params={"takes": 55.0})
    checks = [figure_check("gemm", slow), figure_check("copies", CheckSize(depth=0, seconds=10, worth=1, what="some"))]
    report, _ = run(Bench(), checks, RunRequest(within_s=60))
    assert [(one.check, one.why) for one in report.coverage] == [("copies", "no time left: 55 s of 60 s were used")]
    assert (report.ended - report.started).total_seconds() <= 60
    # What was to run and did not is never part of a pass.
    assert report.verdict is Grade.INCONCLUSIVE
    assert {one.verdict for one in report.tallies} == {Grade.INCONCLUSIVE}
    assert [(one.gpu, one.verdict) for one in report.findings if one.code == "copies-not-run"] == [
        ("GPU-0", Grade.INCONCLUSIVE),
        ("GPU-1", Grade.INCONCLUSIVE),
    ]


def test_a_slow_start_does_not_take_the_time_of_the_checks() -> None:
    """PyTorch from a cold disk; that is how new machines are."""

    class Cold(Bench):
        async def machine(self) -> Machine:
            self.now_s += 70
            return await super().machine()

    report, _ = run(Cold(), [GEMM, figure_check("copies")], RunRequest(within_s=60))
    assert (report.verdict, report.coverage) == (Grade.PASS, ())


@pytest.mark.parametrize("how", [RunMode.EACH, RunMode.TOGETHER])
def test_an_error_in_a_check_leaves_the_report_of_the_others(how: RunMode) -> None:
    def full(probe: str) -> None:
        if probe == "copies":
            raise OSError(28, "No space left on device")

    bench = Bench()
    bench.during = full
    health = look_check("health", lambda context: [_fine("GPU-0")])
    unreadable = look_check("topology", lambda context: context.before["none"])
    checks = [GEMM, figure_check("copies", how=how), figure_check("exact"), unreadable, health]
    report, _ = run(bench, checks)
    failed = [one for one in report.findings if one.code.endswith("-failed")]
    gpus = ["GPU-0", "GPU-1"] if how is RunMode.EACH else [None]
    assert [(one.code, one.gpu) for one in failed] == [
        *(("copies-failed", gpu) for gpu in gpus),
        ("topology-failed", None),
    ]
    assert {one.verdict for one in failed} == {Grade.INCONCLUSIVE}
    assert "OSError: [Errno 28] No space left on device" in failed[0].message
    assert {"gemm", "exact", "health"} <= {one.check for one in report.findings if one.verdict is Grade.PASS}
    assert report.verdict is Grade.INCONCLUSIVE


def test_an_error_in_a_repetition_keeps_what_the_first_try_showed() -> None:
    bench = Bench(gpus=1, script={("gemm", 0): (BAD, ProbeResult(result={"x": None}), BAD)})
    report, _ = run(bench, [GEMM])
    assert [(one.code, one.verdict) for one in report.findings] == [
        ("gemm-below-floor", Grade.FAIL),
        ("gemm-failed", Grade.INCONCLUSIVE),
    ]


def test_an_answer_that_no_check_can_read_is_an_error_of_that_check_alone() -> None:
    bench = Bench(gpus=1, script={("gemm", 0): (ProbeResult(result={"x": None}),)})
    report, _ = run(bench, [GEMM, figure_check("exact")])
    assert [(one.code, one.verdict) for one in report.findings] == [
        ("gemm-failed", Grade.INCONCLUSIVE),
        ("exact-ok", Grade.PASS),
    ]


def test_a_read_that_breaks_stops_nothing() -> None:
    class Blinded(Bench):
        async def health(self) -> Mapping[str, Health] | Unknown:
            raise OSError("the sampler is gone")

    report, _ = run(Blinded(), [GEMM])
    assert [one.verdict for one in report.findings] == [Grade.PASS, Grade.PASS]


def test_a_check_requested_by_name_that_did_not_run_is_no_pass() -> None:
    """One GPU has nobody to talk to; and what was skipped by rule was not judged either."""
    pair = replace(figure_check("collectives", how=RunMode.TOGETHER), least_gpus=2)
    none = Finding(check="nccl_tests", verdict=Grade.SKIPPED, code="none", message="There are no nccl-tests here.")
    checks = [GEMM, pair, look_check("nccl_tests", lambda context: [none])]
    report, _ = run(Bench(gpus=1), checks, RunRequest(only=("gemm", "collectives", "nccl_tests")))
    assert report.verdict is Grade.INCONCLUSIVE
    assert [one.message for one in report.findings if one.code.endswith("-not-run")] == [
        "collectives was selected (--check) and did not run: needs 2 GPUs, 1 available.",
        "nccl_tests was selected (--check) and did not run: There are no nccl-tests here.",
    ]
    assert run(Bench(gpus=1), checks, RunRequest(only=("gemm",)))[0].verdict is Grade.PASS
    assert run(Bench(gpus=1), checks)[0].verdict is Grade.PASS


def test_what_an_earlier_try_saw_stays() -> None:
    bench = Bench(gpus=1, script={("gemm", 0): (BAD, GOOD, GOOD)})
    seen = []
    run(bench, [GEMM, look_check("health", lambda context: seen.append(list(context.at_check)) or [])])
    assert seen == [["gemm", "gemm, attempt 2", "gemm, attempt 3"]]


def test_what_does_not_fit_is_in_the_coverage_with_the_time_that_runs_it() -> None:
    long = figure_check("stress", CheckSize(depth=1, seconds=70, worth=1, what="60 s"))
    report, _ = run(Bench(), [GEMM, long], RunRequest(within_s=60))
    assert [(one.check, one.within) for one in report.coverage] == [("stress", "5m")]
    report, _ = run(Bench(), [GEMM, long], RunRequest(within_s=300))
    assert not report.coverage


def test_a_counter_that_rose_is_tied_to_the_check_that_ran() -> None:
    bench = Bench()

    def while_it_runs(probe: str) -> None:
        if probe == "copies":
            bench.counters["GPU-1"]["pcie_replays"] = 7

    bench.during = while_it_runs
    seen = []
    health = look_check("health", lambda context: seen.append(context) or [_fine("GPU-0"), _fine("GPU-1")])
    report, _ = run(bench, [GEMM, figure_check("copies"), figure_check("exact"), health])
    assert [(one.gpu, one.check, one.counter, one.before, one.after) for one in report.deltas] == [
        ("GPU-1", "copies", "pcie_replays", 0, 7)
    ]
    context = seen[0]
    assert context.before["GPU-1"].counters["pcie_replays"] == 0
    assert context.at_check["gemm"]["GPU-1"].counters["pcie_replays"] == 0
    assert context.at_check["copies"]["GPU-1"].counters["pcie_replays"] == 7
    assert context.after["GPU-1"].counters["pcie_replays"] == 7
    assert {one.check for one in report.timeline} == {"", "gemm", "copies", "exact"}


def test_counters_that_always_rise_or_are_unknown_are_no_change() -> None:
    bench = Bench(gpus=1)
    bench.counters["GPU-0"] = {"energy_mj": 1, "ecc": Unknown("refused"), "remapped": None}

    def while_it_runs(probe: str) -> None:
        bench.counters["GPU-0"] = {"energy_mj": 9, "ecc": 4, "remapped": 1}

    bench.during = while_it_runs
    report, _ = run(bench, [GEMM])
    assert report.deltas == ()


def test_a_driver_that_does_not_answer_stops_no_measurement() -> None:
    bench = Bench()
    bench.blind = True
    seen = []
    health = look_check("health", lambda context: seen.append(dict(context.before)) or [])
    report, _ = run(bench, [GEMM, health])
    assert seen == [{}]
    assert [one.check for one in report.findings] == ["gemm", "gemm"]


def test_on_the_cpu_nothing_ever_passes() -> None:
    report, _ = run(Bench(), [GEMM], RunRequest(device="cpu"))
    assert {one.verdict for one in report.findings} == {Grade.PASS}
    assert report.verdict is Grade.INCONCLUSIVE
    assert "no GPU was tested" in report.reason


@pytest.mark.parametrize("gpus", [(), Unknown("the driver did not respond")])
def test_without_a_gpu_the_run_is_inconclusive(gpus: tuple[()] | Unknown) -> None:
    bench = Bench(gpus=0)
    bench.gpus = gpus
    report, _ = run(bench, [GEMM])
    assert report.verdict is Grade.INCONCLUSIVE
    assert report.coverage == (NotTested(check="gemm", why="no GPU available"),)
    assert not bench.asked


def test_only_the_gpus_that_were_named_are_tested() -> None:
    bench = Bench(gpus=4)
    report, _ = run(bench, [GEMM], RunRequest(gpus=("2", "S3")))
    assert {who for _, who in bench.asked} == {"GPU-2", "GPU-3"}
    assert [one.gpu for one in report.tallies] == ["GPU-2", "GPU-3"]


def test_a_gpu_that_is_not_here_is_refused_before_anything_runs() -> None:
    bench = Bench()
    with pytest.raises(UsageError, match=r"--gpus 7: GPU not found\. Nothing was run\. Available GPUs: 0 \(S0\)"):
        run(bench, [GEMM], RunRequest(gpus=("0", "7")))
    assert not bench.asked


def test_a_gpu_that_must_be_replaced_ends_the_longer_checks() -> None:
    def broken(context: object) -> list[Finding]:
        return []

    gone = figure_check("exact", confirm=False)
    final = replace(gone, interpret=lambda trial, context: (_to_replace("GPU-0"),))
    long = figure_check("stress", CheckSize(depth=1, seconds=70, worth=1, what="60 s"))
    report, _ = run(Bench(), [final, GEMM, long, look_check("health", broken)], RunRequest(within_s=300))
    assert [(one.check, one.why) for one in report.coverage] == [
        ("stress", "a GPU must be replaced anyway: It is broken.")
    ]
    assert "gemm" in {one.check for one in report.findings}


def test_faults_and_figures_of_the_wish_reach_the_probe() -> None:
    bench = Bench(gpus=1)
    run(bench, [GEMM], RunRequest(params={"gemm": {"n": 7}}, inject={"gemm": {"slow": 0.1}}))
    assert bench.params == [{"n": 7, "inject": {"slow": 0.1}}]


def test_history_of_the_gpus_reaches_the_checks() -> None:
    past = Past(at=BEGIN, run="r-0", identity="S0", verdict=Grade.PASS, values={"gemm.x m": 1.0})
    seen = []
    check = look_check("health", lambda context: seen.append(context.history) or [])
    run(Bench(), [check], history={"S0": (past,)})
    assert seen == [{"S0": (past,)}]


def test_everything_the_probes_said_is_in_the_report() -> None:
    bench = Bench(gpus=1, script={("gemm", 0): (BAD, BAD)})
    report, _ = run(bench, [GEMM])
    assert [(one["check"], one["who"], one["again"]) for one in report.records] == [
        ("gemm", "GPU-0", False),
        ("gemm", "GPU-0", True),
    ]
    assert report.records[0]["answer"]["result"] == {"x": BAD}


def _fine(gpu: str) -> Finding:
    return Finding(check="health", gpu=gpu, verdict=Grade.PASS, code="health-ok", message="It is fine.")


def _to_replace(gpu: str) -> Finding:
    return Finding(
        check="exact",
        gpu=gpu,
        verdict=Grade.FAIL,
        code="exact-mismatch",
        message="It is broken.",
        action=Remedy.REPLACE_GPU,
    )

"""The story of an acceptance run, on a workbench whose answers are written down. C1.1, C2.1"""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.acceptance.check import How, Serving, Wish
from gpukeeper.engine.accept import Began, Repeated
from gpukeeper.model.acceptance import Broken, Finding, Grade, Machine, NotTested, Past, Remedy
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown
from tests.unit.engine.accept_bench import BEGIN, FLOOR, Bench, figure_check, look_check, run

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
    assert [type(one) for one in steps[1:3]] == [Began, Finding]
    assert report.tallies[0].busy == pytest.approx(0.8)
    assert (report.started, report.ended) == (BEGIN, BEGIN + timedelta(seconds=1))


def test_a_one_off_slow_sample_does_not_fail() -> None:
    """C2.1: seen once in three tries, it is a warning and says so."""
    bench = Bench(script={("gemm", 1): (BAD, GOOD, GOOD)})
    report, steps = run(bench, [GEMM])
    assert report.verdict is Grade.WARN
    assert [one.code for one in report.findings if one.gpu == "GPU-1"] == ["gemm-below-floor-not-confirmed"]
    # Only the suspect is asked again.
    assert bench.asked == [("gemm", "GPU-0"), ("gemm", "GPU-1"), ("gemm", "GPU-1"), ("gemm", "GPU-1")]
    assert [one for one in steps if isinstance(one, Repeated)] == [
        Repeated("gemm", 2, ("GPU-1",)),
        Repeated("gemm", 3, ("GPU-1",)),
    ]


@pytest.mark.parametrize(("figures", "tries"), [((BAD, BAD), 2), ((BAD, GOOD, BAD), 3)])
def test_what_is_slow_in_two_of_three_tries_fails(figures: tuple[float, ...], tries: int) -> None:
    bench = Bench(script={("gemm", 0): figures})
    report, _ = run(bench, [GEMM])
    assert report.verdict is Grade.FAIL
    assert f"2 of {tries} tries" in report.reason
    assert bench.asked.count(("gemm", "GPU-0")) == tries


def test_a_wrong_result_is_not_asked_twice() -> None:
    """Wrong bits are no chance: one is enough."""
    bench = Bench(script={("exact", 0): (BAD, GOOD)})
    report, _ = run(bench, [figure_check("exact", confirm=False)])
    assert report.verdict is Grade.FAIL
    assert bench.asked.count(("exact", "GPU-0")) == 1


def test_ranks_are_asked_again_together() -> None:
    bench = Bench(script={("collectives", 0): (BAD, GOOD, GOOD)})
    report, steps = run(bench, [figure_check("collectives", how=How.TOGETHER)])
    assert bench.asked.count(("collectives", "0")) == bench.asked.count(("collectives", "1")) == 3
    assert Repeated("collectives", 2, ()) in steps
    assert [one.gpu for one in report.findings] == [None, None]
    # Three tries of a second each, in which each rank's GPU was busy for 0.8 s.
    assert [one.busy for one in report.tallies] == [pytest.approx(0.8)] * 2


def test_a_probe_that_hangs_is_inconclusive_and_the_rest_goes_on() -> None:
    hung = Broken(kind="timeout", words="no answer within 120 s")
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
    missing = Broken(kind="no_torch", words="No module named 'torch'")
    bench = Bench(script={("gemm", 0): (missing,), ("gemm", 1): (missing,)})
    health = look_check("health", lambda setting: [_fine("GPU-0"), _fine("GPU-1")])
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
    slow = Serving(depth=0, seconds=10, worth=2, what="some", params={"takes": 55.0})
    checks = [figure_check("gemm", slow), figure_check("copies", Serving(depth=0, seconds=10, worth=1, what="some"))]
    report, _ = run(Bench(), checks, Wish(within_s=60))
    assert [(one.check, one.why) for one in report.coverage] == [("copies", "the time was up: 55 s of 60 s were used")]
    assert (report.ended - report.started).total_seconds() <= 60


def test_what_does_not_fit_is_in_the_coverage_with_the_time_that_runs_it() -> None:
    long = figure_check("stress", Serving(depth=1, seconds=70, worth=1, what="60 s"))
    report, _ = run(Bench(), [GEMM, long], Wish(within_s=60))
    assert [(one.check, one.within) for one in report.coverage] == [("stress", "5m")]
    report, _ = run(Bench(), [GEMM, long], Wish(within_s=300))
    assert not report.coverage


def test_a_counter_that_rose_is_tied_to_the_check_that_ran() -> None:
    bench = Bench()

    def while_it_runs(probe: str) -> None:
        if probe == "copies":
            bench.counters["GPU-1"]["pcie_replays"] = 7

    bench.during = while_it_runs
    seen = []
    health = look_check("health", lambda setting: seen.append(setting) or [_fine("GPU-0"), _fine("GPU-1")])
    report, _ = run(bench, [GEMM, figure_check("copies"), figure_check("exact"), health])
    assert [(one.gpu, one.check, one.counter, one.before, one.after) for one in report.deltas] == [
        ("GPU-1", "copies", "pcie_replays", 0, 7)
    ]
    setting = seen[0]
    assert setting.before["GPU-1"].counters["pcie_replays"] == 0
    assert setting.at_check["gemm"]["GPU-1"].counters["pcie_replays"] == 0
    assert setting.at_check["copies"]["GPU-1"].counters["pcie_replays"] == 7
    assert setting.after["GPU-1"].counters["pcie_replays"] == 7
    assert {one.check for one in report.timeline} == {"", "gemm", "copies", "exact"}


def test_counters_that_always_rise_or_are_not_known_are_no_change() -> None:
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
    health = look_check("health", lambda setting: seen.append(dict(setting.before)) or [])
    report, _ = run(bench, [GEMM, health])
    assert seen == [{}]
    assert [one.check for one in report.findings] == ["gemm", "gemm"]


def test_on_the_cpu_nothing_ever_passes() -> None:
    report, _ = run(Bench(), [GEMM], Wish(device="cpu"))
    assert {one.verdict for one in report.findings} == {Grade.PASS}
    assert report.verdict is Grade.INCONCLUSIVE
    assert "no GPU was tested" in report.reason


@pytest.mark.parametrize("gpus", [(), Unknown("the driver did not answer")])
def test_without_a_gpu_the_run_is_inconclusive(gpus: tuple[()] | Unknown) -> None:
    bench = Bench(gpus=0)
    bench.gpus = gpus
    report, _ = run(bench, [GEMM])
    assert report.verdict is Grade.INCONCLUSIVE
    assert report.coverage == (NotTested(check="gemm", why="there is no GPU to run it on"),)
    assert not bench.asked


def test_only_the_gpus_that_were_named_are_tested() -> None:
    bench = Bench(gpus=4)
    report, _ = run(bench, [GEMM], Wish(gpus=("2", "S3")))
    assert {who for _, who in bench.asked} == {"GPU-2", "GPU-3"}
    assert [one.gpu for one in report.tallies] == ["GPU-2", "GPU-3"]


def test_a_gpu_that_is_not_here_is_refused_before_anything_runs() -> None:
    bench = Bench()
    with pytest.raises(UsageError, match=r"--gpus 7: no such GPU here\. Nothing was run\. GPUs here: 0 \(S0\)"):
        run(bench, [GEMM], Wish(gpus=("0", "7")))
    assert not bench.asked


def test_a_gpu_that_must_be_replaced_ends_the_longer_checks() -> None:
    def broken(setting: object) -> list[Finding]:
        return []

    gone = figure_check("exact", confirm=False)
    replace = type(gone)(**{**vars(gone), "read": lambda trial, setting: (_to_replace("GPU-0"),)})
    long = figure_check("stress", Serving(depth=1, seconds=70, worth=1, what="60 s"))
    report, _ = run(Bench(), [replace, GEMM, long, look_check("health", broken)], Wish(within_s=300))
    assert [(one.check, one.why) for one in report.coverage] == [
        ("stress", "a GPU has to be replaced already: It is broken.")
    ]
    assert "gemm" in {one.check for one in report.findings}


def test_faults_and_figures_of_the_wish_reach_the_probe() -> None:
    bench = Bench(gpus=1)
    run(bench, [GEMM], Wish(params={"gemm": {"n": 7}}, inject={"gemm": {"slow": 0.1}}))
    assert bench.params == [{"n": 7, "inject": {"slow": 0.1}}]


def test_history_of_the_gpus_reaches_the_checks() -> None:
    past = Past(at=BEGIN, run="r-0", identity="S0", verdict=Grade.PASS, values={"gemm.x m": 1.0})
    seen = []
    check = look_check("health", lambda setting: seen.append(setting.history) or [])
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

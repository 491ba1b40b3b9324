"""Stress: speed, step time, temperature, power and results under full load, as C2.4 asks."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.check import CheckContext, RunRequest
from gpukeeper.acceptance.checks.stress import CHECK
from gpukeeper.acceptance.record import Finding
from gpukeeper.model.gpu import Gpu, Grade, Reading
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.checks.trials import OUT_OF_MEMORY, codes, read, the
from tests.unit.acceptance.machines import NONE_HERE, context, gpus, health


def said(*speeds: float, **more: Any) -> dict[str, Any]:
    speeds = speeds or (840.0,) * 9
    windows = [{"run": 3 * at // len(speeds), "at": float(at), "tflops": one} for at, one in enumerate(speeds)]
    steps = {"step_ms_first": 1.3, "step_ms_last": 1.31}
    return {"windows": windows, "mismatches": 0, "where": [], "verified": 900, "method": "stress/bf16"} | steps | more


def sampled(temperature: float = 62, power: float = 690, use: float = 100, gpu: Gpu | None = None) -> CheckContext:
    """Twice a second for a minute; cold and idle in the first seconds."""
    machine = (gpu,) if gpu else gpus(1)
    loaded = {"temperature_c": temperature, "power_w": power, "utilisation": use, "sm_mhz": 1700.0}
    cold = {"temperature_c": 30.0, "power_w": 90.0, "utilisation": 0.0, "sm_mhz": 345.0}
    readings = tuple(
        Reading(uuid="GPU-0", at=100 + at / 2, check="stress", **(cold if at < 6 else loaded)) for at in range(120)
    )
    other = Reading(uuid="GPU-0", at=161, check="gemm", temperature_c=99.0, power_w=1.0, utilisation=0.0)
    return context(machine, readings=(other, *readings), before={"GPU-0": health()})


def finding(metric: str, given: CheckContext | None = None, *speeds: float, **more: Any) -> Finding:
    return the(read(CHECK, given or sampled(), said(*speeds, **more)), metric)


def test_a_healthy_gpu_passes_everything_that_is_judged() -> None:
    findings = read(CHECK, sampled(), said())
    assert {one.metric for one in findings if one.verdict is Grade.PASS} == {
        *("results", "steadiness", "step_time", "use", "temperature", "power")
    }
    assert {one.metric for one in findings if one.verdict is Grade.SKIPPED} == {"clock", "speed"}


@pytest.mark.parametrize(
    ("slow", "verdict", "apart"),
    [
        (800.0, Grade.PASS, "0.0% apart"),
        (760.0, Grade.PASS, "5.0% apart"),
        (759.0, Grade.WARN, "5.1% apart"),
        (720.0, Grade.WARN, "10.0% apart"),
        (719.0, Grade.FAIL, "10.1% apart"),
    ],
)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_three_runs_may_differ_by_five_per_cent_and_fail_beyond_ten(
    which: int, slow: float, verdict: Grade, apart: str
) -> None:
    """C2.4: three runs within 5 %, fail > 10 %, whichever of them is the slow one; the reason has the figures."""
    speeds = [800.0] * 9
    speeds[3 * which : 3 * which + 3] = [slow] * 3
    found = finding("steadiness", None, *speeds)
    assert found.verdict is verdict
    assert f"{apart} (allowed 5%)" in found.message
    assert found.confirm is (verdict is Grade.FAIL)
    assert found.code == ("stress-steady-ok" if verdict is Grade.PASS else "stress-unsteady")


def test_fewer_than_three_runs_are_not_compared() -> None:
    """However many windows one run has: its thirds are no runs."""
    one = [{"run": 0, "at": float(at), "tflops": 840.0} for at in range(9)]
    found = finding("steadiness", windows=one)
    assert (found.verdict, "1 runs were measured, 3 are compared" in found.message) == (Grade.INCONCLUSIVE, True)
    assert finding("steadiness", None, 840.0, 840.0).verdict is Grade.INCONCLUSIVE


def test_between_the_runs_nothing_counts() -> None:
    """While the data of the next run are prepared the GPU is not under load, and after that not at once."""
    given = sampled()
    idle = {"temperature_c": 30.0, "power_w": 90.0, "utilisation": 0.0, "sm_mhz": 345.0}
    between = tuple(Reading(uuid="GPU-0", at=120 + at / 100, check="stress", **idle) for at in range(350))
    paused = context(gpus(1), readings=(*given.readings, *between), before=given.before)
    assert finding("use", paused, loaded=[100.0, 160.0]).verdict is Grade.INCONCLUSIVE
    for metric in ("use", "power"):
        assert finding(metric, paused, loaded=[100.0, 120.0 - 1e-6, 122.5, 160.0]).verdict is Grade.PASS


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), 0.0])
def test_windows_without_a_speed_are_not_steady(speed: float) -> None:
    found = finding("steadiness", None, *(840.0,) * 5, speed, *(840.0,) * 3)
    assert found.verdict is Grade.INCONCLUSIVE


@pytest.mark.parametrize(
    ("last", "verdict"), [(2.0, Grade.PASS), (2.4, Grade.PASS), (2.41, Grade.FAIL), (float("nan"), Grade.FAIL)]
)
def test_the_step_time_may_rise_by_a_fifth(last: float, verdict: Grade) -> None:
    """C2.4: up to 20 %, and the reason says by how much."""
    found = finding("step_time", step_ms_first=2.0, step_ms_last=last)
    assert found.verdict is verdict
    assert "(allowed +20%)" in found.message


@pytest.mark.parametrize(
    ("name", "temperature", "verdict"),
    [
        ("NVIDIA H200", 84, Grade.PASS),
        ("NVIDIA H200", 85, Grade.FAIL),
        ("NVIDIA H100 80GB HBM3", 84, Grade.PASS),
        ("NVIDIA H100 80GB HBM3", 85, Grade.FAIL),
        ("NVIDIA A100-SXM4-80GB", 80, Grade.FAIL),
        ("NVIDIA A100-SXM4-80GB", 79, Grade.PASS),
        ("NVIDIA L4", 86, Grade.PASS),  # its driver says 87
        ("NVIDIA L4", 87, Grade.FAIL),
    ],
)
def test_it_stays_below_the_temperature_of_its_model(name: str, temperature: float, verdict: Grade) -> None:
    """C2.4: < 85 °C H100, < 80 °C A100."""
    gpu = Gpu(uuid="GPU-0", index=0, name=name)
    assert finding("temperature", sampled(temperature=temperature, gpu=gpu)).verdict is verdict


def test_hot_for_a_moment_warns() -> None:
    given = sampled()
    moment = Reading(uuid="GPU-0", at=120, check="stress", temperature_c=86.0)
    brief = context(gpus(1), readings=(*given.readings, moment), before=given.before)
    assert finding("temperature", brief).verdict is Grade.WARN


def test_only_the_time_under_load_counts() -> None:
    """Before it the data are prepared; after it the driver is sampled until the last GPU is done."""
    idle = {"temperature_c": 30.0, "power_w": 90.0, "utilisation": 0.0, "sm_mhz": 345.0}
    around = tuple(Reading(uuid="GPU-0", at=at, check="stress", **idle) for at in (*range(60, 100), 170, 180))
    given = context(gpus(1), readings=(*around, *sampled().readings), before=sampled().before)
    assert finding("use", given).verdict is Grade.INCONCLUSIVE
    for metric in ("use", "power", "temperature"):
        assert finding(metric, given, loaded=[100.0, 160.0]).verdict is Grade.PASS


@pytest.mark.parametrize(("use", "verdict"), [(91, Grade.PASS), (90, Grade.INCONCLUSIVE), (40, Grade.INCONCLUSIVE)])
def test_a_gpu_that_was_not_busy_was_not_stressed(use: float, verdict: Grade) -> None:
    """C2.4: use > 90 %."""
    found = finding("use", sampled(use=use))
    assert found.verdict is verdict
    assert f"busy for {use} % of the time (required: more than 90 %)" in found.message


def test_a_gpu_that_draws_too_little_power_is_held_back() -> None:
    low = finding("power", sampled(power=500))
    assert (low.verdict, low.code) == (Grade.FAIL, "stress-low-power")
    other = finding("power", sampled(power=500, gpu=Gpu(uuid="GPU-0", index=0, name="NVIDIA L4")))
    assert other.verdict is Grade.WARN


def test_watts_of_a_whole_gpu_are_not_held_against_its_slice() -> None:
    part = Gpu(uuid="GPU-0", index=0, name="NVIDIA H200", part_of="GPU-9", profile="1g.18gb")
    assert "power" not in {one.metric for one in read(CHECK, sampled(gpu=part), said())}


def test_nobody_asks_how_busy_a_slice_was() -> None:
    """The driver never tells it: it is not missing."""
    part = Gpu(uuid="GPU-0", index=0, name="NVIDIA H200", part_of="GPU-9", profile="1g.18gb")
    warm = tuple(Reading(uuid="GPU-0", at=at / 2, check="stress", temperature_c=60.0) for at in range(40))
    here = context((part,), readings=warm, before={"GPU-0": health(utilisation=NONE_HERE)})
    assert (finding("use", here).verdict, finding("use", here).code) == (Grade.SKIPPED, "stress-use-told")
    silent = context((part,), readings=warm, before={"GPU-0": health(utilisation=Unknown("the driver timed out"))})
    assert finding("use", silent).verdict is Grade.INCONCLUSIVE


def test_what_the_driver_did_not_say_does_not_pass() -> None:
    findings = read(CHECK, context(gpus(1)), said())
    for metric in ("use", "temperature", "power"):
        assert the(findings, metric).verdict is Grade.INCONCLUSIVE


def test_unknown_limits_are_reported_not_judged() -> None:
    gpu = Gpu(uuid="GPU-0", index=0, name="NVIDIA L4")
    given = sampled(gpu=gpu)
    bare = context((gpu,), readings=given.readings)
    assert [finding(metric, bare).verdict for metric in ("temperature", "power")] == [Grade.SKIPPED, Grade.SKIPPED]


def test_wrong_results_under_load_fail_without_a_second_chance() -> None:
    found = finding("results", mismatches=1, where=[{"row": 3, "col": 4, "got": 1, "want": 2}])
    assert (found.verdict, found.code, found.confirm) == (Grade.FAIL, "stress-mismatch", False)
    assert "row 3, column 4" in found.message
    assert finding("results", verified=0).verdict is Grade.INCONCLUSIVE


def test_speed_is_held_against_peers() -> None:
    machine = gpus(4)
    given = context(machine, wish=RunRequest(device="cpu"))
    findings = read(CHECK, given, said(), said(), said(), said(*(780.0,) * 9))
    assert [the(findings, "speed", gpu).verdict for gpu in (0, 3)] == [Grade.PASS, Grade.FAIL]


def test_a_cpu_has_no_driver_to_ask() -> None:
    findings = read(CHECK, context(gpus(1), wish=RunRequest(device="cpu")), said())
    assert {one.metric for one in findings} == {"results", "steadiness", "step_time", "speed"}


def test_no_answer_and_half_an_answer_never_pass() -> None:
    assert codes(read(CHECK, sampled(), OUT_OF_MEMORY)) == ["out-of-memory"]
    assert all(one.verdict is Grade.INCONCLUSIVE for one in read(CHECK, sampled(), {}))


def test_a_day_gets_a_deadline_of_more_than_a_day() -> None:
    """C1.10, C2.4: optional 24 h."""
    assert CHECK.request is not None
    job = CHECK.request(CHECK.servings[0], context(gpus(1), wish=RunRequest(params={"stress": {"seconds": 86400}})))
    assert job.params["seconds"] == 86400
    assert job.deadline_s > 86400 * 1.2

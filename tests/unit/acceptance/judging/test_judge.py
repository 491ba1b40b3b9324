"""The judge: floor, peers and history, the worst counts, and what cannot be judged never passes (C2.1, C2.5)."""

from __future__ import annotations

import math

import pytest

from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.record import Finding, Measurement, Remedy, Thresholds
from gpukeeper.model.gpu import Gpu, Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.machines import METHOD, context, gpus, health, measured, past

FLOOR = Thresholds(floor=690, warn=740, reference=780, ceiling=1009, method="gemm/*", source="measured here")


def verdicts(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.verdict.value, finding.code) for finding in findings]


def one(value: object, limits: Thresholds = FLOOR, **more: object) -> Finding:
    return judge.assess(measured(value, **more), context(gpus(1), limits=limits))[0]


@pytest.mark.parametrize(
    ("value", "verdict", "code"),
    [
        (780, "PASS", "gemm-ok"),
        (740, "PASS", "gemm-ok"),
        (739, "WARN", "gemm-near-floor"),
        (690, "WARN", "gemm-near-floor"),
        (689, "FAIL", "gemm-below-floor"),
        (0, "FAIL", "gemm-below-floor"),
        (1009, "PASS", "gemm-ok"),
        (1010, "INCONCLUSIVE", "gemm-implausible"),
    ],
)
def test_a_figure_against_its_floor_and_ceiling(value: float, verdict: str, code: str) -> None:
    found = one(value)
    assert (found.verdict, found.code) == (verdict, code), found.message
    assert found.confirm is (verdict == "FAIL"), "a FAIL must be seen again before it counts"


def test_the_sentence_names_figure_floor_and_distance() -> None:
    found = one(621)
    assert found.message == "gemm bf16: 621.0 TFLOP/s, 10.0 % below the floor of 690.0 TFLOP/s."
    assert (found.value, found.floor, found.reference, found.source) == (621, 690, 780, "measured here")
    assert found.action is Remedy.CONTACT_VENDOR


def test_all_three_layers_are_told_even_when_one_decides() -> None:
    found = judge.assess(measured(780, 781, 650), context(gpus(3), limits=FLOOR, history={"S2": (past(790),)}))[2]
    assert [layer.partition(":")[0] for layer in found.layers] == ["floor", "peers", "history"]
    assert found.code == "gemm-below-floor", "of equally bad layers the first names the reason"


def test_an_estimate_only_warns() -> None:
    guess = Thresholds(floor=690, ceiling=1009, method="gemm/*", may_fail=False)
    found = one(600, guess)
    assert (found.verdict, found.code) == (Grade.WARN, "gemm-below-floor")
    assert "estimate" in found.message


def test_a_floor_of_another_method_is_no_floor() -> None:
    found = one(600, Thresholds(floor=690, ceiling=1009, method="gemm/mm/n4096/*"))
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "gemm-no-yardstick")
    assert "gemm/mm/n4096/*" in found.layers[0]
    assert METHOD in found.layers[0]
    assert found.floor is None


def test_nothing_to_hold_it_against_is_inconclusive_and_shows_what_to_do() -> None:
    found = one(780, Thresholds())
    assert (found.verdict, found.code, found.action) == ("INCONCLUSIVE", "gemm-no-yardstick", Remedy.CHECK_CONFIG)
    assert "reference file" in found.message


def test_peers_alone_may_pass_and_say_that_a_common_loss_is_not_seen() -> None:
    found = judge.assess(measured(400, 401, 399), context(gpus(3), limits=Thresholds()))
    assert {finding.verdict for finding in found} == {Grade.PASS}
    assert "common to all" in found[0].message


def test_two_gpus_are_no_peers() -> None:
    found = judge.assess(measured(400, 300), context(gpus(2), limits=Thresholds()))
    assert {finding.code for finding in found} == {"gemm-no-yardstick"}


def test_a_gpu_slower_than_its_peers_fails_although_it_is_above_the_floor() -> None:
    found = judge.assess(measured(800, 800, 800, 800, 800, 800, 800, 750), context(gpus(8), limits=FLOOR))
    assert verdicts(found)[-1] == ("FAIL", "gemm-slower-than-peers")
    assert verdicts(found)[:-1] == [("PASS", "gemm-ok")] * 7
    assert found[-1].peer_n == 8
    assert found[-1].peer_median == 800
    assert "6.2 % worse than the median of 8 identical GPUs (800.0 TFLOP/s)" in found[-1].message
    assert "102.6 % of the reference" in found[0].layers[1], "the median is always told against the reference"


def test_only_equals_are_compared() -> None:
    """Another model, power limit, slice or method is another group; each here is too small to judge."""
    mixed = (*gpus(2), *(Gpu(uuid=f"GPU-{i}", index=i, name="NVIDIA L4") for i in (2, 3)))
    found = judge.assess(measured(780, 780, 60, 60), context(mixed, limits=Thresholds()))
    assert {finding.code for finding in found} == {"gemm-no-yardstick"}
    before = {"GPU-3": health("GPU-3", power_limit_w=400.0), "GPU-0": health()}
    limited = judge.assess(measured(780, 780, 780, 500), context(gpus(4), limits=Thresholds(), before=before))
    assert limited[3].code == "gemm-no-yardstick", (
        "a GPU with a lower power limit is not as fast, and is not its peers'"
    )


def test_a_gpu_without_a_known_model_has_no_peers() -> None:
    unknown = gpus(4, name=Unknown("the driver did not say"))
    found = judge.assess(measured(780, 780, 780, 780), context(unknown, limits=Thresholds()))
    assert {finding.code for finding in found} == {"gemm-no-yardstick"}


def test_a_figure_that_nobody_believes_is_no_peer() -> None:
    found = judge.assess(measured(780, 780, 2000), context(gpus(3), limits=FLOOR))
    assert found[2].code == "gemm-implausible"
    assert found[0].peer_n == 0


@pytest.mark.parametrize(
    ("earlier", "value", "verdict", "code"),
    [
        ([800], 780, "PASS", "gemm-ok"),
        ([800], 755, "WARN", "gemm-slower-than-before"),
        ([800], 700, "WARN", "gemm-slower-than-before"),  # one earlier run may have been the odd one
        ([800, 801, 799], 719, "FAIL", "gemm-slower-than-before"),
        ([800, 801, 799], 722, "WARN", "gemm-slower-than-before"),
    ],
)
def test_history_of_the_same_serial(earlier: list[float], value: float, verdict: str, code: str) -> None:
    pasts = tuple(past(figure, days=9 - i) for i, figure in enumerate(earlier))
    found = judge.assess(measured(value), context(gpus(1), limits=Thresholds(), history={"S0": pasts}))[0]
    assert (found.verdict, found.code) == (verdict, code), found.message
    assert found.baseline == 800


def test_samples_that_scatter_are_inconclusive_where_they_contradict_each_other() -> None:
    noisy = one([650, 690, 740, 790, 850])
    assert (noisy.verdict, noisy.code, noisy.action) == ("INCONCLUSIVE", "gemm-noisy", Remedy.RETEST)
    assert "scatter by" in noisy.message
    assert noisy.repeatability == pytest.approx(0.105, abs=0.005)


def test_noise_does_not_hide_what_every_sample_shows() -> None:
    assert one([400, 450, 500, 550, 600]).code == "gemm-below-floor"
    assert one([745, 790, 830, 900, 960]).code == "gemm-ok"


def test_a_node_has_one_figure_held_against_its_model_and_its_own_past() -> None:
    asked = Measurement(check="collectives", metric="all_reduce", gpu=None, unit="GB/s",
                        method="busbw/nccl/n8/fp32/default/plateau", samples=(340, 341, 340))  # fmt: skip
    found = judge.assess([asked], context(gpus(8)))[0]
    assert (found.verdict, found.code, found.gpu) == ("FAIL", "collectives-below-floor", None)
    mixed = (*gpus(7), Gpu(uuid="GPU-7", index=7, name="NVIDIA L4"))
    assert judge.assess([asked], context(mixed))[0].code == "collectives-no-yardstick"
    key = "collectives.all_reduce busbw/nccl/n8/fp32/default/plateau"
    pasts = tuple(past(480, days=i, key=key) for i in (1, 2, 3))
    found = judge.assess([asked], context(mixed, history={"node-1": pasts}))[0]
    assert found.code == "collectives-slower-than-before"


def test_less_is_better_turns_everything_around() -> None:
    limits = Thresholds(floor=100, warn=30, reference=20, ceiling=1)
    about = {"check": "collectives", "metric": "latency", "unit": "us", "lower_is_better": True}
    codes = {us: one(us, limits, **about).code for us in (20, 31, 101, 0.5)}
    assert codes == {
        20: "collectives-ok",
        31: "collectives-near-floor",
        101: "collectives-below-floor",
        0.5: "collectives-implausible",
    }
    assert "above the floor" in one(101, limits, **about).message
    slow = judge.assess(measured(20, 20, 20, 22, **about), context(gpus(4), limits=Thresholds()))[3]
    assert (slow.verdict, slow.code, slow.peer_median) == ("FAIL", "collectives-slower-than-peers", pytest.approx(20))


@pytest.mark.parametrize("samples", [(), (math.nan,), (780, math.inf), (-1.0,)])
def test_a_missing_measurement_never_passes(samples: tuple[float, ...]) -> None:
    found = one(samples)
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "gemm-missing")
    assert "was not measured" in found.message


def test_a_time_of_zero_is_no_measurement() -> None:
    assert one(0, Thresholds(floor=100), check="collectives", metric="latency", lower_is_better=True).code.endswith(
        "missing"
    )


def test_missing_gives_the_reason() -> None:
    found = judge.missing("memory_bandwidth", "copy", "GPU-1", "the probe timed out.")
    assert found.message == "memory bandwidth copy was not measured: the probe timed out."
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "memory-bandwidth-missing")


def test_a_single_sample_has_no_repeatability_and_is_judged_all_the_same() -> None:
    found = one((780,))
    assert (found.verdict, found.repeatability) == (Grade.PASS, None)


def test_without_confirm_nothing_asks_to_be_repeated() -> None:
    assert judge.assess(measured(1), context(gpus(1), limits=FLOOR), confirm=False)[0].confirm is False


def test_nothing_measured_nothing_said() -> None:
    assert judge.assess([], context(gpus(1))) == ()

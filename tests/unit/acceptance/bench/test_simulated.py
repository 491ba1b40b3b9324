"""The simulated machine: the same seed gives the same figures, and each fault has its symptom and no other."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.bench.simulated_gpus import COUNTERS
from gpukeeper.acceptance.record import ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from gpukeeper.model.gpu import Health, Reading

ONE = ("gemm", "memory_bandwidth", "copies", "memory_pattern", "exact", "training", "stress")
SEVERAL = ("collectives", "ddp", "throughput", "links", "nccl_tests")


def uuids(bench: SimulatedWorkbench) -> list[str]:
    machine = asyncio.run(bench.machine())
    assert isinstance(machine.gpus, tuple)
    return [gpu.uuid for gpu in machine.gpus]


def each(bench: SimulatedWorkbench, probe: str, **params: Any) -> list[ProbeReply]:
    job = ProbeRequest(probe=probe, params=params)
    return list(asyncio.run(bench.each(dict.fromkeys(uuids(bench), job))).values())


def together(bench: SimulatedWorkbench, probe: str, **params: Any) -> list[ProbeReply]:
    return list(asyncio.run(bench.together(uuids(bench), ProbeRequest(probe=probe, params=params))).values())


def results(answers: list[ProbeReply]) -> list[Any]:
    return [one.result for one in answers if isinstance(one, ProbeResult)]


def bf16(bench: SimulatedWorkbench) -> list[float]:
    return [statistics.median(one["dtypes"]["bf16"]["tflops"]) for one in results(each(bench, "gemm"))]


def health(bench: SimulatedWorkbench) -> list[Health]:
    found = asyncio.run(bench.health())
    assert isinstance(found, dict)
    return list(found.values())


def test_the_same_seed_gives_the_same_machine() -> None:
    assert bf16(SimulatedWorkbench(seed=3)) == bf16(SimulatedWorkbench(seed=3))
    assert bf16(SimulatedWorkbench(seed=3)) != bf16(SimulatedWorkbench(seed=4))


def test_gpus_differ_by_their_silicon_and_from_run_to_run() -> None:
    figures = bf16(SimulatedWorkbench(256, seed=1))
    assert statistics.fmean(figures) == pytest.approx(775, rel=0.003)
    assert statistics.stdev(figures) / 775 == pytest.approx(0.008, rel=0.2)
    samples = results(each(SimulatedWorkbench(1, seed=1), "gemm", repeats=400))[0]["dtypes"]["bf16"]["tflops"]
    assert statistics.stdev(samples) / statistics.fmean(samples) == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("probe", ONE)
def test_every_probe_of_one_gpu_answers(probe: str) -> None:
    assert len(results(each(SimulatedWorkbench(3), probe))) == 3


@pytest.mark.parametrize("probe", SEVERAL)
def test_every_probe_of_several_answers_for_each_rank(probe: str) -> None:
    found = results(together(SimulatedWorkbench(3), probe))
    assert [one["rank"] for one in found] == [0, 1, 2]


def test_a_probe_that_does_not_exist_is_broken() -> None:
    bench = SimulatedWorkbench(1)
    assert [one.kind for one in (*each(bench, "no"), *together(bench, "no")) if isinstance(one, ProbeFailure)] == [
        "bad_setting"
    ] * 2


def test_time_passes_only_while_something_runs() -> None:
    bench = SimulatedWorkbench(2)
    before = bench.clock.now()
    health(bench)
    assert bench.clock.now() == before
    each(bench, "stress", seconds=60.0)
    assert (bench.clock.now() - before).total_seconds() == 60.0
    readings: list[Reading] = list(asyncio.run(bench.readings()))
    assert len(readings) == 2 * 120
    assert asyncio.run(bench.readings()) == []


def test_a_healthy_machine_counts_nothing_bad() -> None:
    bench = SimulatedWorkbench(2)
    each(bench, "gemm")
    for one in health(bench):
        assert set(one.counters) == set(COUNTERS)
        assert {key for key, value in one.counters.items() if value} == {"energy_mj"}
        assert (one.xids, one.foreign) == ((), ())


def test_a_slow_gpu_is_slow_everywhere() -> None:
    bench, clean = SimulatedWorkbench(seed=5, slow={3: 0.1}), SimulatedWorkbench(seed=5)
    shares = [now / was for now, was in zip(bf16(bench), bf16(clean), strict=True)]
    assert [round(share, 2) for share in shares] == [1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0]
    memory = [statistics.median(one["gbps"]) for one in results(each(bench, "memory_bandwidth"))]
    assert memory.index(min(memory)) == 3
    steps = [statistics.median(one["local_step_ms"]) for one in results(together(bench, "throughput", steps=20))]
    assert steps.index(max(steps)) == 3


def test_a_flipped_bit_is_in_one_kind_of_number_and_located() -> None:
    found = results(each(SimulatedWorkbench(flip={2: "fp8"}), "exact"))
    wrong = {(n, dtype) for n, one in enumerate(found) for dtype, of in one["dtypes"].items() if of["mismatches"]}
    assert wrong == {(2, "fp8")}
    assert found[2]["dtypes"]["fp8"]["where"][0].keys() >= {"row", "col", "got", "want"}
    digests = {one["dtypes"]["bf16"]["digest"] for one in found}
    assert len(digests) == 1


def test_a_missing_gpu_is_still_on_the_bus() -> None:
    machine = asyncio.run(SimulatedWorkbench(8, missing=1).machine())
    assert isinstance(machine.gpus, tuple)
    assert (len(machine.gpus), machine.on_bus) == (7, 8)


def test_a_hot_gpu_falls_and_gives_the_reason() -> None:
    bench = SimulatedWorkbench(throttle=(5,))
    found = results(each(bench, "stress", seconds=30.0))
    falls = [one["windows"][-1]["tflops"] / one["windows"][0]["tflops"] for one in found]
    assert [round(fall, 1) for fall in falls] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 1.0, 1.0]
    readings = asyncio.run(bench.readings())
    slowed = {one.uuid for one in readings if one.reasons is not None and one.reasons & 0x40}
    assert slowed == {uuids(bench)[5]}
    assert min(one.sm_mhz or 0 for one in readings if one.uuid in slowed) < 1400
    assert [bool(one.counters["violation_thermal_ns"]) for one in health(bench)].index(True) == 5


def test_a_wrong_collective_is_wrong_on_one_rank() -> None:
    for fault in (True, 1):
        found = results(together(SimulatedWorkbench(4, wrong_collective=fault), "collectives"))
        assert [sum(of["wrong"] for of in one["results"]) > 0 for one in found] == [False, True, False, False]


def test_busbw_grows_with_size_to_its_plateau() -> None:
    """C2.2: eight GPUs reduce in the switch, four in a ring."""
    for count, plateau in ((8, 478), (4, 363)):
        (one, *_) = results(
            together(SimulatedWorkbench(count), "collectives", ops=["all_reduce"], sizes=[2**20, 2**33])
        )
        small, large = (statistics.median(of["busbw"]) for of in one["results"])
        assert small < 0.1 * large
        assert large == pytest.approx(plateau, rel=0.02)


def test_a_variant_changes_the_way_and_the_speed() -> None:
    """C1.6: a switch that changes nothing is one that did nothing."""
    speed = {}
    for variant in ("default", "nvlink", "no_nvls", "network"):
        params = {"ops": ["all_reduce"], "sizes": [2**33], "variant": variant}
        (one, *_) = results(together(SimulatedWorkbench(8), "collectives", **params))
        speed[variant] = (round(statistics.median(one["results"][0]["busbw"]), -1), one["algorithm"])
    assert speed == {
        "default": (480, "NVLS"),
        "nvlink": (480, "NVLS"),
        "no_nvls": (360, "RING"),
        "network": (40, "RING"),
    }


def test_heat_and_slowness_do_not_reach_the_link_to_the_host() -> None:
    clean = results(each(SimulatedWorkbench(2, noise=0.0), "copies"))
    sick = results(each(SimulatedWorkbench(2, noise=0.0, slow={0: 0.2}, throttle=(1,)), "copies"))
    assert [one["h2d"] for one in sick] == [one["h2d"] for one in clean]
    assert sick[0]["d2d"][0] == pytest.approx(0.8 * clean[0]["d2d"][0])


def test_a_probe_that_hangs_costs_its_deadline() -> None:
    bench = SimulatedWorkbench(8, hang=(4,))
    before = bench.clock.now()
    answers = each(bench, "gemm")
    assert [one.kind for one in answers if isinstance(one, ProbeFailure)] == ["timeout"]
    assert isinstance(answers[4], ProbeFailure)
    assert (bench.clock.now() - before).total_seconds() == 120.0


def test_a_rank_that_hangs_lets_the_others_wait() -> None:
    kinds = [
        one.kind for one in together(SimulatedWorkbench(3, hang={1: "ddp"}), "ddp") if isinstance(one, ProbeFailure)
    ]
    assert kinds == ["rendezvous", "timeout", "rendezvous"]


def test_errors_are_counted_only_once_something_ran() -> None:
    """C2.4: they are judged by their change."""
    bench = SimulatedWorkbench(3, ecc=(1,), xid={2: 79})
    assert [one.counters["ecc_uncorrected_volatile"] for one in health(bench)] == [0, 0, 0]
    each(bench, "gemm")
    after = health(bench)
    assert [one.counters["ecc_uncorrected_volatile"] for one in after] == [0, 1, 0]
    assert [[xid.number for xid in one.xids] for one in after if isinstance(one.xids, tuple)] == [[], [], [79]]


def test_a_neighbour_is_named_and_a_broken_gpu_quoted() -> None:
    bench = SimulatedWorkbench(2, foreign={0: (4711,)}, broken={1: "CUDA error: out of memory"})
    assert [one.foreign for one in health(bench)] == [(4711,), ()]
    answers = each(bench, "gemm")
    assert isinstance(answers[0], ProbeResult)
    assert isinstance(answers[1], ProbeFailure)
    assert answers[1].words == "CUDA error: out of memory"


def test_training_that_differs_differs_from_all_others() -> None:
    found = results(each(SimulatedWorkbench(4, training=(2,)), "training"))
    hashes = [one["runs"][0]["hash"] for one in found]
    assert [hashes.count(one) for one in hashes] == [3, 3, 1, 3]
    assert all(one["equal"] for one in found)
    (one,) = results(each(SimulatedWorkbench(1), "training", inject={"flip": True}))
    assert not one["equal"]


def test_a_fault_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(TypeError):
        SimulatedWorkbench(slwo={1: 0.5})

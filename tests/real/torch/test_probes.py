"""What the probes measure: shapes of their answers, and that planted faults in the work show in them. On the CPU."""

from __future__ import annotations

from statistics import median

from tests.real.torch import installation

GEMM = {"n": 192, "rounds": 20, "repeats": 3}


def test_products_are_timed_for_every_kind_of_number(worker: installation.Worker) -> None:
    result = worker.run("gemm", dtypes=["fp32", "tf32", "bf16", "int8"], sweep=[64, 128], **GEMM)
    assert result["dtypes"]["tf32"] == {"unsupported": "a CPU does not support tf32"}
    for dtype, method in (("fp32", "gemm/mm/n192/normal/burst20"), ("int8", "gemm/int_mm/n192/uniform/burst20")):
        assert len(result["dtypes"][dtype]["tflops"]) == 3
        assert min(result["dtypes"][dtype]["tflops"]) > 0
        assert result["dtypes"][dtype]["method"] == method
    assert result["sweep"]["bf16"].keys() == {"64", "128"}
    usual = worker.run("gemm", dtypes=["fp32"], **{**GEMM, "rounds": 10})
    assert usual["dtypes"]["fp32"]["method"] == "gemm/mm/n192/normal/burst", "other bursts are another method"


def test_the_old_kits_products_and_those_on_a_share_of_memory(worker: installation.Worker) -> None:
    """C1.4 (2048×10, 3072×20: here smaller), C1.6 (SGEMM and batched on a share of the free memory)."""
    result = worker.run("gemm", dtypes=[], matmul=[[64, 10], [96, 20]], sgemm=0.5, sgemm_n_max=256)
    assert [(one["n"], one["rounds"]) for one in result["matmul"].values()] == [(64, 10), (96, 20)]
    assert result["sgemm"]["n"] == 256
    assert min(result["sgemm"]["tflops"]) > 0


def test_batched_products_are_counted_all(worker: installation.Worker) -> None:
    result = worker.run("gemm", dtypes=[], batched=0.5, batched_n=64, batched_max=8)
    assert result["batched"]["count"] == 8
    assert len(result["batched"]["tflops"]) == 3


def test_work_that_is_planted_into_the_timing_shows_in_the_figure(worker: installation.Worker) -> None:
    """Twice the work: a figure of half, whatever else this machine does meanwhile."""
    clean, slow = [], []
    for _ in range(3):
        clean += worker.run("gemm", dtypes=["fp32"], **GEMM)["dtypes"]["fp32"]["tflops"]
        slow += worker.run("gemm", dtypes=["fp32"], inject={"slow": 3.0}, **GEMM)["dtypes"]["fp32"]["tflops"]
    assert median(slow) < 0.6 * median(clean)


def test_an_unknown_kind_of_number_is_refused(worker: installation.Worker) -> None:
    words = worker.ask("gemm", dtypes=["fp7"])["broken"]["words"]
    assert words.splitlines()[-1].startswith("ValueError: unknown dtype 'fp7'; valid values: fp32")


def test_a_copy_inside_memory_is_timed_and_compared(worker: installation.Worker) -> None:
    result = worker.run("memory_bandwidth", bytes=8 << 20, seconds=0.05, repeats=4)
    assert len(result["gbps"]) == 4
    assert result["wrong"] == 0
    assert worker.run("memory_bandwidth", bytes=8 << 20, seconds=0.05, inject={"flip": True})["wrong"] == 1


def test_copies_go_there_and_back_and_are_compared(worker: installation.Worker) -> None:
    """C1.6: H2D, D2H and D2D."""
    result = worker.run("copies", bytes=4 << 20, seconds=0.02, repeats=3)
    assert [len(result[way]) for way in ("h2d", "d2h", "d2d")] == [3, 3, 3]
    assert (result["verified"], result["wrong"], result["where"]) == (True, 0, [])
    assert "no GPU" in result["pinned"]
    assert result["methods"] == {"h2d": "copy/pageable", "d2h": "copy/pageable", "d2d": "copy/read+write"}


def test_a_bit_flipped_on_its_way_is_found_and_located(worker: installation.Worker) -> None:
    result = worker.run("copies", bytes=4 << 20, seconds=0.02, inject={"flip": True})
    assert (result["verified"], result["wrong"]) == (False, 1)
    (where,) = result["where"]
    assert where["offset"] == 2 << 20
    assert int(where["got"], 16) ^ int(where["want"], 16) == 1 << 5


def test_memory_keeps_every_pattern(worker: installation.Worker) -> None:
    """C1.10: the memory test."""
    result = worker.run("memory_pattern", bytes=8 << 20, chunk=1 << 20, passes=2)
    assert result["patterns"] == ["zeros", "ones", "0x55", "0xaa", "address", "random"]
    assert (result["errors"], result["passes"], result["tested_bytes"]) == (0, 2, 7 << 20)


def test_a_bit_that_memory_lost_is_found_in_every_pattern(worker: installation.Worker) -> None:
    for pattern in ("zeros", "ones", "0x55", "0xaa", "address", "random"):
        result = worker.run("memory_pattern", bytes=4 << 20, chunk=1 << 20, inject={"flip": pattern})
        assert result["errors"] == 1
        (where,) = result["where"]
        assert where["pattern"] == pattern
        assert int(where["got"], 16) ^ int(where["want"], 16) == 1 << 17
        assert where["offset"] == (2 << 20) + (1 << 20) // 8 // 3 * 8


def test_too_little_memory_is_no_result(worker: installation.Worker) -> None:
    """C17.2: out of memory is broken, never a small test that passes."""
    assert "out of memory" in worker.ask("memory_pattern", bytes=1 << 20, chunk=1 << 20)["broken"]["words"]


def test_stress_tells_speed_by_window_and_verifies_as_it_goes(worker: installation.Worker) -> None:
    result = worker.run("stress", n=64, seconds=0.6, window_s=0.1)
    assert len(result["windows"]) >= 3
    assert [one["at"] for one in result["windows"]] == sorted(one["at"] for one in result["windows"])
    assert result["verified"] > len(result["windows"])
    assert (result["mismatches"], result["where"]) == (0, [])
    assert result["step_ms_first"] > 0 < result["step_ms_last"]


def test_stress_is_three_runs_that_each_begin_anew(worker: installation.Worker) -> None:
    """C2.4: not thirds of one. Between them the data of the next one are prepared."""
    result = worker.run("stress", n=64, seconds=0.6, window_s=0.1)
    assert sorted({one["run"] for one in result["windows"]}) == [0, 1, 2]
    times = result["loaded"]
    assert len(times) == 6
    assert times == sorted(times)
    assert times[1] < times[2] < times[3] < times[4]


def test_stress_takes_the_next_kind_of_number_on_a_gpu_that_is_too_old_for_bf16() -> None:
    told = """
class Old:
    cuda, name, capability = True, "Tesla T4", (7, 5)
class Older(Old):
    capability = (6, 0)
from gpukeeper.acceptance.probes.stress import _dtype
print(_dtype(Old, "bf16"), _dtype(Older, "bf16"), _dtype(Old, "fp32"))
_dtype(Old, "fp8")
"""
    found = installation.inside(told)
    assert found.stdout.split() == ["fp16", "fp32", "fp32"]
    assert "stress in fp8: Tesla T4 has compute capability 7.5; fp8 needs 8.9" in found.stderr


def test_stress_finds_a_flipped_bit_while_hot(worker: installation.Worker) -> None:
    result = worker.run("stress", n=64, seconds=0.1, inject={"flip": True})
    assert result["mismatches"] == 1
    assert (result["where"][0]["row"], result["where"][0]["col"]) == (21, 32)
    assert result["where"][0]["got"] != result["where"][0]["want"]


def test_stress_that_slows_down_shows_it(worker: installation.Worker) -> None:
    """C2.4: the step time rises. Four times the work at the end, so that a busy machine does not hide it."""
    result = worker.run("stress", n=128, seconds=1.0, window_s=0.1, inject={"slow": 4.0})
    assert result["step_ms_last"] > 1.2 * result["step_ms_first"]

"""Matrix products: how their answers are read."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.checks.gemm import CHECK
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks.trials import OUT_OF_MEMORY, read, the
from tests.unit.acceptance.machines import context, gpus

ONLY_BF16 = RunRequest(params={"gemm": {"dtypes": ["bf16"]}})


def said(bf16: float = 780, **more: Any) -> dict[str, Any]:
    record = {"tflops": [bf16] * 5, "n": 8192, "method": "gemm/mm/n8192/normal/burst"}
    return {"dtypes": {"bf16": record}, "sweep": {}} | more


def test_each_kind_of_number_is_held_against_its_floor() -> None:
    """C2.5: a figure with unit, method, floor and its source, not `compute: true`."""
    good, bad = (the(read(CHECK, context(gpus(1), wish=ONLY_BF16), said(speed)), "bf16") for speed in (780, 600))
    assert (good.verdict, good.value, good.unit, good.method) == (
        Grade.PASS,
        780,
        "TFLOP/s",
        "gemm/mm/n8192/normal/burst",
    )
    assert (bad.verdict, bad.code, bad.confirm) == (Grade.FAIL, "gemm-below-floor", True)
    assert bad.floor == 690


def test_a_slow_gpu_is_found_among_its_peers() -> None:
    """C1.1: every GPU is tested, not only the first."""
    findings = read(CHECK, context(gpus(8), wish=ONLY_BF16), *[said() for _ in range(7)], said(735))
    assert [one.verdict for one in findings] == [Grade.PASS] * 7 + [Grade.FAIL]
    assert the(findings, "bf16", 7).code == "gemm-slower-than-peers"


def test_a_kind_of_number_that_the_gpu_lacks_is_skipped_and_one_that_is_missing_is_not() -> None:
    result = said()
    result["dtypes"]["fp8"] = {"unsupported": "needs 8.9"}
    wish = RunRequest(params={"gemm": {"dtypes": ["bf16", "fp8", "int8"]}})
    findings = read(CHECK, context(gpus(1), wish=wish), result)
    assert (the(findings, "fp8").verdict, the(findings, "fp8").code) == (Grade.SKIPPED, "gemm-unsupported")
    assert (the(findings, "int8").verdict, the(findings, "int8").code) == (Grade.INCONCLUSIVE, "gemm-missing")


def test_a_broken_probe_is_told_of_its_gpu_and_the_others_are_judged() -> None:
    findings = read(CHECK, context(gpus(2), wish=ONLY_BF16), said(), OUT_OF_MEMORY)
    assert the(findings, "bf16").verdict is Grade.PASS
    assert [one.code for one in findings if one.gpu == "GPU-1"] == ["out-of-memory"]


def test_the_default_products_are_those_of_the_old_kit() -> None:
    """C1.4: 2048×10 in a quick run, 3072×20 as well in longer ones."""
    quick, *longer = (serving.params["matmul"] for serving in CHECK.servings)
    assert quick == [[2048, 10]]
    assert longer == [[[2048, 10], [3072, 20]]] * len(longer)


def test_the_best_size_and_the_old_kits_products_are_told_beside_the_figure() -> None:
    """C1.4: matmul 2048×10 and 3072×20."""
    matmul = {"2048": {"tflops": [40.0], "n": 2048, "rounds": 10}}
    result = said(sweep={"bf16": {"4096": 700.0, "8192": 790.0}}, matmul=matmul)
    result["dtypes"]["fp32"] = {"tflops": [51.0] * 5, "n": 8192, "method": "gemm/mm/n8192/normal/burst"}
    wish = RunRequest(params={"gemm": {"dtypes": ["bf16", "fp32"]}})
    findings = read(CHECK, context(gpus(1), wish=wish), result)
    assert the(findings, "bf16").evidence["share_of_best"] == 780 / 790
    assert the(findings, "fp32").evidence == {"matmul": matmul}


def test_float32_on_a_share_of_memory_is_judged_where_it_was_requested() -> None:
    """C1.6."""
    sgemm = {"tflops": [50.0] * 3, "n": 32768, "method": "gemm/sgemm/memory/normal"}
    batched = {"tflops": [49.0] * 3, "n": 2048, "count": 500, "method": "gemm/bmm/n2048/normal"}
    given = context(gpus(1), wish=ONLY_BF16)
    deep = read(CHECK, given, said(sgemm=sgemm, batched=batched), depth=1)
    assert [the(deep, metric).value for metric in ("sgemm", "batched")] == [50.0, 49.0]
    assert {one.metric for one in read(CHECK, given, said())} == {"bf16"}
    assert the(read(CHECK, given, said(sgemm=sgemm), depth=1), "batched").code == "gemm-missing"


def test_a_persons_figures_and_injected_faults_reach_the_probe() -> None:
    wish = RunRequest(params={"gemm": {"n": 2048, "rounds": 10}}, inject={"gemm": {"slow": 0.1}})
    assert CHECK.request is not None
    job = CHECK.request(CHECK.servings[0], context(gpus(1), wish=wish))
    assert (job.probe, job.params["n"], job.params["rounds"]) == ("gemm", 2048, 10)
    assert job.params["inject"] == {"slow": 0.1}
    small = CHECK.request(CHECK.servings[2], context(gpus(1), wish=RunRequest(device="cpu")))
    assert (small.params["n"], small.params["sweep"], small.params["batched"]) == (256, [], 0.0)

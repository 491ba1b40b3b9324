"""How fast each GPU multiplies matrices, by data type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from gpukeeper.acceptance.check import (
    Check,
    CheckContext,
    CheckRun,
    CheckSize,
    RunMode,
    params_of,
    refuse,
    too_little,
    unknown_words,
)
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Values
from gpukeeper.model.gpu import Grade

NAME = "gemm"
UNIT = "TFLOP/s"
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
SWEEP = (4096, 6144, 8192, 10240, 12288, 16384)
SMALL = {
    "dtypes": ["fp32", "bf16"],
    "n": 256,
    "rounds": 10,
    "repeats": 3,
    "sweep": [],
    "matmul": [],
    "sgemm": 0.0,
} | {"batched": 0.0}


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    refuse(NAME, [*unknown_words(params, "dtypes", DTYPES), *too_little(params, n=256, rounds=1, repeats=3)])
    return ProbeRequest(probe=NAME, params=params, deadline_s=60 + 10 * serving.seconds)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    results, findings = replies.of_gpus(NAME, trial)
    wanted = params_of(NAME, trial.serving, context)
    requested = wanted.get("dtypes")
    found = list(findings)
    for dtype in requested if isinstance(requested, list | tuple) else DTYPES:
        records = {gpu: _record(result, "dtypes", str(dtype)) for gpu, result in results.items()}
        found += _judged(str(dtype), records, results, context)
    for metric in ("sgemm", "batched"):
        if wanted.get(metric):
            found += _judged(metric, {gpu: _record(one, metric) for gpu, one in results.items()}, {}, context)
    return tuple(found)


def _judged(
    metric: str, records: Mapping[str, Mapping[str, Any]], results: Mapping[str, Values], context: CheckContext
) -> Iterable[Finding]:
    """All GPUs together, since each is compared with the others."""
    unable = {gpu: str(record["unsupported"]) for gpu, record in records.items() if record.get("unsupported")}
    yield from (_unsupported(metric, gpu, why) for gpu, why in unable.items())
    measured = [
        Measurement(
            check=NAME,
            metric=metric,
            gpu=gpu,
            unit=UNIT,
            method=str(record.get("method", "")),
            samples=replies.figures(record.get("tflops")),
        )
        for gpu, record in records.items()
        if gpu not in unable
    ]
    for finding in judge.assess(measured, context):
        yield replace(finding, evidence=_evidence(metric, results.get(finding.gpu or "", {})))


def _evidence(metric: str, result: Values) -> dict[str, Any]:
    """Reported in addition: values of other sizes, and the products of the legacy kit."""
    evidence: dict[str, Any] = {}
    sizes = {size: float(one) for size, one in _record(result, "sweep", metric).items()}
    if sizes:
        evidence["sweep"] = sizes
        samples = sorted(replies.figures(_record(result, "dtypes", metric).get("tflops")))
        if samples and max(sizes.values()) > 0:
            evidence["share_of_best"] = samples[len(samples) // 2] / max(sizes.values())
    if metric == "fp32" and result.get("matmul"):
        evidence["matmul"] = result["matmul"]
    return evidence


def _unsupported(metric: str, gpu: str, why: str) -> Finding:
    return Finding(
        check=NAME,
        metric=metric,
        gpu=gpu,
        verdict=Grade.SKIPPED,
        code="gemm-unsupported",
        message=f"gemm {metric} does not apply: {why}.",
    )


def _record(result: Values, *keys: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = result
    for key in keys:
        found = replies.mapping(found.get(key))
    return found


CHECK = Check(
    name=NAME,
    title="Matrix multiplication",
    proves="The GPU multiplies matrices as fast as expected of its model, for every data type it supports, on data"
    " with the distribution of training data, while all GPUs of the machine are under the same load.",
    cannot="Does not check results (exact does), and one matrix size does not cover every kernel of a model.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=9,
            worth=70,
            what="six data types, 8192³, five bursts each",
            params={"dtypes": list(DTYPES), "n": 8192, "rounds": 10, "repeats": 5, "matmul": [[2048, 10]]},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=35,
            worth=90,
            what="nine bursts each, bf16 by size, float32 on a fifth of the free memory",
            params={"dtypes": list(DTYPES), "n": 8192, "rounds": 10, "repeats": 9, "sweep": list(SWEEP)}
            | {"matmul": [[2048, 10], [3072, 20]], "sgemm": 0.2, "batched": 0.2},
            small=SMALL,
        ),
        CheckSize(
            depth=2,
            seconds=85,
            worth=100,
            what="25 bursts each, bf16 by size, float32 on half of the free memory",
            params={"dtypes": list(DTYPES), "n": 8192, "rounds": 10, "repeats": 25, "sweep": list(SWEEP)}
            | {"matmul": [[2048, 10], [3072, 20]], "sgemm": 0.5, "batched": 0.5},
            small=SMALL,
        ),
    ),
    request=request,
    interpret=interpret,
)

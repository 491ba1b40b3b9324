"""How fast each GPU copies its own memory."""

from __future__ import annotations

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of, refuse, too_little
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "memory_bandwidth"
SMALL = {"bytes": 32 << 20, "seconds": 0.1, "repeats": 3}


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    refuse(NAME, too_little(params, bytes=1 << 20, repeats=3))
    return ProbeRequest(probe=NAME, params=params, deadline_s=60 + 10 * serving.seconds)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    results, findings = replies.of_gpus(NAME, trial)
    measured = [
        Measurement(
            check=NAME,
            metric="copy",
            gpu=gpu,
            unit="GB/s",
            method=str(result.get("method", "")),
            samples=replies.figures(result.get("gbps")),
        )
        for gpu, result in results.items()
    ]
    wrong = [_wrong(gpu, result) for gpu, result in results.items() if result.get("wrong")]
    return (*findings, *judge.assess(measured, context), *wrong)


def _wrong(gpu: str, result: Values) -> Finding:
    return Finding(
        check=NAME,
        metric="data",
        gpu=gpu,
        verdict=Grade.FAIL,
        code="memory-bandwidth-wrong-data",
        message=f"{result['wrong']} wrong words in a copy inside the GPU's memory. Take it out of service; run"
        " memory_pattern and exact for details.",
        action=Remedy.REPLACE_GPU,
        evidence={"wrong": result["wrong"]},
    )


CHECK = Check(
    name=NAME,
    title="Memory bandwidth",
    proves="The GPU reads and writes its own memory as fast as expected of its model; copied data is compared.",
    cannot="Uses only a part of the memory; memory_pattern tests whether memory keeps its data.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=2,
            worth=55,
            what="copies of 8 GiB for a second",
            params={"bytes": 8 << 30, "seconds": 1.0, "repeats": 5},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=8,
            worth=60,
            what="copies of 8 GiB for five seconds",
            params={"bytes": 8 << 30, "seconds": 5.0, "repeats": 9},
            small=SMALL,
        ),
    ),
    request=request,
    interpret=interpret,
)

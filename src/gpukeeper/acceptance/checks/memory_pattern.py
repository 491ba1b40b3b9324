"""Whether the memory of each GPU keeps what is written to it."""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of, refuse, too_little
from gpukeeper.acceptance.judging import replies
from gpukeeper.acceptance.record import Finding, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "memory_pattern"
SMALL = {"bytes": 16 << 20, "chunk": 1 << 20, "passes": 1, "seconds": 0}
GIB = 1 << 30
ENOUGH = 0.8  # of what was requested; less is reported as less


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    refuse(NAME, too_little(params, share=0.1, bytes=1 << 20, passes=1))
    requested = params.get("seconds", 0)
    longer = float(requested) if isinstance(requested, int | float) else 0.0
    return ProbeRequest(probe=NAME, params=params, deadline_s=60 + 10 * serving.seconds + 2 * longer)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    share = params_of(NAME, trial.serving, context).get("share", 0.0)
    requested = float(share) if isinstance(share, int | float) and not context.small else 0.0
    _, findings = replies.read_each(NAME, trial, lambda gpu, result: _of(gpu, result, requested))
    return findings


def _of(gpu: str, result: Values, requested: float) -> Iterable[Finding]:
    errors, tested, total = int(result["errors"]), int(result["tested_bytes"]), int(result["total_bytes"])
    if not tested or not int(result["passes"]):
        raise ValueError("nothing was tested")
    share = tested / total
    if errors:
        yield _finding(gpu, result, Grade.FAIL, "errors", _sentence(result, errors), Remedy.REPLACE_GPU)
    elif share < requested * ENOUGH:
        message = (
            f"Only {share:.0%} of the memory could be tested instead of {requested:.0%}: the rest is in use. The tested"
            " part kept its data. To find the process: nvidia-smi, or gpukeeper observe."
        )
        yield _finding(gpu, result, Grade.WARN, "partly", message, Remedy.RETEST)
    else:
        passes = "once" if int(result["passes"]) == 1 else f"{result['passes']} times"
        message = (
            f"{tested / GIB:.1f} of {total / GIB:.1f} GiB kept all {len(result['patterns'])} patterns, written and read"
            f" {passes}."
        )
        yield _finding(gpu, result, Grade.PASS, "ok", message, Remedy.NONE)


def _sentence(result: Values, errors: int) -> str:
    first = result["where"][0] if result.get("where") else None
    where = (
        f" First: byte {first['offset']}: {first['want']} was written and {first['got']} read (pattern"
        f" {first['pattern']})."
        if first
        else ""
    )
    return f"{errors} words of memory did not keep their data.{where} Take the GPU out of service."


def _finding(gpu: str, result: Values, grade: Grade, what: str, message: str, action: Remedy) -> Finding:
    """No confirmation: memory that forgot once is not memory to be trusted because it did not forget again."""
    return Finding(
        check=NAME,
        metric="errors",
        gpu=gpu,
        verdict=grade,
        code=f"memory-pattern-{what}",
        message=message,
        action=action,
        value=float(result["errors"]),
        unit="words",
        method="pattern/" + "+".join(str(one) for one in result["patterns"]),
        samples=(float(result["errors"]),),
        evidence={
            "where": result.get("where", []),
            "tested_bytes": result["tested_bytes"],
            "total_bytes": result["total_bytes"],
            "passes": result["passes"],
        },
    )


CHECK = Check(
    name=NAME,
    title="Memory patterns",
    proves="The tested part of the memory keeps zeros, ones, alternating bits, addresses and random words; all of it"
    " is written before any of it is read.",
    cannot="ECC hides errors that it corrects (health counts them); memory in use by other processes is not tested,"
    " and faults that need hours or heat are not detected.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=4,
            worth=60,
            what="90 % of the free memory, one pass",
            params={"share": 0.9, "passes": 1},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=65,
            worth=72,
            what="90 % of the free memory, for a minute",
            params={"share": 0.9, "passes": 3, "seconds": 60},
            small=SMALL,
        ),
        CheckSize(
            depth=3,
            seconds=1810,
            worth=78,
            what="95 % of the free memory for half an hour",
            params={"share": 0.95, "passes": 3, "seconds": 1800},
            small=SMALL,
        ),
    ),
    request=request,
    interpret=interpret,
)

"""Whether matrix products are exact on each GPU, for every data type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
from gpukeeper.acceptance.record import Finding, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "exact"
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
LEAST_N = 128  # a tile of the units that multiply
SMALL = {"dtypes": ["fp32", "bf16", "fp16", "int8"], "n": 192, "rounds": 3, "seconds": 0, "phase": "cold", "heat_s": 0}


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    refuse(NAME, [*unknown_words(params, "dtypes", DTYPES), *too_little(params, n=LEAST_N, rounds=1)])
    return ProbeRequest(probe=NAME, params=params, deadline_s=120 + 6 * serving.seconds)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    requested = params_of(NAME, trial.serving, context).get("dtypes")
    dtypes = [str(one) for one in requested] if isinstance(requested, list | tuple) else list(DTYPES)
    results, findings = replies.read_each(NAME, trial, lambda gpu, result: _of(gpu, result, dtypes))
    return (*findings, *_votes(results, dtypes, context))


def _of(gpu: str, result: Values, dtypes: list[str]) -> Iterable[Finding]:
    for dtype in dtypes:
        record = replies.mapping(replies.mapping(result.get("dtypes")).get(dtype))
        if record.get("unsupported"):
            yield _skipped(gpu, dtype, str(record["unsupported"]))
        elif not record.get("rounds") or "mismatches" not in record:
            yield judge.missing(NAME, dtype, gpu, "the probe verified no result")
        else:
            yield _verified(gpu, dtype, record, str(result.get("phase", "")))


def _verified(gpu: str, dtype: str, record: Mapping[str, Any], phase: str) -> Finding:
    """No confirmation: a result that was wrong once was wrong."""
    wrong, rounds = int(record["mismatches"]), int(record["rounds"])
    warmth = f", {phase}" if phase else ""
    good = f"{dtype}: 0 wrong elements of {int(record['elements']):,} in {rounds} products{warmth}."
    return Finding(
        check=NAME,
        metric=dtype,
        gpu=gpu,
        verdict=Grade.FAIL if wrong else Grade.PASS,
        code="exact-mismatch" if wrong else "exact-ok",
        message=_sentence(dtype, record, wrong, warmth) if wrong else good,
        action=Remedy.REPLACE_GPU if wrong else Remedy.NONE,
        value=float(wrong),
        unit="elements",
        method=f"exact/{str(record.get('kernel', '')).replace(' ', '_')}",
        samples=(float(wrong),),
        evidence={key: record.get(key) for key in ("where", "digest", "kernel", "rounds", "elements")}
        | {"phase": phase},
    )


def _sentence(dtype: str, record: Mapping[str, Any], wrong: int, warmth: str) -> str:
    where = record.get("where") or []
    first = ""
    if where and where[0].get("col") is not None:
        one = where[0]
        first = f" First: row {one['row']}, column {one['col']}: {one['got']}, expected {one['want']}."
    elif where:
        first = f" The sum of row {where[0]['row']} is wrong."
    return (
        f"{dtype}{warmth}: {wrong} wrong element{'s' if wrong > 1 else ''} of {int(record['elements']):,}. Integer"
        f" products are exact, so this GPU corrupts data.{first} Take it out of service."
    )


def _votes(results: Mapping[str, Values], dtypes: list[str], context: CheckContext) -> Iterable[Finding]:
    """The same figures give the same bits on every GPU of a model. Reported only where they differ."""
    for dtype in dtypes:
        digests = {
            gpu: str(record["digest"])
            for gpu, result in results.items()
            if (record := replies.mapping(replies.mapping(result.get("dtypes")).get(dtype))).get("digest")
            and not record.get("mismatches")
        }
        for gpu, (stand, n) in replies.against_majority(digests, context).items():
            if stand != "like":
                yield _differs(gpu, dtype, stand, n)


def _differs(gpu: str, dtype: str, stand: str, n: int) -> Finding:
    odd = stand == "odd"
    who = (
        f"from most of {n} identical GPUs"
        if odd
        else (f"among {n} identical GPUs, and there is no majority that shows which one is wrong")
    )
    return Finding(
        check=NAME,
        metric=f"{dtype}_peers",
        gpu=gpu,
        verdict=Grade.FAIL if odd else Grade.WARN,
        code="exact-differs-from-peers" if odd else "exact-split",
        message=f"{dtype}: the results for the same seed differ {who}. Test again; if it persists, take it out of"
        " service.",
        action=Remedy.REPLACE_GPU if odd else Remedy.RETEST,
    )


def _skipped(gpu: str, dtype: str, why: str) -> Finding:
    return Finding(
        check=NAME,
        metric=dtype,
        gpu=gpu,
        verdict=Grade.SKIPPED,
        code="exact-unsupported",
        message=f"exact {dtype} does not apply: {why}.",
    )


_ALL = {"dtypes": list(DTYPES), "n": 8192}
CHECK = Check(
    name=NAME,
    title="Exact matrix products",
    proves="For every data type, integer products are exact in every element, compared with sums computed on the CPU;"
    " a wrong element is reported with row and column.",
    cannot="Detects only faults that occur while it runs: a fault at another temperature, clock or instruction may be"
    " missed. Tests the matrix units and the data path to them, not every instruction.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=4,
            worth=70,
            what="six data types, cold, ten products or more of each",
            params={**_ALL, "rounds": 10, "seconds": 0.3, "phase": "cold"},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=45,
            worth=95,
            what="hot after 20 s of load, three seconds of each",
            params={**_ALL, "rounds": 20, "seconds": 3.0, "phase": "hot", "heat_s": 20.0},
            small=SMALL | {"phase": "hot", "heat_s": 0.05},
        ),
        CheckSize(
            depth=2,
            seconds=200,
            worth=110,
            what="hot after a minute of load, 20 seconds of each",
            params={**_ALL, "rounds": 50, "seconds": 20.0, "phase": "hot", "heat_s": 60.0},
            small=SMALL | {"phase": "hot", "heat_s": 0.05},
        ),
        CheckSize(
            depth=3,
            seconds=1900,
            worth=120,
            what="hot after a minute of load, five minutes of each",
            params={**_ALL, "rounds": 50, "seconds": 300.0, "phase": "hot", "heat_s": 60.0},
            small=SMALL | {"phase": "hot", "heat_s": 0.05},
        ),
    ),
    request=request,
    interpret=interpret,
)

"""NVIDIA's nccl-tests, where they are installed: a second opinion on all-reduce. What is not there is not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of
from gpukeeper.acceptance.checks.collectives import PLATEAU
from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.judging.replies import as_noted, interpret_ranks, with_evidence
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "nccl_tests"
METRIC = "all_reduce"


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    program = context.machine.environment.get("nccl_tests")
    params: dict[str, object] = {"program": program if isinstance(program, str) else None, "gpus": len(context.gpus)}
    params |= params_of(NAME, serving, context)
    return ProbeRequest(probe=NAME, params=params, deadline_s=240 + 5 * serving.seconds)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    return interpret_ranks(NAME, trial, context, _interpret)


def _interpret(results: Mapping[int, Values], context: CheckContext) -> Iterable[Finding]:
    record = results[0]
    if record.get("not_run"):
        yield Finding(
            check=NAME,
            verdict=Grade.SKIPPED,
            code="nccl-tests-not-run",
            message=f"Not run: {record['not_run']}. This is not a pass; collectives measures the same without it.",
        )
        return
    yield _data(record)
    large = [row for row in record["rows"] if row["bytes"] >= PLATEAU]
    if not large:
        yield judge.missing(NAME, METRIC, None, "no size of 1 GiB or more was measured")
        return
    # Each size was measured once: the sizes of the plateau stand for its repeats.
    best = sorted((float(row["busbw"]) for row in large), reverse=True)[:3]
    measurement = Measurement(
        check=NAME,
        metric=METRIC,
        gpu=None,
        unit="GB/s",
        method=f"nccl-tests/n{record['gpus']}/{record['rows'][0]['dtype']}/plateau",
        samples=tuple(best),
    )
    evidence: dict[str, object] = {"busbw_by_bytes": {str(row["bytes"]): row["busbw"] for row in record["rows"]}}
    evidence |= {key: record.get(key) for key in ("version", "nccl", "exit")}
    yield from with_evidence(as_noted(judge.assess([measurement], context)), evidence)


def _data(record: Values) -> Finding:
    checked = [row for row in record["rows"] if row["wrong"] is not None]
    wrong = [row for row in checked if row["wrong"]]
    if wrong or record.get("out_of_bounds"):
        sizes = ", ".join(str(row["bytes"]) for row in wrong) or "unknown sizes"
        return Finding(
            check=NAME,
            metric="data",
            verdict=Grade.FAIL,
            code="nccl-tests-wrong-data",
            message=f"nccl-tests found wrong sums of all-reduce at {sizes} bytes. nccl-tests does not name the GPU:"
            " see collectives.",
            action=Remedy.CONTACT_VENDOR,
        )
    if not checked or record.get("exit"):
        why = (
            (f"the program exited with code {record['exit']}")
            if record.get("exit")
            else "the program did not check its results"
        )
        return judge.missing(NAME, "data", None, why)
    message = f"nccl-tests found 0 wrong results at {len(checked)} sizes."
    return Finding(check=NAME, metric="data", verdict=Grade.PASS, code="nccl-tests-data-ok", message=message)


CHECK = Check(
    name=NAME,
    title="nccl-tests",
    proves="NVIDIA's nccl-tests confirms the results and the speed of all-reduce.",
    cannot="Runs only if nccl-tests is installed, and does not name the faulty GPU.",
    how=RunMode.TOGETHER,
    servings=(
        CheckSize(
            depth=1,
            seconds=45,
            worth=12,
            what="all_reduce_perf from 8 KB to 8 GB",
            params={"first": "8K", "last": "8G"},
        ),
    ),
    request=request,
    interpret=interpret,
    least_gpus=2,
    slices=False,
)

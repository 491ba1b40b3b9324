"""How fast and how truly data goes between the host and each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of, refuse, too_little
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "copies"
WAYS = ("h2d", "d2h", "d2d")
SMALL = {"bytes": 16 << 20, "seconds": 0.05, "repeats": 3}


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    refuse(NAME, too_little(params, bytes=1 << 20, repeats=3))
    return ProbeRequest(probe=NAME, params=params, deadline_s=60 + 10 * serving.seconds)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    results, findings = replies.of_gpus(NAME, trial)
    speeds = [one for way in WAYS for one in judge.assess(_measured(way, results), context)]
    truths = [one for gpu, result in results.items() for one in _truths(gpu, result, context)]
    return (*findings, *speeds, *truths)


def _measured(way: str, results: Mapping[str, Values]) -> list[Measurement]:
    return [
        Measurement(
            check=NAME,
            metric=way,
            gpu=gpu,
            unit="GB/s",
            method=str(replies.mapping(result.get("methods")).get(way) or result.get("method", "")),
            samples=replies.figures(result.get(way)),
        )
        for gpu, result in results.items()
    ]


def _truths(gpu: str, result: Values, context: CheckContext) -> Iterable[Finding]:
    if result.get("verified") is None:
        yield judge.missing(NAME, "data", gpu, "the probe did not report whether the data was corrupted")
    elif result["verified"] is not True:
        yield _wrong(gpu, result)
    if isinstance(result.get("pinned"), str) and not context.small:
        yield _not_pinned(gpu, str(result["pinned"]))


def _wrong(gpu: str, result: Values) -> Finding:
    return Finding(
        check=NAME,
        metric="data",
        gpu=gpu,
        verdict=Grade.FAIL,
        code="copies-wrong-data",
        message=f"{result.get('wrong', 'Some')} words were corrupted between host and GPU. Reseat the board and check"
        " the PCIe error counters; if it persists, replace it.",
        action=Remedy.RESEAT_OR_CABLE,
        evidence={"wrong": result.get("wrong"), "where": result.get("where", [])},
    )


def _not_pinned(gpu: str, why: str) -> Finding:
    return Finding(
        check=NAME,
        metric="pinned",
        gpu=gpu,
        verdict=Grade.WARN,
        code="copies-not-pinned",
        message=f"Host memory could not be pinned ({why}), so the speed of the link was not measured. To allow it:"
        " --ulimit memlock=-1, or more memory for the container.",
        action=Remedy.CHECK_CONFIG,
    )


CHECK = Check(
    name=NAME,
    title="Copies between host and GPU",
    proves="The link between host and GPU is as fast as its lanes allow in both directions, and data is not corrupted.",
    cannot="All GPUs copy at the same time, so GPUs that share a link share its bandwidth; a slow link may be caused"
    " by the host.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=3,
            worth=50,
            what="256 MiB in each direction, half a second",
            params={"bytes": 256 << 20, "seconds": 0.5, "repeats": 5},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=10,
            worth=55,
            what="1 GiB in each direction, two seconds",
            params={"bytes": 1 << 30, "seconds": 2.0, "repeats": 9},
            small=SMALL,
        ),
    ),
    request=request,
    interpret=interpret,
)

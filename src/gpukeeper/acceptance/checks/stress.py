"""Full load for a while: steady, cool enough, and right while hot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from msgspec.structs import replace

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Gpu, Grade, Reading
from gpukeeper.model.unknown import Unknown

NAME = "stress"
RISE = 0.20  # of the step time, from the first window to the last
APART_WARN, APART_FAIL = 0.05, 0.10  # between the runs
LEAST_USE = 90.0  # percent
LEAST_POWER = 0.75  # of the limit
HOT = ((r".*\bA100\b.*", 80.0), (r".*\bH[12]00\b.*", 85.0))  # °C; other models: as reported by their driver
DRAWS_ITS_LIMIT = re.compile(r".*\b(H200|H100 80GB HBM3)\b.*")  # models that this load brings to their power limit
WARM_S = 3.0  # until the load is full
AGAIN_S = 1.0  # the same when a later run begins
RUNS, THIRDS = 3, 3
LOWER = ("results", "steadiness", "step_time", "temperature")  # of these less is better
UNITS = {
    "results": "elements",
    "steadiness": "share",
    "step_time": "share",
    "use": "percent",
    "temperature": "C",
    "power": "W",
    "clock": "MHz",
}
SMALL = {"seconds": 0.6, "n": 128, "window_s": 0.1}


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    return ProbeRequest(
        probe=NAME, params=params, deadline_s=120 + 1.5 * _seconds(params.get("seconds"), serving.seconds)
    )


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    results, findings = replies.read_each(NAME, trial, lambda gpu, result: _of(gpu, result, context))
    return (*findings, *_speeds(results, context))


def _of(gpu: str, result: Values, context: CheckContext) -> Iterable[Finding]:
    yield _right(gpu, result)
    yield _steady(gpu, result["windows"])
    yield _rise(gpu, float(result["step_ms_first"]), float(result["step_ms_last"]))
    if not context.small:
        yield from _sampled(context.gpu(gpu), result, context)


def _right(gpu: str, result: Values) -> Finding:
    """No confirmation: a result that was wrong once was wrong."""
    wrong, verified = int(result["mismatches"]), int(result["verified"])
    if not verified:
        return judge.missing(NAME, "results", gpu, "no result was verified")
    where = result.get("where") or []
    first = f" First: row {where[0]['row']}, column {where[0]['col']}." if where else ""
    bad = f"{wrong} wrong elements under full load.{first} This GPU corrupts data. Take it out of service."
    found = _finding(
        gpu,
        "results",
        Grade.FAIL if wrong else Grade.PASS,
        "mismatch" if wrong else "results-ok",
        bad if wrong else f"0 wrong elements in {verified:,} products under full load.",
        Remedy.REPLACE_GPU if wrong else Remedy.NONE,
        value=float(wrong),
    )
    return replace(found, evidence={"where": where})


def _steady(gpu: str, windows: Sequence[Values]) -> Finding:
    """Runs in a row, each of which began anew, must not differ by more than 5 %, or 10 %."""
    runs: dict[object, list[float]] = {}
    for window in windows:
        runs.setdefault(window.get("run"), []).extend(replies.figures([window["tflops"]]))
    if len(runs) < RUNS:
        return judge.missing(NAME, "steadiness", gpu, f"{len(runs)} runs were measured, {RUNS} are compared")
    if not all(math.isfinite(speed) and speed > 0 for speeds in runs.values() for speed in speeds):
        return judge.missing(NAME, "steadiness", gpu, "a window has no valid speed")
    parts = [median(speeds) for speeds in runs.values()]
    apart = (max(parts) - min(parts)) / max(parts)
    grade = Grade.FAIL if apart > APART_FAIL else Grade.WARN if apart > APART_WARN else Grade.PASS
    shown = ", ".join(f"{part:.4g}" for part in parts)
    cause = "" if grade is Grade.PASS else " Check its temperature, power and clock event reasons in the timeline."
    return _finding(
        gpu,
        "steadiness",
        grade,
        "steady-ok" if grade is Grade.PASS else "unsteady",
        f"Speed of {len(parts)} runs: {shown} TFLOP/s, {apart:.1%} apart (allowed {APART_WARN:.0%}).{cause}",
        Remedy.NONE if grade is Grade.PASS else Remedy.WATCH,
        value=apart,
    )


def _rise(gpu: str, first: float, last: float) -> Finding:
    rise = last / first - 1
    slow = not rise <= RISE
    return _finding(
        gpu,
        "step_time",
        Grade.FAIL if slow else Grade.PASS,
        "slows-down" if slow else "step-time-ok",
        f"A step took {first:.4g} ms at the start and {last:.4g} ms at the end, {rise:+.1%} (allowed {RISE:+.0%})."
        + (" It does not sustain its speed: check cooling and power." if slow else ""),
        Remedy.CONTACT_VENDOR if slow else Remedy.NONE,
        value=rise,
    )


def _sampled(gpu: Gpu, result: Values, context: CheckContext) -> Iterable[Finding]:
    """What the driver reported during the load: not while the data of a run were prepared, nor while other GPUs were
    still at work. The first seconds are skipped: the load is not full yet."""
    own = [one for one in context.readings if one.uuid == gpu.uuid and one.check == NAME]
    times = result.get("loaded") or (min((one.at for one in own), default=0.0), math.inf)
    runs = [
        (start + (AGAIN_S if number else WARM_S), end)
        for number, (start, end) in enumerate(zip(times[::2], times[1::2], strict=True))
    ]
    loaded = [one for one in own if any(start <= one.at <= end for start, end in runs)]
    yield _use(gpu, [one.utilisation for one in loaded if one.utilisation is not None], context)
    yield _temperature(gpu, [one.temperature_c for one in loaded if one.temperature_c is not None], context)
    if gpu.part_of is None:  # watts are those of the whole GPU
        yield _power(gpu, [one.power_w for one in loaded if one.power_w is not None], context)
    yield from _clock(gpu, loaded)


def _use(gpu: Gpu, use: Sequence[float], context: CheckContext) -> Finding:
    if not use:
        return _without_use(gpu, context)
    mean = fmean(use)
    full = mean > LEAST_USE
    return _finding(
        gpu.uuid,
        "use",
        Grade.PASS if full else Grade.INCONCLUSIVE,
        "use-ok" if full else "low-use",
        f"The GPU was busy for {mean:.0f} % of the time (required: more than {LEAST_USE:.0f} %)."
        + ("" if full else " It was not under full load: check what else runs on the machine, and test again."),
        Remedy.NONE if full else Remedy.RETEST,
        value=mean,
    )


def _without_use(gpu: Gpu, context: CheckContext) -> Finding:
    """Drivers do not report it for a slice: then nothing is missing."""
    missing = judge.missing(NAME, "use", gpu.uuid, "the driver did not report utilization")
    health = context.before.get(gpu.uuid)
    fact = health.states.get("utilisation") if health else None
    if not isinstance(fact, Unknown) or not fact.by_design:
        return missing
    message = f"Utilization is not available: {fact.why}."
    return replace(missing, verdict=Grade.SKIPPED, code=f"{NAME}-use-told", message=message, action=Remedy.NONE)


def _temperature(gpu: Gpu, seen: Sequence[float], context: CheckContext) -> Finding:
    """Hot for good fails; hot for a moment warns."""
    if not seen:
        return judge.missing(NAME, "temperature", gpu.uuid, "the driver did not report the temperature")
    limit, why = hot_limit(gpu, context)
    if limit is None:
        return _reported(gpu.uuid, "temperature", max(seen), f"At most {max(seen):.0f} °C; {why}.")
    lasting = median(seen[len(seen) // 2 :])
    grade = Grade.FAIL if lasting >= limit else Grade.WARN if max(seen) >= limit else Grade.PASS
    advice = "" if grade is Grade.PASS else " Check fans, airflow, filters and the room."
    return _finding(
        gpu.uuid,
        "temperature",
        grade,
        "temperature-ok" if grade is Grade.PASS else "too-hot",
        f"At most {max(seen):.0f} °C, {lasting:.0f} °C in the second half; the limit is {limit:.0f} °C"
        f" ({why}).{advice}",
        Remedy.NONE if grade is Grade.PASS else Remedy.CONTACT_VENDOR,
        value=max(seen),
    )


def hot_limit(gpu: Gpu, context: CheckContext) -> tuple[float | None, str]:
    """In °C, and its source."""
    name = gpu.name if isinstance(gpu.name, str) else ""
    for pattern, limit in HOT:
        if re.fullmatch(pattern, name):
            return limit, "the limit for this model"
    health = context.before.get(gpu.uuid)
    slowdown = health.states.get("slowdown_c") if health else None
    if isinstance(slowdown, int | float) and not isinstance(slowdown, bool) and slowdown > 0:
        return float(slowdown), "its driver's slowdown temperature"
    return None, "no limit is known for this model"


def _power(gpu: Gpu, watts: Sequence[float], context: CheckContext) -> Finding:
    if not watts:
        return judge.missing(NAME, "power", gpu.uuid, "the driver did not report power")
    health = context.before.get(gpu.uuid)
    limit = health.states.get("power_limit_w") if health else None
    mean = fmean(watts)
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit <= 0:
        return _reported(gpu.uuid, "power", mean, f"It drew {mean:.0f} W; its power limit is unknown.")
    share = mean / limit
    good = share >= LEAST_POWER
    known = isinstance(gpu.name, str) and DRAWS_ITS_LIMIT.fullmatch(gpu.name) is not None
    advice = (
        ""
        if good
        else " The GPU is throttled: check clock event reasons, locked clocks, and power cables."
        + ("" if known else " Not every model reaches its limit under this load, so this only warns.")
    )
    return _finding(
        gpu.uuid,
        "power",
        Grade.PASS if good else Grade.FAIL if known else Grade.WARN,
        "power-ok" if good else "low-power",
        f"It drew {mean:.0f} W, {share:.0%} of its limit of {limit:.0f} W (required: at least"
        f" {LEAST_POWER:.0%}).{advice}",
        Remedy.NONE if good else Remedy.CONTACT_VENDOR,
        value=mean,
    )


def _clock(gpu: Gpu, loaded: Sequence[Reading]) -> Iterable[Finding]:
    clocks = [one.sm_mhz for one in loaded if one.sm_mhz is not None]
    if clocks:
        yield _reported(
            gpu.uuid,
            "clock",
            fmean(clocks),
            f"Its clock was {fmean(clocks):.0f} MHz on average, {min(clocks):.0f} to {max(clocks):.0f} MHz.",
        )


def _speeds(results: dict[str, Values], context: CheckContext) -> Iterable[Finding]:
    """Compared with peers and history. Without either it is reported, not judged: gemm judges speed."""
    measured = [
        Measurement(
            check=NAME,
            metric="speed",
            gpu=gpu,
            unit="TFLOP/s",
            method=str(result.get("method", "")),
            samples=_thirds(replies.figures([one.get("tflops") for one in result.get("windows") or ()])),
        )
        for gpu, result in results.items()
    ]
    for finding in judge.assess(measured, context):
        if finding.code.endswith("-no-yardstick"):
            message = f"{finding.value:.4g} TFLOP/s under full load; reported, not judged: no reference value."
            yield replace(finding, verdict=Grade.SKIPPED, code="stress-speed-told", message=message, action=Remedy.NONE)
        else:
            yield finding


def _thirds(speeds: Sequence[float]) -> tuple[float, ...]:
    """Windows of a GPU that warms up are no repetitions; the later two thirds are nearly that."""
    return tuple(speeds[len(speeds) // THIRDS :])


def _reported(gpu: str, metric: str, value: float, message: str) -> Finding:
    return _finding(gpu, metric, Grade.SKIPPED, f"{metric}-told", message, Remedy.NONE, value=value)


def _finding(
    gpu: str,
    metric: str,
    grade: Grade,
    what: str,
    message: str,
    action: Remedy,
    *,
    value: float,
) -> Finding:
    return Finding(
        check=NAME,
        metric=metric,
        gpu=gpu,
        verdict=grade,
        code=f"{NAME}-{what}",
        message=message,
        action=action,
        value=value,
        unit=UNITS[metric],
        method="stress",
        samples=(value,),
        lower_is_better=metric in LOWER,
        confirm=grade is Grade.FAIL and metric != "results",
    )


def _seconds(requested: object, usual: float) -> float:
    return float(requested) if isinstance(requested, int | float) else usual


_LOAD = {"n": 8192, "dtype": "bf16", "verify_every": 8}
CHECK = Check(
    name=NAME,
    title="Stress",
    proves="Under full load the GPU keeps its performance, stays below its temperature limit, reaches its power"
    " limit, and all checked results are exact.",
    cannot="A minute does not heat a whole rack, and one kind of load does not cover every load. One product in eight"
    " is verified. The speed with integer data is not that with other data.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=11,
            worth=50,
            what="ten seconds",
            params={**_LOAD, "seconds": 10.0},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=65,
            worth=80,
            what="a minute",
            params={**_LOAD, "seconds": 60.0},
            small=SMALL,
        ),
        CheckSize(
            depth=2,
            seconds=610,
            worth=105,
            what="ten minutes",
            params={**_LOAD, "seconds": 600.0},
            small=SMALL,
        ),
        CheckSize(
            depth=3,
            seconds=3620,
            worth=115,
            what="an hour; --set stress.seconds=86400 for a day",
            params={**_LOAD, "seconds": 3600.0},
            small=SMALL,
        ),
    ),
    request=request,
    interpret=interpret,
)

"""Full load for a while, in three runs, and right results while hot. Each run begins anew: other data, a warm-up.
Products of whole numbers: each window reports its speed, and results are verified bit by bit as it goes.

params: seconds (of all runs), n, dtype, verify_every (products), window_s. inject: {"flip": true} one bit of one
verified result; {"slow": 0.2} windows get slower by so much until the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpukeeper.acceptance.probes import arithmetic
from gpukeeper.acceptance.probes.arithmetic import WHERE_MAX, Operands, precision, unsupported
from gpukeeper.acceptance.probes.device import Device

RUNS = 3
SEED = 70
USUAL = ("bf16", "fp16", "fp32")
WINDOWS_MAX = 3600  # a day in windows of 24 s; more would make the report unreadable


@dataclass
class StressRecord:
    """What was seen while it ran."""

    mismatches: int = 0
    where: list[dict[str, Any]] = field(default_factory=list)
    verified: int = 0
    products: int = 0
    windows: list[dict[str, float]] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)  # from when to when, run by run
    kernel: str = ""
    seconds: float = 0.0


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    n, dtype = int(params.get("n", 8192)), _dtype(device, str(params.get("dtype", USUAL[0])))
    watch = StressRecord()
    for number in range(RUNS):
        _run(device, params, n, dtype, number, watch)
    steps = [window["step_ms"] for window in watch.windows]
    return {
        "seconds": watch.seconds,
        "loaded": watch.loaded,
        "windows": [
            {"run": one["run"], "at": one["at"], "tflops": 2 * n**3 / one["step_ms"] / 1e9} for one in watch.windows
        ],
        "step_ms_first": steps[0],
        "step_ms_last": steps[-1],
        "mismatches": watch.mismatches,
        "where": watch.where,
        "verified": watch.verified,
        "products": watch.products,
        "dtype": dtype,
        "kernel": watch.kernel,
        "n": n,
        "method": f"stress/{dtype}/n{n}/integers",
    }


def _run(device: Device, params: dict[str, Any], n: int, dtype: str, number: int, watch: StressRecord) -> None:
    """One of the runs. Its tensors are freed at its end; `at` and an injected slowdown count over all runs."""
    seconds = float(params.get("seconds", 60.0))
    given = arithmetic.operands(device, n, arithmetic.bound(device, dtype, n), SEED + number)
    with device.working(), precision(dtype, whole=True):
        answer = arithmetic.expected(device, given).product.to(arithmetic.result_dtype(device, dtype))
        multiply, watch.kernel = arithmetic.multiplier(device, dtype, given)
        device.warm(multiply)
        watch.loaded.append(time.monotonic())
        began = time.perf_counter()
        while (at := time.perf_counter() - began) < seconds / RUNS:
            before = number * seconds / RUNS + at
            _window(device, multiply, given, answer, watch, _plan(params, before / seconds, seconds))
            watch.windows[-1] |= {"run": number, "at": before}
        watch.seconds += time.perf_counter() - began
        watch.loaded.append(time.monotonic())


def _dtype(device: Device, wanted: str) -> str:
    """The next one is used on a GPU that is too old for the usual one; `method` names it."""
    offers = USUAL if wanted == USUAL[0] else (wanted,)
    found = next((one for one in offers if not unsupported(device, one)), None)
    if found is None:
        why = unsupported(device, wanted)
        raise ValueError(f"stress in {wanted}: {why}. Use another dtype: fp16 or fp32")
    return found


@dataclass
class _Plan:
    seconds: float
    every: int
    slow: float
    flip: bool


def _plan(params: dict[str, Any], share: float, seconds: float) -> _Plan:
    """How the next window goes; `share`: how much of the time has passed."""
    inject = params.get("inject") or {}
    length, of_run = max(float(params.get("window_s", 1.0)), seconds / WINDOWS_MAX), seconds / RUNS
    return _Plan(
        seconds=of_run / max(1, int(of_run / length)),
        every=max(1, int(params.get("verify_every", 8))),
        slow=float(inject.get("slow", 0.0)) * share,
        flip=bool(inject.get("flip")),
    )


def _window(
    device: Device, multiply: Callable[[], Any], given: Operands, answer: Any, watch: StressRecord, plan: _Plan
) -> None:
    until, took, products = time.perf_counter() + plan.seconds, 0.0, 0
    while True:
        last: list[Any] = [None]

        def once(last: list[Any] = last) -> None:
            last[0] = multiply()

        extra = round(plan.every * plan.slow)
        took += device.span(once, plan.every + extra)
        products += plan.every
        _verify(last[0], given, answer, watch, plan)
        if time.perf_counter() >= until:
            break
    watch.products += products
    watch.windows.append({"step_ms": took / products * 1000})


def _verify(got: Any, given: Operands, answer: Any, watch: StressRecord, plan: _Plan) -> None:
    if plan.flip and not watch.mismatches:
        arithmetic.flip(got, len(got) // 3, len(got) // 2, 0)
    mask = arithmetic.differing(got, answer)
    wrong = int(mask.sum().item())
    watch.verified += 1
    if wrong:
        watch.mismatches += wrong
        watch.where += arithmetic.located(mask, got, given, watch.verified)[: WHERE_MAX - len(watch.where)]

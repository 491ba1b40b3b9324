"""How fast it multiplies matrices, by kind of number. Random-normal data (int8: the full range), since zeros are 13 %
faster than real work.

In bursts: a few products after a pause, so that the power limit of the board does not decide (the stress check looks at
that). params: dtypes, n, repeats, rounds (products in a burst), pause_s, sweep [n, …] of `sweep_dtype` (bf16),
matmul [[n, rounds], …] (the old kit's: float32, so many products), sgemm and batched (share of the free memory).
inject: {"slow": 0.1 or {"bf16": 0.1}} does a tenth more work inside the timing than it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpukeeper.acceptance.probes.arithmetic import TORCH_DTYPES, precision, unsupported
from gpukeeper.acceptance.probes.device import Device

SGEMM_MAX = 32768  # one product of the whole memory of a large GPU takes half a minute
BATCHED_N = 2048
PAUSE_S = 0.15
ROUNDS = 10  # products in a burst
SEED = 20


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    n = int(params.get("n", 8192))
    dtypes = list(params.get("dtypes", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")))
    result: dict[str, Any] = {"dtypes": {}, "sweep": {}}
    for dtype in dtypes:
        why = unsupported(device, dtype)
        result["dtypes"][dtype] = {"unsupported": why} if why else _of_dtype(device, dtype, n, params)
    if params.get("sweep"):
        dtype = str(params.get("sweep_dtype", "bf16"))
        result["sweep"] = {dtype: _sweep(device, dtype, params)}
    if params.get("matmul"):
        result["matmul"] = {str(size): _matmul(device, int(size), int(rounds)) for size, rounds in params["matmul"]}
    if params.get("sgemm"):
        result["sgemm"] = _sgemm(device, float(params["sgemm"]), params)
    if params.get("batched"):
        result["batched"] = _batched(device, float(params["batched"]), params)
    return result


def _of_dtype(device: Device, dtype: str, n: int, params: dict[str, Any]) -> dict[str, Any]:
    with precision(dtype):
        work = product(device, dtype, n)
        times = _bursts(device, work, params, int(params.get("repeats", 5)), _slow(params, dtype))
    return {"tflops": [_tflops(n, once) for once in times], "n": n, "method": method(dtype, n, rounds_of(params))}


def _bursts(
    device: Device, work: Callable[[], object], params: dict[str, Any], repeats: int, slow: float = 0.0
) -> list[float]:
    pause = float(params.get("pause_s", PAUSE_S if device.cuda else 0.0))
    return device.bursts(work, repeats=repeats, rounds=rounds_of(params), pause_s=pause, slow=slow)


def method(dtype: str, n: int, rounds: int = ROUNDS) -> str:
    """Longer bursts meet the power limit of the board: another method."""
    kernel = {"fp8": "scaled_mm", "int8": "int_mm"}.get(dtype, "mm")
    burst = "burst" if rounds == ROUNDS else f"burst{rounds}"
    return f"gemm/{kernel}/n{n}/{'uniform' if dtype == 'int8' else 'normal'}/{burst}"


def rounds_of(params: dict[str, Any]) -> int:
    return int(params.get("rounds", ROUNDS))


def product(device: Device, dtype: str, n: int) -> Callable[[], object]:
    """One product, ready to be called again and again; its figures are made here, outside of every timing."""
    if dtype == "int8":
        a, b = (_integers(device, n, SEED + which) for which in (0, 1))
        return lambda: torch._int_mm(a, b.t())
    a, b = (_normal(device, n, SEED + which).to(TORCH_DTYPES[dtype]) for which in (0, 1))
    if dtype == "fp8":
        one = torch.ones((), device=device.torch)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _sweep(device: Device, dtype: str, params: dict[str, Any]) -> dict[str, float]:
    """The median of three bursts, by size: what this very GPU can reach."""
    found = {}
    for size in params["sweep"]:
        with precision(dtype):
            times = _bursts(device, product(device, dtype, int(size)), params, 3)
        device.release()
        found[str(size)] = _tflops(int(size), sorted(times)[len(times) // 2])
    return found


def _matmul(device: Device, n: int, rounds: int) -> dict[str, Any]:
    with precision("fp32"):
        times = device.timed(product(device, "fp32", n), repeats=3, seconds=0, rounds=rounds)
    return {
        "tflops": [_tflops(n, once) for once in times],
        "n": n,
        "rounds": rounds,
        "method": f"gemm/mm/n{n}x{rounds}",
    }


def _sgemm(device: Device, share: float, params: dict[str, Any]) -> dict[str, Any]:
    """One float32 product, its three matrices on this share of the free memory."""
    largest = int(params.get("sgemm_n_max", SGEMM_MAX))
    n = min(largest, int((device.free_memory() * share / 12) ** 0.5) // 256 * 256)
    if n < 256:
        raise RuntimeError(f"out of memory: {share:.0%} of the free memory is too small for a product of 256×256")
    with precision("fp32"):
        a, b = _normal(device, n, SEED), _normal(device, n, SEED + 1)
        out = torch.empty_like(a)
        times = [device.span(lambda: torch.mm(a, b, out=out), 1) for _ in range(1 + int(params.get("repeats", 3)))][1:]
    return {"tflops": [_tflops(n, once) for once in times], "n": n, "method": "gemm/sgemm/memory/normal"}


def _batched(device: Device, share: float, params: dict[str, Any]) -> dict[str, Any]:
    """Many float32 products at once, on this share of the free memory."""
    n = int(params.get("batched_n", BATCHED_N))
    count = int(device.free_memory() * share / (12 * n * n))
    count = min(count, int(params.get("batched_max", count)))
    if count < 1:
        raise RuntimeError(f"out of memory: {share:.0%} of the free memory is too small for a product of {n}×{n}")
    with precision("fp32"):
        a, b = (
            torch.randn(count, n, n, device=device.torch, generator=device.generator(SEED + which)) for which in (0, 1)
        )
        out = torch.empty_like(a)
        work = lambda: torch.bmm(a, b, out=out)  # noqa: E731
        times = [device.span(work, 1) for _ in range(1 + int(params.get("repeats", 3)))][1:]
    figures = [_tflops(n, once) * count for once in times]
    return {"tflops": figures, "n": n, "count": count, "method": f"gemm/bmm/n{n}/normal"}


def _tflops(n: int, seconds: float) -> float:
    return 2 * n**3 / seconds / 1e12


def _normal(device: Device, n: int, seed: int) -> Any:
    return torch.randn(n, n, device=device.torch, generator=device.generator(seed))


def _integers(device: Device, n: int, seed: int) -> Any:
    return torch.randint(-128, 128, (n, n), device=device.torch, dtype=torch.int8, generator=device.generator(seed))


def _slow(params: dict[str, Any], dtype: str) -> float:
    slow = (params.get("inject") or {}).get("slow", 0.0)
    return float(slow.get(dtype, 0.0)) if isinstance(slow, dict) else float(slow)

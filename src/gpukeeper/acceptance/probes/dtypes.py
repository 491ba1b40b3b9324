"""Data types that a GPU multiplies, which of them it supports, and how PyTorch is configured for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpukeeper.acceptance.probes.device import Device

NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_SINCE = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9), "int8": (7, 5), "fp16": (7, 0)}  # compute capability
_STRONG_FP64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
_REDUCED = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def unsupported(device: Device, dtype: str) -> str | None:
    """Why this device cannot multiply these, from what it is. Never guessed from an error: that may be a broken GPU."""
    if dtype not in TORCH:
        raise ValueError(f"unknown dtype {dtype!r}; valid values: {', '.join(NAMES)}")
    if not device.cuda:
        return "a CPU does not support tf32" if dtype == "tf32" else None
    if torch.version.hip:
        return None
    since = _SINCE.get(dtype)
    if since and device.capability < since:
        return f"{device.name} has compute capability {_dotted(device.capability)}; {dtype} needs {_dotted(since)}"
    return None


def strong_fp64(device: Device) -> bool:
    """Its float64 is at half the speed of float32, not a 32nd or 64th."""
    return not device.cuda or device.capability in _STRONG_FP64 or bool(torch.version.hip)


@contextmanager
def precision(dtype: str, *, whole: bool = False) -> Iterator[None]:
    """float32 products as float32 or as tf32; `whole`: sums are never rounded to 16 bits on the way. Put back after."""
    matmul = torch.backends.cuda.matmul
    wanted: dict[str, Any] = dict.fromkeys(_REDUCED, False) if whole else {}
    # From 2.9 on the old name warns, and must not be mixed with the new one.
    if hasattr(matmul, "fp32_precision"):
        wanted["fp32_precision"] = "tf32" if dtype == "tf32" else "ieee"
    else:
        wanted["allow_tf32"] = dtype == "tf32"
    wanted = {name: value for name, value in wanted.items() if hasattr(matmul, name)}
    before = {name: getattr(matmul, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

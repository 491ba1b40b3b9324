"""Data types that a GPU multiplies, products whose one right answer every kernel and GPU must give, and digests.

Whole numbers: no sum on the way leaves the range in which its data type is exact. B is kept as its transpose, row by
row, which is the layout that fp8 and int8 kernels want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpukeeper.acceptance.probes.device import Device

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
TORCH_DTYPES = {
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
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; valid values: {', '.join(DTYPES)}")
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


WIDE = {"fp32": 31, "tf32": 31, "bf16": 31, "fp16": 31, "fp8": 7, "int8": 127}  # 31² × 8192 < 2²⁴
EXACT = {"bf16": 256, "fp16": 2048}  # whole numbers up to here; the limit of a result of 16 bits
WHERE_MAX = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = {torch.int8: 8, torch.int16: 16, torch.int32: 32}


@dataclass(frozen=True)
class Operands:
    """Two matrices of whole numbers from −bound to bound, as int8."""

    a: Any  # n × k
    bt: Any  # n × k: B, transposed
    bound: int


@dataclass
class ExpectedProduct:
    """The right answer, and the sums of its rows and columns, as this device makes them out by another kernel."""

    product: Any  # float64
    rows: Any
    columns: Any
    kernel: str


def is_wide(device: Device, dtype: str) -> bool:
    """The result has 32 bits although the factors have 16."""
    return dtype not in EXACT or device.cuda


def bound(device: Device, dtype: str, k: int) -> int:
    """The largest entry for which every sum on the way is exact."""
    if is_wide(device, dtype):
        largest = WIDE[dtype]
        # int8 adds up in 32-bit integers, the others in float32 with its 24 bits.
        room = (1 << 31) - 1 if dtype == "int8" else 1 << 24
    else:
        largest, room = WIDE[dtype], EXACT[dtype]
    found = min(largest, int((room / k) ** 0.5))
    if found < 1:
        raise ValueError(f"n {k} is too large for {dtype} here: sums of {k} products are not exact; at most {room}")
    return found


def operands(device: Device, n: int, entries: int, seed: int) -> Operands:
    def made(which: int) -> Any:
        generator = device.generator(seed + which)
        return torch.randint(-entries, entries + 1, (n, n), dtype=torch.int8, device=device.torch, generator=generator)

    return Operands(made(0), made(1), entries)


def expected(device: Device, given: Operands) -> ExpectedProduct:
    """By the float64 units where they are worth the name, else by float32 ones with the roles of A and B exchanged."""
    a, bt = given.a, given.bt
    n, k = a.shape
    if strong_fp64(device):
        product, kernel = a.double() @ bt.double().t(), "fp64"
    elif given.bound**2 * k < 1 << 24:
        with precision("fp32"):
            product, kernel = (bt.float() @ a.float().t()).t().double().contiguous(), "fp32, transposed"
    else:
        blocks = [block.double() @ bt.double().t() for block in a.split(max(1, n // 8))]
        product, kernel = torch.cat(blocks), "fp64"
    rows, columns = sums(a, bt)
    return ExpectedProduct(product, rows, columns, kernel)


def sums(a: Any, bt: Any) -> tuple[Any, Any]:
    """C·1 = A·(B·1) and 1ᵀC = (1ᵀA)·B, without C. Below 2⁵³, so float64 is exact whatever the order."""
    over_b = bt.sum(0, dtype=torch.int64).double()
    over_a = a.sum(0, dtype=torch.int64).double()
    rows = torch.cat([block.double() @ over_b for block in a.split(256)])
    columns = torch.cat([block.double() @ over_a for block in bt.split(256)])
    return rows, columns


def multiplier(device: Device, dtype: str, given: Operands) -> tuple[Callable[[], Any], str]:
    """What makes the product, and the name of the kernel. To be called within `precision(dtype, whole=True)`."""
    if dtype == "int8":
        return (lambda: torch._int_mm(given.a, given.bt.t())), "torch._int_mm to int32"
    a, b = given.a.to(TORCH_DTYPES[dtype]), given.bt.to(TORCH_DTYPES[dtype]).t()
    if dtype == "fp8":
        one = torch.ones((), device=device.torch)
        work = lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=False)  # noqa: E731
        return work, "torch._scaled_mm e4m3 to fp32"
    if dtype in EXACT and device.cuda:
        return (lambda: torch.mm(a, b, out_dtype=torch.float32)), f"torch.mm {dtype} to fp32"
    return (lambda: torch.mm(a, b)), f"torch.mm {dtype}"


def result_dtype(device: Device, dtype: str) -> Any:
    if dtype == "int8":
        return torch.int32
    return torch.float32 if is_wide(device, dtype) else TORCH_DTYPES[dtype]


def bits(tensor: Any) -> Any:
    """As integers: −0 is not 0, and not-a-number equals itself."""
    return tensor.view(_BITS[tensor.element_size()])


def flip(tensor: Any, row: int, column: int, bit: int) -> None:
    """The injected fault: one bit of one element."""
    words = bits(tensor)
    width = _WORD[words.dtype]
    mask = 1 << (bit % width)
    words[row, column] ^= mask - (1 << width) if mask == 1 << (width - 1) else mask


def differing(got: Any, want: Any) -> Any:
    """A mask of the elements whose bits are not those of the right answer."""
    return torch.ne(bits(got), bits(want))


def located(mask: Any, got: Any, given: Operands, turn: int) -> list[dict[str, Any]]:
    """The first few, each with the right answer as the CPU counts it."""
    places = torch.nonzero(mask)[:WHERE_MAX].tolist()
    return [
        {
            "row": row,
            "col": column,
            "got": float(got[row, column]),
            "want": dot(given, row, column),
            "bits": f"{int(bits(got)[row, column]) % (1 << (8 * got.element_size())):x}",
            "round": turn,
        }
        for row, column in places
    ]


def dot(given: Operands, row: int, column: int) -> int:
    return int((given.a[row].cpu().long() * given.bt[column].cpu().long()).sum())


_CHUNK = 1 << 22
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def digest(tensors: Iterable[Any]) -> str:
    """Hexadecimal, 16 digits."""
    total, place = None, 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()]).reshape(-1)
        for chunk in words.split(_CHUNK):
            weights = _weights(place, chunk.numel(), chunk.device)
            part = (chunk.to(torch.int64) * weights).sum()
            total = part if total is None else total + part
            place += chunk.numel()
    value = 0 if total is None else int(total.item())
    return f"{value % (1 << 64):016x}"


def _weights(start: int, count: int, device: Any) -> Any:
    places = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    mixed = places * _GOLDEN
    mixed = (mixed ^ (mixed >> 31)) * _MIX
    return (mixed ^ (mixed >> 29)) | 1

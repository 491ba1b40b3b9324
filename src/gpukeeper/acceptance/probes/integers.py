"""Products of whole numbers, whose one right answer every kernel, order and GPU must give: no sum on the way leaves the
range in which its kind of number is exact. Relied upon by exact and stress.

B is kept as its transpose, row by row, which is the layout that fp8 and int8 kernels want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpukeeper.acceptance.probes.device import Device
from gpukeeper.acceptance.probes.dtypes import TORCH, precision, strong_fp64

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
    a, b = given.a.to(TORCH[dtype]), given.bt.to(TORCH[dtype]).t()
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
    return torch.float32 if is_wide(device, dtype) else TORCH[dtype]


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

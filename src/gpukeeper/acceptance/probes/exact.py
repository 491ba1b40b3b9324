"""Whether it multiplies rightly: products of whole numbers, held against mathematics, for every kind of number.

Every round: the sums of all rows and columns against A·(B·1) and (1ᵀA)·B, and every element against another kernel's.
Meanwhile the CPU makes out the same sums, and a sample with one element in each tile of 128 × 128, in whole numbers; so
a GPU that is wrong the same way each time is found too.

params: dtypes, n, rounds, seconds (go on until then, for each), phase cold or hot, heat_s, compare_every, seed.
inject: {"flip": dtype | true, "bit", "row", "col", "round"} one bit of one element of a result; {"nan": dtype | true};
{"lie": dtype | true} the same wrong element in every result, and in what this GPU expects.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from gpukeeper.acceptance.probes import arithmetic, gemm
from gpukeeper.acceptance.probes.arithmetic import (
    DTYPES,
    WHERE_MAX,
    ExpectedProduct,
    Operands,
    digest,
    precision,
    unsupported,
)
from gpukeeper.acceptance.probes.device import Device

TILE = 128
SEED = 60


@dataclass
class ExpectedSums:
    """What the CPU counted."""

    rows: Any
    columns: Any
    at_rows: Any
    at_columns: Any
    sample: Any


@dataclass
class Mismatches:
    """Wrong elements of one data type."""

    rounds: int = 0
    mismatches: int = 0
    where: list[dict[str, Any]] = field(default_factory=list)
    kernel: str = ""
    digest: str = ""

    def add(self, count: int, where: list[dict[str, Any]]) -> None:
        self.mismatches += count
        self.where += where[: WHERE_MAX - len(self.where)]


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    n, phase = int(params.get("n", 8192)), str(params.get("phase", "cold"))
    dtypes = list(params.get("dtypes", DTYPES))
    found: dict[str, Any] = {dtype: {"unsupported": why} for dtype in dtypes if (why := unsupported(device, dtype))}
    able = [dtype for dtype in dtypes if dtype not in found]
    if phase == "hot":
        _heat(device, n, float(params.get("heat_s", 5.0)))
    for entries in sorted({arithmetic.bound(device, dtype, n) for dtype in able}, reverse=True):
        same = [dtype for dtype in able if arithmetic.bound(device, dtype, n) == entries]
        for dtype, tally in _of_operands(device, same, entries, n, params).items():
            found[dtype] = _record(tally, n)
        device.release()
    return {"dtypes": {dtype: found[dtype] for dtype in dtypes}, "phase": phase, "n": n}


def _of_operands(
    device: Device, dtypes: list[str], entries: int, n: int, params: dict[str, Any]
) -> dict[str, Mismatches]:
    """All data types that can represent the same entries share operands, and so the expected result."""
    given = arithmetic.operands(device, n, entries, int(params.get("seed", SEED)))
    a, bt = given.a.cpu(), given.bt.cpu()
    with ThreadPoolExecutor(1) as pool:  # the CPU counts while the GPU multiplies
        truth: Future[ExpectedSums] = pool.submit(count, a, bt, int(params.get("seed", SEED)))
        with device.working():
            want = arithmetic.expected(device, given)
            for dtype in dtypes:
                if _injected(params, "lie", dtype):
                    _lie(want)
            tallies = {dtype: _rounds(device, dtype, given, want, params) for dtype in dtypes}
    for tally in tallies.values():
        tally.add(*_against(truth.result(), want, given))
    return tallies


def count(a: Any, bt: Any, seed: int) -> ExpectedSums:
    """On the CPU. The sample in 64-bit integers; the sums below 2⁵³."""
    rows, columns = arithmetic.sums(a, bt)
    generator = torch.Generator().manual_seed(seed)
    at_rows, at_columns = _one_of_each_tile(len(a), generator), _one_of_each_tile(len(bt), generator)
    sample = a[at_rows].long() @ bt[at_columns].long().t()
    return ExpectedSums(rows, columns, at_rows, at_columns, sample)


def _one_of_each_tile(n: int, generator: Any) -> Any:
    starts = torch.arange(0, n, TILE)
    return (starts + torch.randint(0, TILE, starts.shape, generator=generator)).clamp_(max=n - 1)


def _rounds(device: Device, dtype: str, given: Operands, want: ExpectedProduct, params: dict[str, Any]) -> Mismatches:
    tally = Mismatches()
    answer = want.product.to(arithmetic.result_dtype(device, dtype))
    rounds, until = int(params.get("rounds", 10)), time.perf_counter() + float(params.get("seconds", 0.0))
    every = max(1, int(params.get("compare_every", 1)))
    with precision(dtype, whole=True):
        multiply, tally.kernel = arithmetic.multiplier(device, dtype, given)
        got = None
        while tally.rounds < rounds or time.perf_counter() < until:
            got = multiply()
            _inject(got, dtype, tally.rounds, params)
            compare = tally.rounds % every == 0
            tally.add(*_verify(got, answer, want, given, tally.rounds, compare=compare))
            tally.rounds += 1
        tally.digest = digest([got]) if got is not None else ""
    return tally


def _verify(
    got: Any, answer: Any, want: ExpectedProduct, given: Operands, turn: int, *, compare: bool
) -> tuple[int, list[dict[str, Any]]]:
    """How many elements are wrong, and the first few. The result is still there, so each is found where it is."""
    total = torch.int64 if got.dtype == torch.int32 else torch.float64
    rows = torch.ne(got.sum(1, dtype=total), want.rows.to(total))
    columns = torch.ne(got.sum(0, dtype=total), want.columns.to(total))
    flags = [rows.sum(), columns.sum(), arithmetic.differing(got, answer).sum() if compare else rows.sum() * 0]
    bad_rows, bad_columns, wrong = torch.stack(flags).tolist()
    if not (bad_rows or bad_columns or wrong):
        return 0, []
    mask = arithmetic.differing(got, answer)
    wrong = int(mask.sum())
    if wrong:
        return wrong, arithmetic.located(mask, got, given, turn)
    # Every element is as it should be and their sums are not: it adds up wrongly.
    return max(bad_rows, bad_columns), [
        {"row": int(row), "col": None, "got": "sum of the row", "want": float(want.rows[int(row)]), "round": turn}
        for row in torch.nonzero(rows).reshape(-1)[:WHERE_MAX]
    ]


def _against(truth: ExpectedSums, want: ExpectedProduct, given: Operands) -> tuple[int, list[dict[str, Any]]]:
    """What this GPU takes for the right answer, against what the CPU counted."""
    rows = torch.nonzero(want.rows.cpu() != truth.rows).reshape(-1).tolist()
    columns = torch.nonzero(want.columns.cpu() != truth.columns).reshape(-1).tolist()
    at_rows, at_columns = truth.at_rows.to(want.product.device), truth.at_columns.to(want.product.device)
    sample = want.product[at_rows][:, at_columns].cpu()
    wrong = torch.nonzero(sample != truth.sample.double()).tolist()
    places = {(int(truth.at_rows[row]), int(truth.at_columns[column])) for row, column in wrong}
    places |= {(row, column) for row in rows[:4] for column in columns[:4]}
    where = [_place(want, given, row, column) for row, column in sorted(places)[:WHERE_MAX]]
    return max(len(wrong), len(rows), len(columns)), where


def _place(want: ExpectedProduct, given: Operands, row: int, column: int) -> dict[str, Any]:
    got = float(want.product[row, column])
    return {"row": row, "col": column, "got": got, "want": arithmetic.dot(given, row, column), "round": None}


def _heat(device: Device, n: int, seconds: float) -> None:
    """As hot as it gets: products of random-normal figures."""
    work = gemm.product(device, "fp32" if unsupported(device, "bf16") else "bf16", n)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        device.span(work, 20)


def _record(tally: Mismatches, n: int) -> dict[str, Any]:
    return {
        "rounds": tally.rounds,
        "elements": tally.rounds * n * n,
        "mismatches": tally.mismatches,
        "where": tally.where,
        "kernel": tally.kernel,
        "digest": tally.digest,
    }


def _injected(params: dict[str, Any], fault: str, dtype: str) -> bool:
    return (params.get("inject") or {}).get(fault) in {True, dtype}


def _inject(got: Any, dtype: str, turn: int, params: dict[str, Any]) -> None:
    inject = params.get("inject") or {}
    n = len(got)
    row, column = int(inject.get("row", n // 3)) % n, int(inject.get("col", n // 2 + 1)) % n
    if turn == int(inject.get("round", 0)):
        if _injected(params, "flip", dtype):
            arithmetic.flip(got, row, column, int(inject.get("bit", 0)))
        if _injected(params, "nan", dtype) and got.is_floating_point():
            got[row, column] = float("nan")
    if _injected(params, "lie", dtype):
        got[1, 1] += 2


def _lie(want: ExpectedProduct) -> None:
    """A GPU that is wrong the same way in every kernel, sums included."""
    want.product[1, 1] += 2
    want.rows[1] += 2
    want.columns[1] += 2

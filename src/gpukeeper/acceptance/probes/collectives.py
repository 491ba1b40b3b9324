"""Collectives over all ranks: is every element right on every rank, how fast was it, and what NCCL chose.

Payloads are integers that any order of summing gives exactly, so one wrong bit shows whatever algorithm ran.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.probes.ranks import BadSetting, RankGroup, begin, chunks, delay, switches


@dataclass(frozen=True)
class NcclLog:
    """None: it did not report it."""

    algorithms: dict[str, str]  # by op, of its largest size
    transports: dict[str, int] | None
    nvls: bool | None


_CHOICE = re.compile(r"NCCL INFO (?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
_VIA = re.compile(r"NCCL INFO Channel \S+ : .* via (\S+)")
_NVLS = re.compile(r"(\d+) nvls channels")
_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
}
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")  # by their old numbers
_PROTOCOLS = ("LL", "LL128", "SIMPLE")


def read_nccl_log(lines: Iterable[str] | None) -> NcclLog:
    """From NCCL_DEBUG=INFO with the subsystems INIT, GRAPH and TUNING (2.19 and later). Choices stand in rank 0's."""
    if lines is None:
        return NcclLog({}, None, None)
    best: dict[str, tuple[int, str]] = {}
    transports: Counter[str] = Counter()
    nvls: bool | None = None
    for line in lines:
        if choice := _CHOICE.search(line):
            op = _NAMES.get(choice[1] or "AllReduce")  # old releases do not name it; then all-reduce is meant mostly
            if op and int(choice[2]) >= best.get(op, (0, ""))[0]:
                words = f"{_named(choice[3], _ALGORITHMS)}/{_named(choice[4], _PROTOCOLS)}"
                best[op] = (int(choice[2]), words)
        elif via := _VIA.search(line):
            transports["/".join(via[1].split("/")[:2])] += 1
        elif found := _NVLS.search(line):
            nvls = int(found[1]) > 0
    return NcclLog({op: words for op, (_, words) in best.items()}, dict(transports) or None, nvls)


def _named(word: str, names: Sequence[str]) -> str:
    return names[int(word)] if word.isdigit() and int(word) < len(names) else word


def own_nccl_log() -> Iterator[str] | None:
    """This rank's own file, if the parent requested one. NCCL writes the host's name as it sees fit."""
    name = Path(os.environ.get("NCCL_DEBUG_FILE") or "none")
    found = sorted(name.parent.glob(name.name.replace("%h", "*").replace("%p", str(os.getpid()))))
    return _lines(found[0]) if found else None


def _lines(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as text:
        yield from text


OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
# Integers up to these are exact in the dtype: the bound of every sum.
EXACT = {"fp64": 2**53, "fp32": 2**24, "fp16": 2**11, "bf16": 2**8, "int32": 2**31 - 1, "int64": 2**62}
_LARGEST = 2**15  # a rank's own value; more tells nothing more
_PERIOD = 65_521  # prime: a chunk that went astray by any power of two does not fit
_SEED = 20_240_607
_WHERE_MAX = 16
_VERIFY_AT_ONCE = 2**26  # elements; bounds what verification needs of memory
_LATENCY_LOOP = 50
_LATENCY_REPEATS = 5
_WARM_UPS = 2


def run(device: Any, group: RankGroup, params: dict[str, Any]) -> dict[str, Any]:
    import torch

    dtype = str(params.get("dtype") or "fp32")
    sizes = [int(one) for one in params.get("sizes") or [default_bytes(group.world, dtype)]]
    ops = [str(one) for one in params.get("ops") or OPS]
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise BadSetting(f"Unknown collective {unknown[0]!r}; valid values: {', '.join(OPS)}.")
    bench = _Runner(device, group, dtype, params, max(sizes))
    with device.working():
        results = [bench.measure(op, size) for size in sizes for op in ops]
        latency = bench.latency(int(params.get("latency_bytes") or 8))
    log = read_nccl_log(own_nccl_log())
    return {
        "results": results,
        "local_ms": bench.local_ms,
        "latency_us": latency,
        "latency_bytes": int(params.get("latency_bytes") or 8),
        "variant": str(params.get("variant") or "default"),
        "switches": switches(str(params.get("variant") or "default")),
        "dtype": dtype,
        "algorithm": log.algorithms.get("all_reduce"),
        "algorithms": log.algorithms,
        "transports": log.transports,
        "nvls": log.nvls,
        "nccl_version": _nccl_version(torch) if group.place.backend == "nccl" else None,
    }


def default_bytes(world: int, dtype: str) -> int:
    """16.7 million elements shared by the ranks, at least 4.2 million."""
    return max(2**24 // world, 2**22) * _width(dtype)


def bus_factor(op: str, world: int) -> float:
    """What a wire carries for each byte of the array; nccl-tests, PERFORMANCE.md."""
    if op == "all_reduce":
        return 2 * (world - 1) / world
    return 1.0 if op == "broadcast" else (world - 1) / world


def _width(dtype: str) -> int:
    if dtype not in EXACT:
        raise BadSetting(f"Unknown dtype {dtype!r} for collectives; valid values: {', '.join(EXACT)}.")
    return {"64": 8, "32": 4, "16": 2}[dtype[-2:]]


def _nccl_version(torch: Any) -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


# What is sent


@dataclass(frozen=True)
class Piece:
    """Part of a range that lies in one row of the pattern, or in whole rows of it."""

    offset: int
    row: int
    column: int
    rows: int
    width: int


def pieces(start: int, length: int, period: int = _PERIOD) -> Iterator[Piece]:
    """The range [start, start + length) of a pattern with rows of `period`: what is left of a row, rows, the rest."""
    done = 0
    if start % period:
        width = min(period - start % period, length)
        yield Piece(0, start // period, start % period, 1, width)
        done = width
    rows = (length - done) // period
    if rows:
        yield Piece(done, (start + done) // period, 0, rows, period)
        done += rows * period
    if done < length:
        yield Piece(done, (start + done) // period, 0, 1, length - done)


class Pattern:
    """An endless array, cheap to make and to compare: a value for each column plus one for each row."""

    def __init__(self, columns: Any, rows: Any) -> None:
        self._columns, self._rows = columns, rows

    def fill(self, buffer: Any, start: int = 0) -> None:
        import torch

        for piece, part in self._parts(buffer, start):
            columns, rows = self._values(piece)
            torch.add(columns, rows, out=part)

    def wrong(self, buffer: Any, start: int = 0) -> Any:
        """How many elements are not what they should be, still on the device. NaN is never right."""
        import torch

        count = torch.zeros((), dtype=torch.int64, device=buffer.device)
        for piece, part in self._parts(buffer, start):
            columns, rows = self._values(piece)
            count += (part != columns + rows).sum()
        return count

    def where(self, buffer: Any, start: int = 0) -> Iterator[dict[str, Any]]:
        for piece, part in self._parts(buffer, start):
            columns, rows = self._values(piece)
            want = columns + rows
            for row, column in (part != want).nonzero()[:_WHERE_MAX].tolist():
                index = piece.offset + row * piece.width + column
                yield {"index": index, "got": part[row, column].item(), "want": want[row, column].item()}

    def _values(self, piece: Piece) -> tuple[Any, Any]:
        columns = self._columns[piece.column : piece.column + piece.width]
        return columns[None, :], self._rows[piece.row : piece.row + piece.rows][:, None]

    def _parts(self, buffer: Any, start: int) -> Iterator[tuple[Piece, Any]]:
        """Few rows at a time, so that nothing as large as the buffer is needed beside it."""
        at_once = max(1, _VERIFY_AT_ONCE // _PERIOD)
        for whole in pieces(start, buffer.numel()):
            for first, last in chunks(whole.rows, at_once):
                offset = whole.offset + first * whole.width
                piece = Piece(offset, whole.row + first, whole.column, last - first, whole.width)
                yield piece, buffer[offset : offset + piece.rows * piece.width].view(piece.rows, piece.width)


class Patterns:
    """Those of every rank in every round, the same on all ranks and machines: drawn on the CPU from one seed."""

    def __init__(self, device: Any, world: int, dtype: str, elements: int) -> None:
        import torch

        span = min(EXACT[dtype] // world, _LARGEST)
        if span < 1:
            raise BadSetting(f"{dtype} cannot hold the sum of {world} ranks exactly; use fp32.")
        self._dtype = dtypes()[dtype]
        source = torch.Generator().manual_seed(_SEED)
        shape = (world, _PERIOD)
        reach = span - span // 2
        columns = torch.randint(-reach, reach + 1, shape, generator=source, dtype=torch.int32)
        rows = torch.randint(-(span // 2), span // 2 + 1, (world, elements // _PERIOD + 2), generator=source)
        self._columns, self._rows = columns.to(device), rows.to(torch.int32).to(device)

    def of(self, rank: int, turn: int) -> Pattern:
        return Pattern(self._turned(rank, turn).to(self._dtype), self._rows[rank].to(self._dtype))

    def sum(self, turn: int) -> Pattern:
        import torch

        world = len(self._columns)
        columns = torch.stack([self._turned(rank, turn) for rank in range(world)]).sum(0)
        return Pattern(columns.to(self._dtype), self._rows.sum(0).to(self._dtype))

    def _turned(self, rank: int, turn: int) -> Any:
        """Another payload each round, by another amount on each rank."""
        return self._columns[rank].roll(turn * 7919 * (rank + 1) % _PERIOD)


def dtypes() -> dict[str, Any]:
    import torch

    return {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "int32": torch.int32,
        "int64": torch.int64,
    }


# One collective


@dataclass(frozen=True)
class Exchange:
    """The buffers of one collective on one rank, and what must be in the received one afterwards."""

    op: str
    rank: int
    world: int
    sent: Any
    received: Any

    def prepare(self, patterns: Patterns, turn: int) -> None:
        if self.received is not self.sent:
            self.received.fill_(_nothing(self.received))  # what was right before must not count again
        if self.op == "broadcast" and self.rank != self._root(turn):
            self.sent.fill_(_nothing(self.sent))
        else:
            patterns.of(self.rank, turn).fill(self.sent)

    def call(self, turn: int) -> None:
        import torch.distributed as dist

        if self.op == "all_reduce":
            dist.all_reduce(self.sent)
        elif self.op == "broadcast":
            dist.broadcast(self.sent, src=self._root(turn))
        elif self.op == "all_gather":
            dist.all_gather_into_tensor(self.received, self.sent)
        elif self.op == "reduce_scatter":
            dist.reduce_scatter_tensor(self.received, self.sent)
        else:
            dist.all_to_all_single(self.received, self.sent)

    def expected(self, patterns: Patterns, turn: int) -> Iterator[tuple[Pattern, int, Any, int]]:
        """A pattern, where in it, the part of the received buffer that must be it, and where that part begins."""
        part = self.received.numel() // self.world
        if self.op == "all_reduce":
            yield patterns.sum(turn), 0, self.received, 0
        elif self.op == "broadcast":
            yield patterns.of(self._root(turn), turn), 0, self.received, 0
        elif self.op == "reduce_scatter":
            yield patterns.sum(turn), self.rank * self.received.numel(), self.received, 0
        else:
            start = self.rank * part if self.op == "all_to_all" else 0
            for sender in range(self.world):
                begin = sender * part
                yield patterns.of(sender, turn), start, self.received[begin : begin + part], begin

    def _root(self, turn: int) -> int:
        return turn % self.world


def _nothing(buffer: Any) -> float | int:
    """A value that no right answer has."""
    import torch

    kind = buffer.dtype
    return float(torch.finfo(kind).max) if kind.is_floating_point else int(torch.iinfo(kind).min)


class _Runner:
    def __init__(self, device: Any, group: RankGroup, dtype: str, params: Mapping[str, Any], largest: int) -> None:
        self._device, self._group, self._dtype = device, group, dtype
        self._rounds = int(params.get("rounds") or 2 * group.world)
        self._inject = params.get("inject") or {}
        self._patterns = Patterns(device.torch, group.world, dtype, largest // _width(dtype))
        self._free = self._least_free()
        self.local_ms: list[float] = []  # of each round: this rank's own work, before it waits for the others

    def measure(self, op: str, size: int) -> dict[str, Any]:
        count = max(1, size // _width(self._dtype) // self._group.world) * self._group.world
        size = count * _width(self._dtype)
        answer: dict[str, Any] = {"op": op, "bytes": size, "elements": count, "rounds": self._rounds}
        needed = 2 * size + min(3 * size, 16 * _VERIFY_AT_ONCE)
        if needed > self._free:
            return {**answer, "left_out": f"needs {needed} bytes of memory, {self._free} are free"}
        exchange = self._exchange(op, count)
        for turn in range(_WARM_UPS):
            exchange.prepare(self._patterns, turn)
            exchange.call(turn)
        seconds, wrong = [], 0
        where: list[dict[str, Any]] = []
        for turn in range(self._rounds):
            seconds.append(self._round(exchange, turn))
            found, places = self._verify(exchange, turn)
            wrong, where = wrong + found, [*where, *places][:_WHERE_MAX]
        del exchange
        rates = [size / one / 1e9 for one in seconds]
        factor = bus_factor(op, self._group.world)
        return {
            **answer,
            "seconds": seconds,
            "algbw": rates,
            "busbw": [rate * factor for rate in rates],
            "wrong": wrong,
            "where": where,
        }

    def _exchange(self, op: str, count: int) -> Exchange:
        import torch

        part = count // self._group.world

        def new(elements: int) -> Any:
            return torch.empty(elements, dtype=dtypes()[self._dtype], device=self._device.torch)

        sent = new(part if op == "all_gather" else count)
        received = sent if op in ("all_reduce", "broadcast") else new(part if op == "reduce_scatter" else count)
        return Exchange(op, self._group.rank, self._group.world, sent, received)

    def _round(self, exchange: Exchange, turn: int) -> float:
        began = time.perf_counter()
        if not (self._inject.get("stale") and turn):
            exchange.prepare(self._patterns, turn)
        delay(self._inject, self._group.rank)
        self._device.synchronize()
        self.local_ms.append(1e3 * (time.perf_counter() - began))
        begin(self._group, f"{exchange.op} of {exchange.sent.nbytes} bytes, round {turn}")
        more = self._more(exchange)

        def work() -> None:
            exchange.call(turn)
            more()

        seconds = self._timed(work)
        if self._inject.get("wrong_rank") == self._group.rank and turn == self._rounds // 2:
            exchange.received[exchange.received.numel() // 3] += 1
        return seconds

    def _more(self, exchange: Exchange) -> Any:
        """The injected slowness: more bytes on the same wires, on all ranks."""
        import torch
        import torch.distributed as dist

        share = float(self._inject.get("slow") or 0)
        if not share:
            return lambda: None
        extra = torch.zeros(max(1, int(exchange.sent.numel() * share)), device=self._device.torch)
        return lambda: dist.all_reduce(extra)

    def _timed(self, work: Any) -> float:
        """From when all ranks are there. On a GPU they meet there and not on the CPU, which would be less exact."""
        import torch
        import torch.distributed as dist

        if not self._device.cuda:
            dist.barrier()
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.all_reduce(torch.zeros(1, device=self._device.torch))
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _verify(self, exchange: Exchange, turn: int) -> tuple[int, list[dict[str, Any]]]:
        checks = list(exchange.expected(self._patterns, turn))
        total = sum(pattern.wrong(part, start) for pattern, start, part, _ in checks).item()
        if not total:
            return 0, []
        found = (
            {**one, "index": one["index"] + begin, "round": turn}
            for pattern, start, part, begin in checks
            for one in pattern.where(part, start)
        )
        return total, [one for one, _ in zip(found, range(_WHERE_MAX), strict=False)]

    def latency(self, size: int) -> list[float]:
        """Microseconds of a small all-reduce, one behind the other, sums of zeros."""
        import torch
        import torch.distributed as dist

        small = torch.zeros(max(1, size // _width(self._dtype)), dtype=dtypes()[self._dtype], device=self._device.torch)

        def loop() -> None:
            for _ in range(_LATENCY_LOOP):
                dist.all_reduce(small)

        loop()
        return [self._timed(loop) / _LATENCY_LOOP * 1e6 for _ in range(_LATENCY_REPEATS)]

    def _least_free(self) -> int:
        """Of all ranks: all take part in a size, or none."""
        import torch
        import torch.distributed as dist

        mine = torch.tensor([int(self._device.free_memory())], dtype=torch.int64, device=self._device.torch)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        return int(mine.item())

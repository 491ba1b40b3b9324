"""Whether memory keeps what is written to it: every pattern is written to all of it before any of it is read back.

Offsets count from the start of what was tested; a program does not learn a physical address.
params: share (of the free memory), bytes (at most), passes, seconds (go on until then), chunk.
inject: {"flip": true | pattern name} flips one bit between writing and reading.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gpukeeper.acceptance.probes.device import Device

PATTERNS = ("zeros", "ones", "0x55", "0xaa", "address", "random")
_CONSTANT = {"zeros": 0, "ones": -1, "0x55": 0x5555555555555555, "0xaa": -0x5555555555555556}
WHERE_MAX = 16
SEED = 50


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    inject = (params.get("inject") or {}).get("flip")
    began = time.perf_counter()
    passes, until = int(params.get("passes", 1)), float(params.get("seconds", 0.0))
    chunks = _chunks(device, params)
    scratch = torch.empty_like(chunks[0])
    errors, done = 0, 0
    where: list[dict[str, Any]] = []
    with device.working():
        while done < passes or time.perf_counter() - began < until:
            for pattern in PATTERNS:
                for index, chunk in enumerate(chunks):
                    _write(device, chunk, pattern, index, chunks[0].numel(), done)
                if inject in {True, pattern}:
                    chunks[-1][chunks[-1].numel() // 3] ^= 1 << 17
                    inject = None if inject is True else inject
                found = [
                    _read(device, chunk, scratch, pattern, index, done, WHERE_MAX - len(where))
                    for index, chunk in enumerate(chunks)
                ]
                errors += sum(count for count, _ in found)
                where += [one for _, places in found for one in places][: WHERE_MAX - len(where)]
            done += 1
    return {
        "tested_bytes": sum(chunk.numel() * 8 for chunk in chunks),
        "total_bytes": device.total_memory(),
        "patterns": list(PATTERNS),
        "passes": done,
        "errors": errors,
        "where": where,
        "seconds": time.perf_counter() - began,
    }


def _chunks(device: Device, params: dict[str, Any]) -> list[Any]:
    """What is to be tested. That memory is taken by others is no excuse: the share is of what is free, and is
    reported."""
    chunk = int(params.get("chunk", 256 << 20)) // 8
    size = int(device.free_memory() * float(params.get("share", 0.5)))
    size = min(size, int(params.get("bytes", size)))
    count = size // (chunk * 8) - 1  # one is for comparing
    if count < 1:
        raise RuntimeError(
            f"out of memory: {size >> 20} MiB can be tested, less than two chunks of {chunk >> 17} MiB. Free the GPU,"
            " or use a larger share."
        )
    return [torch.empty(chunk, dtype=torch.int64, device=device.torch) for _ in range(count)]


def _write(device: Device, chunk: Any, pattern: str, index: int, length: int, turn: int) -> None:
    if pattern in _CONSTANT:
        chunk.fill_(_CONSTANT[pattern])
    elif pattern == "address":
        torch.arange(index * length, index * length + chunk.numel(), out=chunk)
    else:
        chunk.random_(generator=device.generator(SEED + turn * 1_000_003 + index))


def _read(
    device: Device, chunk: Any, scratch: Any, pattern: str, index: int, turn: int, room: int
) -> tuple[int, list[dict[str, Any]]]:
    """How many words differ from what was written, and the first few of them."""
    want = _CONSTANT.get(pattern)
    if want is None:
        _write(device, scratch, pattern, index, chunk.numel(), turn)
    differs = torch.ne(chunk, scratch if want is None else want)
    count = int(differs.sum().item())
    if not count or room <= 0:
        return count, []
    places = [int(at) for at in torch.nonzero(differs).reshape(-1)[:room]]
    return count, [
        {
            "offset": (index * chunk.numel() + at) * 8,
            "got": _hex(int(chunk[at])),
            "want": _hex(int(scratch[at]) if want is None else want),
            "pattern": pattern,
        }
        for at in places
    ]


def _hex(word: int) -> str:
    return f"{word % (1 << 64):016x}"

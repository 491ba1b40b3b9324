"""How fast it copies its own memory. Bytes read and bytes written are both counted.

params: bytes, seconds, repeats. inject: {"slow": 0.1}, {"flip": true} (one bit of the copy).
"""

from __future__ import annotations

from typing import Any

import torch

from gpukeeper.acceptance.probes.device import Device

LEAST = 1 << 30  # on a GPU: smaller copies are answered from caches
SEED = 30


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    inject = params.get("inject") or {}
    size = _size(device, int(params.get("bytes", 4 << 30)))
    source = torch.randint(
        -(1 << 62), 1 << 62, (size // 8,), dtype=torch.int64, device=device.torch, generator=device.generator(SEED)
    )
    target = torch.empty_like(source)
    times = device.timed(
        lambda: target.copy_(source),
        repeats=int(params.get("repeats", 5)),
        seconds=float(params.get("seconds", 1.0)),
        slow=float(inject.get("slow", 0.0)),
    )
    if inject.get("flip"):
        target[size // 16] ^= 1
    with device.working():
        wrong = int(torch.ne(source, target).sum().item())
    return {
        "gbps": [2 * size / once / 1e9 for once in times],
        "bytes": size,
        "method": "copy/read+write",
        "wrong": wrong,
    }


def _size(device: Device, wanted: int) -> int:
    """At least four times the cache; at most a third of what is free, since there are two of them and a comparison."""
    if device.cuda:
        wanted = max(wanted, LEAST, 4 * device.l2_bytes)
    free = device.free_memory()
    if wanted > free / 3 and device.cuda and free / 3 < max(LEAST // 4, 4 * device.l2_bytes):
        raise RuntimeError(f"out of memory: {free >> 20} MiB are free, too little for a copy that exceeds the cache")
    return int(min(wanted, free / 3)) // 4096 * 4096

"""How fast and how truly data goes from the host to the GPU, back, and from GPU memory to GPU memory.

Host memory is pinned, so that the link is measured and not the copy before it. Between devices, bytes read and written
are both counted, as in memory_bandwidth; over the link, bytes moved.
params: bytes, seconds (of each way), repeats. inject: {"slow": 0.1}, {"flip": true} (one bit, on the GPU, on its way).
"""

from __future__ import annotations

from typing import Any

import torch

from gpukeeper.acceptance.probes.device import Device

SEED = 40


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    inject = params.get("inject") or {}
    size = int(params.get("bytes", 512 << 20)) // 4096 * 4096
    sent, pinned = _host(device, size)
    back, pinned_too = _host(device, size)
    pinned = pinned if pinned is not True else pinned_too
    there, other = (torch.empty(size // 8, dtype=torch.int64, device=device.torch) for _ in (0, 1))
    # Made on the device, since a host takes long for it. What arrives here is the truth from now on.
    sent.copy_(other.random_(generator=device.generator(SEED)))
    other.zero_()
    quick = pinned is True
    ways = {
        "h2d": lambda: there.copy_(sent, non_blocking=quick),
        "d2h": lambda: back.copy_(other, non_blocking=quick),
        "d2d": lambda: other.copy_(there),
    }
    figures: dict[str, list[float]] = {}
    for way in ("h2d", "d2d", "d2h"):  # the data's own way: what comes back has been everywhere
        if way == "d2h" and inject.get("flip"):
            device.synchronize()
            other[size // 16] ^= 1 << 5
        times = device.timed(
            ways[way],
            repeats=int(params.get("repeats", 5)),
            seconds=float(params.get("seconds", 0.5)),
            slow=float(inject.get("slow", 0.0)),
        )
        counted = 2 * size if way == "d2d" else size
        figures[way] = [counted / once / 1e9 for once in times]
    device.synchronize()
    host = "pinned" if quick else "pageable"
    return {
        **figures,
        "bytes": size,
        "pinned": pinned,
        "method": f"copy/{host}",
        "methods": {"h2d": f"copy/{host}", "d2h": f"copy/{host}", "d2d": "copy/read+write"},
        **_compare(sent, back),
    }


def _host(device: Device, size: int) -> tuple[Any, bool | str]:
    if not device.cuda:
        return torch.empty(size // 8, dtype=torch.int64), "no GPU to pin memory for"
    try:
        return torch.empty(size // 8, dtype=torch.int64, pin_memory=True), True
    except RuntimeError as error:
        if "out of memory" in str(error).lower() or "lock" in str(error).lower():
            return torch.empty(size // 8, dtype=torch.int64), str(error).splitlines()[0]
        raise


def _compare(sent: Any, back: Any) -> dict[str, Any]:
    wrong = torch.nonzero(sent != back).reshape(-1)
    return {
        "verified": not wrong.numel(),
        "wrong": wrong.numel(),
        "where": [_where(int(at), sent, back) for at in wrong[:16]],
    }


def _where(at: int, sent: Any, back: Any) -> dict[str, Any]:
    return {"offset": at * 8, "got": f"{int(back[at]) % (1 << 64):016x}", "want": f"{int(sent[at]) % (1 << 64):016x}"}

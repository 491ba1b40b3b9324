"""Copies from every GPU to every other: how fast is each pair, and does every byte arrive?

One process that sees all GPUs. On a CPU the same code copies from memory to memory, between two that it calls devices.

params: bytes, repeats, seconds (of each pair). inject: {"flip": [from, to]} flips one bit of what arrived there,
{"slow": [from, to], "share": 1.0} copies that much more inside the timed region.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gpukeeper.acceptance.probes.ranks import BadSetting

_WHERE_MAX = 4
_LEAST_S = 0.002  # of a repeat; shorter ones are counted several times


def run(device: Any, params: dict[str, Any]) -> dict[str, Any]:
    size = int(params.get("bytes") or 2**28)
    repeats = int(params.get("repeats") or 5)
    inject = params.get("inject") or {}
    places = _places(device)
    if len(places) < 2:
        raise BadSetting("Links need two GPUs; one is visible here.")
    if size < 4:
        raise BadSetting(f"bytes={size}: at least 4.")
    pairs = []
    with device.working():
        for first, origin in enumerate(places):
            sent = _payload(origin, size // 4, first)
            for second, target in enumerate(places):
                if first != second:
                    pair = _Pair(first, second, sent, target, inject)
                    pairs.append(pair.measure(repeats))
            del sent
    return {"pairs": pairs, "bytes": size // 4 * 4, "method": "p2p/copy", "devices": len(places)}


def _places(device: Any) -> list[Any]:
    if not device.cuda:
        return [device.torch, device.torch]
    return [torch.device(f"cuda:{index}") for index in range(torch.cuda.device_count())]


def _payload(place: Any, count: int, salt: int) -> Any:
    """Integers that any device makes the same way: the receiver makes its own to compare with."""
    values = torch.arange(count, dtype=torch.int32, device=place)
    return values * 1_640_531_527 + (salt + 1) * 97  # wraps around; that is meant


class _Pair:
    def __init__(self, first: int, second: int, sent: Any, target: Any, inject: dict[str, Any]) -> None:
        self._first, self._second, self._sent, self._inject = first, second, sent, inject
        self._received = torch.zeros_like(sent, device=target)

    def measure(self, repeats: int) -> dict[str, Any]:
        once = self._timed(3) / 3
        rounds = max(1, round(_LEAST_S / max(once, 1e-6)))
        spans = [self._timed(rounds) / rounds for _ in range(repeats)]
        size = self._sent.numel() * self._sent.element_size()
        return {
            "from": self._first,
            "to": self._second,
            "gbps": [size / one / 1e9 for one in spans],
            "p2p": self._direct(),
            **self._verified(),
        }

    def _timed(self, rounds: int) -> float:
        extra = round(rounds * float(self._inject.get("share") or 1.0)) if self._is("slow") else 0
        self._wait()
        began = time.perf_counter()
        for _ in range(rounds + extra):
            self._received.copy_(self._sent, non_blocking=True)
        self._wait()
        return time.perf_counter() - began

    def _verified(self) -> dict[str, Any]:
        """A last copy over zeros, compared on the receiver with what it made itself."""
        self._received.zero_()
        self._wait()
        self._received.copy_(self._sent)
        self._wait()
        if self._is("flip"):
            self._received[self._received.numel() // 2] ^= 1
        want = _payload(self._received.device, self._received.numel(), self._first)
        found = (self._received != want).nonzero().flatten()
        where = [
            {"index": index, "got": self._received[index].item(), "want": want[index].item()}
            for index in found[:_WHERE_MAX].tolist()
        ]
        return {"wrong": len(found), "where": where}

    def _direct(self) -> bool:
        if self._sent.device.type != "cuda":
            return False
        return bool(torch.cuda.can_device_access_peer(self._sent.device, self._received.device))

    def _is(self, fault: str) -> bool:
        return list(self._inject.get(fault) or []) == [self._first, self._second]

    def _wait(self) -> None:
        for one in (self._sent, self._received):
            if one.device.type == "cuda":
                torch.cuda.synchronize(one.device)

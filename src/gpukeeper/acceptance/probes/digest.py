"""A 64-bit digest of the bits of tensors, made where they lie. Each word counts by its place, so that swapped parts
show; a single changed bit always changes it, since every weight is odd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

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

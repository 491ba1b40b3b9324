"""NCCL's flight recorder, as PyTorch dumps it: how many collectives of the default group a rank began and completed.

The dump is JSON of another program: what is missing or of another shape is not known, never zero. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gpukeeper.model import reading


def counts(dump: bytes) -> tuple[int | None, int | None]:
    """Collectives begun and completed: the largest sequence number of each."""
    entries = list(_entries(dump))
    began = [number for number, _ in entries]
    completed = [number for number, state in entries if state == "completed"]
    return max(began, default=None), max(completed, default=0 if began else None)


def _entries(dump: bytes) -> Iterator[tuple[int, str]]:
    try:
        found = reading.decode(dump)
    except msgspec.DecodeError:
        return
    entries = found.get("entries") if isinstance(found, Mapping) else None
    for one in entries if isinstance(entries, list) else []:
        number = _number(one)
        if number is not None and not (isinstance(one, Mapping) and one.get("is_p2p") is True):
            yield number, str(one.get("state", ""))


def _number(entry: Any) -> int | None:
    """PyTorch 2.4 named it seq_id."""
    if not isinstance(entry, Mapping):
        return None
    found = entry.get("collective_seq_id", entry.get("seq_id"))
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None

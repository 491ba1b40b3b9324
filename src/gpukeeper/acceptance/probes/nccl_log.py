"""What NCCL reports in its log: algorithms, transports, NVLS."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


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


def read_log(lines: Iterable[str] | None) -> NcclLog:
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


def own_log() -> Iterator[str] | None:
    """This rank's own file, if the parent requested one. NCCL writes the host's name as it sees fit."""
    name = Path(os.environ.get("NCCL_DEBUG_FILE") or "none")
    found = sorted(name.parent.glob(name.name.replace("%h", "*").replace("%p", str(os.getpid()))))
    return _lines(found[0]) if found else None


def _lines(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as text:
        yield from text

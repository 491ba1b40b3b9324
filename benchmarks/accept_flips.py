"""Single flipped bits, planted in products of every kind of number: how many the exact check finds and locates."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.accept_bed import ask
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.acceptance.record import ProbeRequest

DTYPES = sized(("fp32", "tf32", "bf16", "fp16", "fp8", "int8"), tiny=("fp32", "bf16"))
N, EACH, SEED = sized(4096, tiny=1024), sized(32, tiny=2), 11


def run() -> None:
    chance = random.Random(SEED)
    # Every bit of the result once, the lowest first; each in another place.
    faults = [(dtype, bit, chance.randrange(N), chance.randrange(N)) for dtype in DTYPES for bit in range(EACH)]
    answers = ask([_job(*fault) for fault in faults])
    found = dict.fromkeys(DTYPES, 0)
    for (dtype, _, row, column), answer in zip(faults, answers, strict=True):
        found[dtype] += _is_located(answer["dtypes"][dtype], row, column)
    rows = [(dtype, f"{count} of {EACH}", met(count / EACH, 1.0, least=True)) for dtype, count in found.items()]
    print_table(("one bit of one element", "found and located", "all of them"), rows)
    share = sum(found.values()) / len(faults)
    print_figure(Figure("accept-flips", sum(found.values()), "flips", round(share, 4), f"{len(faults)} planted"))


def _job(dtype: str, bit: int, row: int, column: int) -> ProbeRequest:
    flip = {"flip": dtype, "bit": bit, "row": row, "col": column}
    return ProbeRequest(probe="exact", params={"dtypes": [dtype], "n": N, "rounds": 1, "inject": flip})


def _is_located(said: Any, row: int, column: int) -> bool:
    places = [(one["row"], one["col"]) for one in said.get("where", ())]
    return said.get("mismatches") == 1 and places == [(row, column)]

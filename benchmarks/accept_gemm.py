"""The bf16 product that `accept` judges a GPU by, against the best of all sizes on the same GPU in the same run."""

from __future__ import annotations

from statistics import median

from benchmarks.accept_bed import ask
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.acceptance.record import ProbeRequest

_ALL = (4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384)
SIZES = sized(_ALL, tiny=_ALL[:2])
TARGET = 0.98
TURNS = sized(3, tiny=1)  # the sweep and the figure take turns: a GPU that warms up must not favour either


def run() -> None:
    params = {
        "dtypes": ["bf16"],
        "n": sized(8192, tiny=4096),
        "rounds": sized(10, tiny=1),
        "repeats": sized(5, tiny=1),
        "sweep": list(SIZES),
    }
    answers = ask([ProbeRequest(probe="gemm", params=params)] * TURNS)
    judged = max(median(one["dtypes"]["bf16"]["tflops"]) for one in answers)
    best = {size: max(one["sweep"]["bf16"][str(size)] for one in answers) for size in SIZES}
    ceiling = max(best.values())
    rows = [(f"{size}³", f"{speed:.0f} TFLOP/s", "") for size, speed in best.items()]
    ratio = judged / ceiling
    rows.append(
        ("what accept says", f"{judged:.0f} TFLOP/s", f"{ratio:.3f} of the best, {met(ratio, TARGET, least=True)}")
    )
    print_table(("bf16", "seen", f"at least {TARGET} of the best"), rows)
    print_figure(Figure("accept-gemm", round(judged, 1), "TFLOP/s", round(ratio, 3), "the best of a sweep of sizes"))

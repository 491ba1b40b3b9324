"""The copy that `accept` judges memory by, against the best of all sizes on the same GPU in the same run."""

from __future__ import annotations

from statistics import median

from benchmarks.accept_bed import ask
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.acceptance.record import ProbeRequest

GIB = 1 << 30
_ALL = (GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB, 32 * GIB)
JUDGED, SIZES = sized((8 * GIB, _ALL), tiny=(GIB, _ALL[:1]))
SECONDS, REPEATS = sized((1.0, 5), tiny=(0.1, 1))
TARGET = 0.98


def run() -> None:
    jobs = [
        ProbeRequest(probe="memory_bandwidth", params={"bytes": size, "seconds": SECONDS, "repeats": REPEATS})
        for size in SIZES
    ]
    found = {size: median(answer["gbps"]) for size, answer in zip(SIZES, ask(jobs), strict=True)}
    best = max(found.values())
    ratio = found[JUDGED] / best
    rows = [(f"{size // GIB} GiB", f"{speed:,.0f} GB/s", "") for size, speed in found.items()]
    rows.append(
        ("what accept says", f"{found[JUDGED]:,.0f} GB/s", f"{ratio:.3f} of the best, {met(ratio, TARGET, least=True)}")
    )
    print_table(("read and written", "seen", f"at least {TARGET} of the best"), rows)
    print_figure(Figure("accept-copy", round(found[JUDGED]), "GB/s", round(ratio, 3), "the best of a sweep of sizes"))

"""`python -m benchmarks NAME`: one claim measured. Without a name: what there is. `--tiny`: only to see that it runs.

Exit codes: 0 measured, 2 no such name, 3 something that the benchmark needs is missing here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

from benchmarks.needs import EXIT_CODE, CannotMeasure
from benchmarks.size import make_tiny

NAMES = (
    "decisions",
    "plan",
    "startup",
    "install",
    "simulation",
    "ledger",
    "fleet-ship",
    "fleet-deploy",
    "usage-report",
    "web-page",
    "web-live",
    "web-cost",
    "nightly",
    "backtest",
    "signals",
    "disk-size",
    "disk-delete",
    "disk-sweep",
    "ray-sweep",
    "http-clients",
    "docker-plan",
    "docker-idle",
    "docker-outcome",
    "kubernetes-scan",
    "kubernetes-lag",
    "kubernetes-reclaim",
    "accept-gemm",
    "accept-copy",
    "accept-flips",
    "accept-search",
    "accept-launch",
    "accept-collect",
)


def main(arguments: list[str]) -> int:
    if not arguments:
        for name in NAMES:
            print(f"{name:20}{_first_line(name)}")
        return 0
    names = [one for one in arguments if one != "--tiny"]
    if len(names) != 1 or names[0] not in NAMES:
        print(f'"{" ".join(names)}" is not one of: {", ".join(NAMES)}', file=sys.stderr)
        return 2
    if names != arguments:
        make_tiny()
        print("Tiny: these figures say nothing about speed.\n")
    try:
        _module(names[0]).run()
    except CannotMeasure as missing:
        print(f"{names[0]}: nothing was measured. {missing}", file=sys.stderr)
        return EXIT_CODE
    return 0


def _first_line(name: str) -> str:
    return inspect.cleandoc(_module(name).__doc__ or "").splitlines()[0]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m benchmarks NAME`: one claim measured. Without a name: what there is."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

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
    if len(arguments) > 1 or arguments[0] not in NAMES:
        print(f'"{" ".join(arguments)}" is not one of: {", ".join(NAMES)}', file=sys.stderr)
        return 2
    _module(arguments[0]).run()
    return 0


def _first_line(name: str) -> str:
    return inspect.cleandoc(_module(name).__doc__ or "").splitlines()[0]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The size of a benchmark: full, or tiny (`--tiny`), which takes seconds and shows only that the benchmark runs."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
_VARIABLE = "BENCHMARKS_TINY"  # of the environment: the programs that a benchmark starts must have the same size


def make_tiny() -> None:
    """Before a benchmark is imported."""
    os.environ[_VARIABLE] = "1"


def sized(full: T, tiny: T) -> T:
    return tiny if os.environ.get(_VARIABLE) else full

"""What a benchmark needs besides Python. Without it, the benchmark ends with one sentence and exit code 3."""

from __future__ import annotations

EXIT_CODE = 3


class CannotMeasure(Exception):
    """Its words say what is missing, and how to get it."""


def need(engine: str, there: bool) -> None:
    """`engine`: a name of tests/engines.py."""
    from tests.engines import HOW  # imports pytest, which most benchmarks do without

    if not there:
        raise CannotMeasure(f"{engine}: {HOW[engine]}")

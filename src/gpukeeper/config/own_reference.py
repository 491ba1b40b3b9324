"""A person's own reference table for `gpukeeper accept --reference`: YAML or JSON rows, as strict as our own table.

A row that the linter complains about is refused: a floor that cannot fail is worse than none.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.judging.reference import ReferenceRow
from gpukeeper.config import document
from gpukeeper.model.errors import UsageError

EXAMPLE = (
    '[{gpu: "NVIDIA H200", check: gemm, metric: bf16, unit: TFLOP/s, method: "gemm/*", floor: 720, ceiling: 989, '
    'origin: measured, source: "our 64 nodes, March"}]'
)


def read_rows(path: Path) -> tuple[ReferenceRow, ...]:
    """Raises UsageError with every problem."""
    read = document.read(_text(path))
    if read.problems:
        raise UsageError(
            "\n".join([*(one.message(str(path), read.lines) for one in read.problems), "Nothing was run."])
        )
    try:
        rows = reference.read(read.tree or [])
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}. Nothing was run. Write a list of rows like {EXAMPLE}") from error
    problems = [f"{path}: {one}" for one in reference.lint(rows)]
    if problems or not rows:
        raise UsageError(
            "\n".join([*problems, "Nothing was run."] if rows else [f"{path} has no rows. Nothing was run."])
        )
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--reference {path} could not be read: {words}. Nothing was run.") from error

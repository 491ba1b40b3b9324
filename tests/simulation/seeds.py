"""Tests that try many seeds name the one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def failing_with(seed: int) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise

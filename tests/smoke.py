"""Which cases of a parametrized engine test are in the smoke set (`pytest -m smoke`), which every change runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def smoke(values: Iterable[Any], is_smoke: Callable[[Any], object]) -> list[Any]:
    """The same values; those for which it is true are marked."""
    return [_case(value, marked=bool(is_smoke(value))) for value in values]


def _case(value: Any, *, marked: bool) -> Any:
    if not marked:
        return value
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.smoke)

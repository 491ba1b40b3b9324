"""Unknown as a value. A fact is a value, or Unknown with a why; None means "does not exist".

`bool()` of an Unknown raises, so that `if idle:` can never read "not measured" as an answer.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from typing_extensions import TypeIs

T = TypeVar("T")


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """A fact that could not be learned. `by_design`: it never exists here (a slice has no utilisation)."""

    why: str
    by_design: bool = False

    def __bool__(self) -> bool:
        raise TypeError(f"an unknown fact is neither true nor false ({self.why}); check is_known() first")

    def __str__(self) -> str:
        return f"unknown: {self.why}"


def is_known(fact: T | Unknown) -> TypeIs[T]:
    return not isinstance(fact, Unknown)

"""Unknown as a value. A fact is a value, or Unknown with a why; None means "does not exist".

`bool()` of an Unknown raises, so that `if idle:` can never read "not measured" as an answer. Here are also the enums
of all values: members as plain class attributes, as Python 3.12 and later have them.
"""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
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


def larger(one: float | Unknown, other: float | Unknown) -> float | Unknown:
    """A value wins over an Unknown."""
    if isinstance(one, Unknown):
        return one if isinstance(other, Unknown) else other
    return one if isinstance(other, Unknown) else max(one, other)


E = TypeVar("E", bound=StrEnum)


def direct(members: type[E]) -> type[E]:
    """Python 3.11 calls a property at every `State.ENDED`, 100 ns each time; a decision does it dozens of times."""
    for name, member in members.__members__.items():
        type.__setattr__(members, name, member)
    # Equal to its word, so of the same hash; Enum's own hash is that of the name, and a call in Python.
    type.__setattr__(members, "__hash__", str.__hash__)
    type.__setattr__(members, "value", property(attrgetter("_value_")))  # Enum's own is a call in Python, too
    return members

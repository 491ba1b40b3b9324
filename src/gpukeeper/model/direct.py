"""Members of an enum as plain class attributes, as Python 3.12 and later have them."""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

E = TypeVar("E", bound=StrEnum)


def direct(members: type[E]) -> type[E]:
    """Python 3.11 calls a property at every `State.ENDED`, 100 ns each time; a decision does it dozens of times."""
    for name, member in members.__members__.items():
        type.__setattr__(members, name, member)
    # Equal to its word, so of the same hash; Enum's own hash is that of the name, and a call in Python.
    type.__setattr__(members, "__hash__", str.__hash__)
    type.__setattr__(members, "value", property(attrgetter("_value_")))  # Enum's own is a call in Python, too
    return members

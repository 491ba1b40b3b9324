"""Why an object still exists, according to its platform: what it is part of and made of, and what keeps it."""

from __future__ import annotations

import msgspec


class Cause(msgspec.Struct, frozen=True):
    words: str  # a sentence
    remedy: str = ""  # what to do about it


class Diagnosis(msgspec.Struct, frozen=True):
    """`tree`: one line each from the root down, indented."""

    tree: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()

"""Text from outside, safe to print on a terminal."""

from __future__ import annotations


def plain(message: str) -> str:
    """Names and labels are other people's words: control characters in them could drive a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message)

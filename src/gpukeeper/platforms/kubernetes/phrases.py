"""Times and counts in words, for the sentences of a diagnosis."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.model.durations import in_words

LONGEST = 240  # characters of quoted text


def lasting(at: datetime, now: datetime) -> str:
    return in_words(max(now - at, timedelta()))


def ago(at: datetime, now: datetime) -> str:
    return f"{lasting(at, now)} ago"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def cut(words: str) -> str:
    plain = " ".join(words.split())
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 1] + "…"

"""Words for people: spans, sizes and times (30m, 1h30m, 7d, 5GiB), and text from outside, safe to print on a
terminal.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_HALF = 500_000  # microseconds
UTC_TIME = re.compile(r"(20\d\d-\d\d-\d\d \d\d:\d\d) UTC", re.ASCII)  # as sentences name it
SOON = "at the next pass"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_words(span: timedelta) -> str:
    """The two largest units: 9h, 1h30m, 2d4h. Never more exact than people need."""
    seconds = span.days * _DAY + span.seconds + (span.microseconds >= _HALF)  # three times as fast as round()
    if seconds < 0:
        return "-" + in_words(-span)
    if seconds < _HOUR:
        return _two_units(seconds, "m", "s", 60)
    if seconds < _DAY:
        return _two_units(seconds // _MINUTE, "h", "m", 60)
    return _two_units(seconds // _HOUR, "d", "h", 24)


@lru_cache(maxsize=16384)
def _two_units(count: int, large: str, small: str, size: int) -> str:
    """`count` of the small unit. Few different ones are ever needed: 3600, 1440, and one per hour of age."""
    whole, rest = divmod(count, size)
    if not whole:
        return f"{rest}{small}"
    return f"{whole}{large}{rest}{small}" if rest else f"{whole}{large}"


def size_in_words(size: float) -> str:
    value = float(size)
    for unit in _SIZES:
        if abs(value) < 1024 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def when_in_words(at: datetime, now: datetime) -> str:
    """ "in 2h", "3m ago"."""
    return f"in {in_words(at - now)}" if at > now else f"{in_words(now - at)} ago"


def in_local_time(words: str) -> str:
    """With the times in it in the zone of this machine: "2026-01-05 09:00 CET" of "2026-01-05 08:00 UTC"."""

    def local(found: re.Match[str]) -> str:
        try:
            return f"{datetime.fromisoformat(f'{found[1]}+00:00').astimezone():%Y-%m-%d %H:%M %Z}"
        except (ValueError, OverflowError):  # a name that only looks like a time
            return found[0]

    return UTC_TIME.sub(local, words)


def due_in_words(at: datetime, now: datetime) -> str:
    """Of an action: "at 2026-01-05 08:00 UTC (in 2h)", "at the next pass"."""
    return f"at {at:%Y-%m-%d %H:%M} UTC (in {in_words(at - now)})" if at > now else SOON


def plain(message: str) -> str:
    """Names and labels are other people's words: control characters in them could drive a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message)

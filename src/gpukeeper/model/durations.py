"""Spans and sizes in words for people: 30m, 1h30m, 7d, 5GiB."""

from __future__ import annotations

from datetime import timedelta

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_words(span: timedelta) -> str:
    """The two largest units: 9h, 1h30m, 2d4h. Never more exact than people need."""
    seconds = round(abs(span.total_seconds()))
    sign = "-" if span < timedelta() and seconds else ""
    for i, (length, unit) in enumerate(_UNITS):
        if seconds >= length:
            whole, rest = divmod(seconds, length)
            words = f"{whole}{unit}"
            if i + 1 < len(_UNITS) and rest >= _UNITS[i + 1][0]:
                words += f"{rest // _UNITS[i + 1][0]}{_UNITS[i + 1][1]}"
            return sign + words
    return "0s"


def size_in_words(size: float) -> str:
    value = float(size)
    for unit in _SIZES:
        if abs(value) < 1024 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")

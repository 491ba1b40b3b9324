"""Values with their unit in the text, read and written: 30m, 5GiB, 80%. Reading what was written gives the same value.

Every reader raises ValueError with a sentence about what to write instead.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

from gpukeeper.model import reading

LONGEST = reading.SPAN_MAX
LARGEST = 2**63 - 1
SHOWN = 200  # characters of a value in a message

_SPAN_UNITS = (
    ("d", timedelta(days=1)),
    ("h", timedelta(hours=1)),
    ("m", timedelta(minutes=1)),
    ("s", timedelta(seconds=1)),
    ("ms", timedelta(milliseconds=1)),
    ("us", timedelta(microseconds=1)),
)
_SIZE = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,9})?) ?([A-Za-z]{1,3})")
_SIZE_UNITS = {"B": 1}
_SIZE_UNITS |= {f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGTP")}
_SIZE_UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("kMGTP")}
_FACTOR = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)x")
FACTORS = (0.01, 1000)
_PERCENT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?%")


def shown(value: object) -> str:
    """A value as the reader of a message knows it from the file."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"' if len(value) <= SHOWN else f'"{value[:SHOWN]}…"'
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return str(value)


def read_span(value: object, otherwise: str = "") -> timedelta:
    """`otherwise` completes the advice: which word means "no limit" here."""
    advice = f"Write it like 30m, 2h or 7d{otherwise}."
    if value == 0 and not isinstance(value, bool):
        return timedelta()
    if isinstance(value, int | float) and not isinstance(value, bool):
        what = "is negative" if value < 0 else "has no unit"
        raise ValueError(f"{shown(value)} {what}. {advice}")
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a duration. {advice}")
    if value.startswith("-"):
        raise ValueError(f"{shown(value)} is negative. {advice}")
    try:
        return reading.span(value)
    except ValueError as problem:
        raise ValueError(f"{shown(value)} {problem}. {advice}") from None


def span_in_words(span: timedelta) -> str:
    """Exact: 1d12h, 90s as 1m30s. (`model.durations.in_words` rounds for people.)"""
    words = ""
    for unit, length in _SPAN_UNITS:
        count, span = divmod(span, length)
        words += f"{count}{unit}" if count else ""
    return words or "0s"


def is_factor(value: object) -> bool:
    return isinstance(value, str) and _FACTOR.fullmatch(value) is not None


def read_factor(value: str) -> float:
    factor, (least, most) = float(value[:-1]), FACTORS
    if not least <= factor <= most:
        raise ValueError(f"{shown(value)} is not between {least}x and {most}x. Write it like 2x or 0.5x.")
    return factor


def factor_in_words(factor: float) -> str:
    return f"{factor:.3f}".rstrip("0").rstrip(".") + "x"


def read_size(value: object) -> int:
    advice = "Write it like 500MB, 5GB or 20GiB."
    if value == 0 and not isinstance(value, bool):
        return 0
    if isinstance(value, int | float) and not isinstance(value, bool):
        what = "is negative" if value < 0 else "has no unit"
        raise ValueError(f"{shown(value)} {what}. {advice}")
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2] not in _SIZE_UNITS:
        what = "is negative" if isinstance(value, str) and value.startswith("-") else "is not a size"
        raise ValueError(f"{shown(value)} {what}. {advice}")
    size = int(Decimal(found[1]) * _SIZE_UNITS[found[2]])
    if size > LARGEST:
        raise ValueError(f"{shown(value)} is too large. {advice}")
    return size


def size_in_words(size: int) -> str:
    """Exact: the unit that divides it with the smallest figure, so 5GB stays 5GB and 20GiB stays 20GiB."""
    fitting = [(size // length, unit) for unit, length in _SIZE_UNITS.items() if size % length == 0]
    count, unit = min(fitting, key=lambda pair: pair[0]) if size else (0, "B")
    return f"{count}{unit}"


def read_percent(value: object) -> float:
    """80% as 80.0."""
    advice = "Write it like 80%."
    if isinstance(value, int | float) and not isinstance(value, bool):
        what = "is negative" if value < 0 else "has no unit"
        raise ValueError(f"{shown(value)} {what}. {advice}")
    found = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        what = "is negative" if isinstance(value, str) and value.startswith("-") else "is not a percentage"
        raise ValueError(f"{shown(value)} {what}. {advice}")
    return float(Decimal(found[1]))


def read_share(value: object) -> float:
    """80% as 0.8. More than 100% or nothing is no share of anything."""
    percent = read_percent(value)
    if not 0 < percent <= 100:
        raise ValueError(f"{shown(value)} is not above 0% and at most 100%. Write it like 80%.")
    return float(Decimal(str(percent)) / 100)


def percent_in_words(percent: float) -> str:
    return f"{Decimal(str(percent)).normalize():f}%"


def share_in_words(share: float) -> str:
    return percent_in_words(float(Decimal(str(share)) * 100))

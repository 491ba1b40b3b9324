"""Durations, times, numbers and JSON that come from outside: labels, marks, files, answers. Pure.

A label can hold any text of any length. Every reader here checks length and shape before it parses, so the cost of one
value is bounded, and raises ValueError and nothing else. The message is the end of a sentence: "is not a duration".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from types import UnionType
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, overload

import msgspec

TEXT_MAX = 64  # characters; no duration, time or number is longer
SPAN_MAX = timedelta(days=36500)
# Adding a few of the longest spans to an earlier time stays within the calendar.
LATEST = datetime(9000, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_PART = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?(us|ms|s|m|h|d|w)")
_SPAN = re.compile(rf"(?:{_PART.pattern})+")
_WHOLE = re.compile(r"[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")

T = TypeVar("T")
Moment: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]  # in JSON, one without a zone is refused
Json: TypeAlias = bytes | bytearray | str | msgspec.Raw


def span(text: str) -> timedelta:
    """30m, 1h30m, 1.5h, 7d, 0. Nothing in between is skipped."""
    if text == "0":
        return timedelta()
    if len(text) > TEXT_MAX or not _SPAN.fullmatch(text.removeprefix("-")):
        raise ValueError("is not a duration")
    if text.startswith("-"):
        raise ValueError("is negative")
    micros = sum(_micros(*part) for part in _PART.findall(text))
    if micros > SPAN_MAX // timedelta(microseconds=1):
        raise ValueError("is longer than 100 years")
    return timedelta(microseconds=micros)


def _micros(whole: str, fraction: str, unit: str) -> int:
    """In whole numbers: floats lose microseconds beyond some decades."""
    parts: int = 10 ** len(fraction)
    return (2 * int(whole + fraction) * _UNITS[unit] + parts) // (2 * parts)


def moment(text: str, *, naive_is_utc: bool = False) -> datetime:
    """RFC 3339, in UTC. A date, or a time without a zone, only where `naive_is_utc`."""
    try:
        if len(text) > TEXT_MAX:
            raise ValueError
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is not a time") from None
    if found.tzinfo is None and not naive_is_utc:
        raise ValueError("has no time zone")
    try:
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        raise ValueError("is out of range") from None
    return _in_range(found)


def local(text: str, form: str, zone: tzinfo) -> datetime:
    """A time as `strptime` reads it (without `form`: ISO 8601), in UTC. One without a zone is of `zone`, and is refused
    in the hour in which the clock is changed."""
    try:
        if len(text) > TEXT_MAX:
            raise ValueError
        found = datetime.strptime(text, form) if form else datetime.fromisoformat(text)  # noqa: DTZ007
    except ValueError:
        raise ValueError("is not a time") from None
    try:
        if found.tzinfo is None:
            found = found.replace(tzinfo=zone)
            if found.utcoffset() != found.replace(fold=1).utcoffset():
                raise ValueError("is ambiguous: the clock was changed in that hour")
        return _in_range(found.astimezone(UTC))
    except OverflowError:
        raise ValueError("is out of range") from None


def instant(seconds: float) -> datetime:
    """Seconds since 1970."""
    if not abs(seconds) < 1e12:  # NaN, too
        raise ValueError("is out of range")
    try:
        return _in_range(EPOCH + timedelta(seconds=seconds))
    except OverflowError:
        raise ValueError("is out of range") from None


def _in_range(at: datetime) -> datetime:
    if at >= LATEST:
        raise ValueError("is out of range")
    return at


def whole(text: str) -> int:
    """A number without a sign."""
    if not _WHOLE.fullmatch(text):
        raise ValueError("is not a number")
    return int(text)


def number(text: str) -> float:
    """Finite: neither NaN nor infinite."""
    if len(text) > TEXT_MAX or not _NUMBER.fullmatch(text):
        raise ValueError("is not a number")
    found = float(text)
    if abs(found) == float("inf"):
        raise ValueError("is out of range")
    return found


@overload
def decode(data: Json) -> Any: ...
@overload
def decode(data: Json, type: type[T], *, strict: bool = True) -> T: ...
@overload
def decode(data: Json, type: UnionType, *, strict: bool = True) -> Any: ...
def decode(data: Json, type: Any = Any, *, strict: bool = True) -> Any:  # noqa: A002
    """JSON. msgspec.DecodeError, a ValueError, for everything that can be wrong with it."""
    with _one_error():
        return msgspec.json.decode(data, type=type, strict=strict)


class Decoder(Generic[T]):
    """The same for many documents of one type."""

    def __init__(self, type: type[T]) -> None:  # noqa: A002
        self._decoder = msgspec.json.Decoder(type)

    def decode(self, data: Json) -> T:
        with _one_error():
            return self._decoder.decode(data)


@contextmanager
def _one_error() -> Iterator[None]:
    """msgspec lets two others through."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("JSON is malformed: it is not UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deeply") from error

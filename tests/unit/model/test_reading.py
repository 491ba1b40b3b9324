"""What comes from outside is checked by length and shape before it is parsed; ValueError is all that can happen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.model import reading

LONG = "9" * 65536


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("0", timedelta()),
        ("90s", timedelta(seconds=90)),
        ("1h30m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)),
        ("0.0000005s", timedelta(microseconds=1)),
        ("36500d", timedelta(days=36500)),
    ],
)
def test_durations(text: str, span: timedelta) -> None:
    assert reading.span(text) == span


@pytest.mark.parametrize(
    ("read", "text", "why"),
    [
        (reading.span, LONG, "is not a duration"),
        (reading.span, LONG + "h", "is not a duration"),
        (reading.span, "1h" * 40, "is not a duration"),
        (reading.span, "٣h", "is not a duration"),
        (reading.span, "-5m", "is negative"),
        (reading.span, "36501d", "is longer than 100 years"),
        (reading.span, "9" * 18 + "w", "is longer than 100 years"),
        (reading.moment, LONG, "is not a time"),
        (reading.moment, "2026-11-15T12:00:00", "has no time zone"),
        (reading.moment, "9999-12-31T23:59:59-12:00", "is out of range"),
        (reading.moment, "9999-01-01T00:00:00Z", "is out of range"),
        (reading.whole, LONG, "is not a number"),
        (reading.whole, "²", "is not a number"),
        (reading.number, LONG, "is not a number"),
        (reading.number, "1e400", "is out of range"),
        (reading.number, "nan", "is not a number"),
        (reading.number, "1_000", "is not a number"),
        (reading.instant, float("nan"), "is out of range"),
        (reading.instant, 1e300, "is out of range"),
        (reading.instant, -1e11, "is out of range"),
    ],
)
def test_what_is_refused(read: Callable[[object], object], text: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        read(text)


def test_a_time_is_in_utc_and_a_date_only_where_it_may_be() -> None:
    noon = datetime(2026, 12, 1, 12, tzinfo=UTC)
    assert reading.moment("2026-12-01T14:00:00+02:00") == noon
    assert reading.moment("2026-12-01T12:00", naive_is_utc=True) == noon
    with pytest.raises(ValueError, match="has no time zone"):
        reading.moment("2026-12-01")


@pytest.mark.parametrize("data", [b'{"x":' + b"[" * 100_000, b'{"a": "\xff"}', b"", b'{"a": 5}', b"\xff"])
def test_whatever_is_wrong_with_json_is_one_exception(data: bytes) -> None:
    class One(msgspec.Struct):
        a: str = ""

    with pytest.raises(msgspec.DecodeError):
        reading.decode(data, type=One)
    with pytest.raises(msgspec.DecodeError):
        reading.Decoder(One).decode(data)

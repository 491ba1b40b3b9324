"""A packed day is bit by bit what was stored, and a damaged one is an error."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.ledger.signals import Minute, decode, encode, minutes_packed

_SUMS = st.one_of(
    st.none(),
    st.floats(allow_nan=False),
    st.sampled_from((0.0, -0.0, 0.1 + 0.2, 0.3, 5e-324, math.inf, -math.inf, 100.0, 1.7976931348623157e308)),
)
_DAYS = st.dictionaries(st.integers(0, 1439), st.tuples(_SUMS, st.integers(1, 2**32 - 1)), min_size=1).map(
    lambda found: [(minute, *found[minute]) for minute in sorted(found)]
)


def bits(minutes: list[Minute]) -> list[tuple[int, bytes | None, int]]:
    """0.0 equals -0.0."""
    return [(at, None if total is None else struct.pack("<d", total), count) for at, total, count in minutes]


@given(_DAYS)
def test_a_day_comes_back_bit_by_bit(minutes: list[Minute]) -> None:
    stored = encode(minutes)
    assert bits(decode(stored)) == bits(minutes)
    assert minutes_packed(stored[:3]) == len(minutes)


def test_a_full_day_of_different_numbers_comes_back() -> None:
    minutes: list[Minute] = [(minute, math.sqrt(minute), 1 + minute % 3) for minute in range(1440)]
    assert bits(decode(encode(minutes))) == bits(minutes)


def test_a_quiet_day_takes_less_than_a_hundred_bytes() -> None:
    assert len(encode([(minute, 0.0, 2) for minute in range(1440)])) < 100


@given(_DAYS, st.data())
def test_a_damaged_day_is_an_error_and_never_other_numbers(minutes: list[Minute], data: st.DataObject) -> None:
    stored = bytearray(encode(minutes))
    place = data.draw(st.integers(5, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(stored))
    except ValueError:
        return
    assert bits(found) == bits(minutes), "a bit of zlib's header that decides nothing"


@pytest.mark.parametrize("length", range(0, 60, 3))
def test_a_day_that_is_cut_off_is_an_error(length: int) -> None:
    stored = encode([(minute, minute / 7, 1) for minute in range(90)])
    with pytest.raises(ValueError, match=r"."):
        decode(stored[:length])


def test_another_format_is_named() -> None:
    with pytest.raises(ValueError, match="format 9, this gpukeeper reads 1"):
        decode(b"\x09" + encode([(0, 1.0, 1)])[1:])

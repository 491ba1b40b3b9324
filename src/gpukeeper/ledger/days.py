"""The measured minutes of one series and day as one value of table `days`: exact, in columns that compress well.

Format 1: version, number of minutes, number of different sums; then, as zlib, the columns: from each minute to the
next, counts, the different sums in the order of their bits, each as the difference to the one before, and which of
them each minute has. A column has the lowest byte of every number first, then the next one: equal bytes side by side.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

Minute = tuple[int, float | None, int]
"""Minute, sum and count. Without a sum a reading of that minute was no number."""

VERSION: Final = 1
_HEAD = struct.Struct("<BHH")
_NOT_A_NUMBER = float("nan")  # stored for no sum: a sum is never NaN, SQLite makes it NULL
_STEP, _COUNT, _SUM, _PLACE = "H", "I", "Q", "H"


def encode(minutes: Sequence[Minute], begin: int = 0) -> bytes:
    """At least one minute, in order; `begin` is the first one of the day."""
    numbers, sums, counts = zip(*minutes, strict=True)
    bits = _bits(sums)
    different = sorted(set(bits))
    place = {one: number for number, one in enumerate(different)}
    columns = (
        (_STEP, _steps(numbers, begin)),
        (_COUNT, counts),
        (_SUM, _steps(different, 0)),
        (_PLACE, [place[one] for one in bits]),
    )
    body = b"".join(_column(kind, values) for kind, values in columns)
    return _HEAD.pack(VERSION, len(minutes), len(different)) + zlib.compress(body)


def decode(stored: bytes, begin: int = 0) -> list[Minute]:
    """What was encoded. ValueError: it is damaged, or of another version."""
    minutes, counts, sums, places = _columns(stored, begin)
    return list(zip(minutes, [sums[place] for place in places], counts, strict=True))


def decode_means(stored: bytes, begin: int = 0) -> list[tuple[int, float | None]]:
    """The same as means."""
    minutes, counts, sums, places = _columns(stored, begin)
    if min(counts) == max(counts):  # usually: each sum is divided once
        by_place = [None if total is None else total / counts[0] for total in sums]
        return list(zip(minutes, [by_place[place] for place in places], strict=True))
    return [(minute, None if total is None else total / count) for minute, total, count in decode(stored, begin)]


def how_many(stored: bytes) -> int:
    """How many minutes it has, from its first three bytes."""
    return int.from_bytes(stored[1:3], "little")


def _columns(stored: bytes, begin: int) -> tuple[Sequence[int], Sequence[int], Sequence[float | None], Sequence[int]]:
    """Minutes, counts, the different sums, and which of them each minute has."""
    try:
        version, minutes, different = _HEAD.unpack_from(stored)
        if version != VERSION:
            raise ValueError(f"format {version}, this gpukeeper reads {VERSION}")
        body, parts = zlib.decompress(stored[_HEAD.size :]), []
        for kind, length in ((_STEP, minutes), (_COUNT, minutes), (_SUM, different), (_PLACE, minutes)):
            size = length * struct.calcsize(f"<{kind}")
            parts.append(_numbers(kind, body[:size], length))
            body = body[size:]
    except (struct.error, zlib.error) as error:
        raise ValueError(str(error)) from None
    steps, counts, sum_steps, places = parts
    if not minutes or max(places) >= different:
        raise ValueError("its columns do not fit together")
    return tuple(accumulate((begin + steps[0], *steps[1:]))), counts, _sums(tuple(accumulate(sum_steps))), places


def _bits(sums: Sequence[float | None]) -> tuple[int, ...]:
    """Bits and not values: -0.0 equals 0.0, and NaN not even itself."""
    numbers = (_NOT_A_NUMBER if one is None else one for one in sums)
    return struct.unpack(f"<{len(sums)}Q", struct.pack(f"<{len(sums)}d", *numbers))


def _sums(bits: Sequence[int]) -> list[float | None]:
    numbers = struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}Q", *bits))
    return [one if one == one else None for one in numbers]  # noqa: PLR0124  NaN


def _steps(rising: Sequence[int], begin: int) -> Iterator[int]:
    return (after - before for before, after in pairwise((begin, *rising)))


def _column(kind: str, values: Sequence[int] | Iterator[int]) -> bytes:
    numbers = tuple(values)
    raw, width = struct.pack(f"<{len(numbers)}{kind}", *numbers), struct.calcsize(f"<{kind}")
    return b"".join(raw[byte::width] for byte in range(width))


def _numbers(kind: str, column: bytes, length: int) -> tuple[int, ...]:
    raw, width = bytearray(len(column)), struct.calcsize(f"<{kind}")
    for byte in range(width):
        raw[byte::width] = column[byte * length : (byte + 1) * length]
    return struct.unpack(f"<{length}{kind}", raw)

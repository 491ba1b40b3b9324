"""Lines that must be refused: forged, contradicting, too many, too large."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest

from gpukeeper.acceptance.fleet.collect import (
    DIFFERENT_MAX,
    FRAME_MARK,
    FRAME_VERSION,
    REPORT_MAX,
    Decoded,
    _checksum,
    decode_frames,
    encode_frames,
)

RUN, NODE = "r-1", "gpu-1"


def line(part: int, total: int, data: str, digest: str, *, run: str = RUN, node: str = NODE) -> str:
    """A line with a correct checksum: what a program could write that knows the format."""
    head = f"{FRAME_MARK} {FRAME_VERSION} {run} {node} {part}/{total} {digest}"
    return f"{head} {_checksum(head, data)} {data}"


def packed(report: bytes) -> str:
    return base64.b64encode(zlib.compress(report)).decode()


def digest(report: bytes) -> str:
    return hashlib.sha256(report).hexdigest()


def read(*lines: str) -> Decoded:
    return decode_frames("\n".join(lines).encode(), RUN, NODE)


def test_a_line_that_fits_is_read() -> None:
    assert read(line(1, 1, packed(b"words"), digest(b"words"))).reports == (b"words",)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(1, 1, packed(b"other"), digest(b"words"))], "its contents do not match its digest"),
        ([line(1, 1, "AAAA", digest(b"words"))], "it cannot be unpacked"),
        ([line(1, 1, "A", digest(b"words"))], "it cannot be unpacked"),
        ([line(1, 1, base64.b64encode(zlib.compress(b"w") + b"x").decode(), digest(b"w"))], "something follows it"),
        ([line(2, 1, packed(b"words"), digest(b"words"))], "the impossible number 2/1"),
        ([line(0, 1, packed(b"words"), digest(b"words"))], "the impossible number 0/1"),
        ([line(1, 9999, packed(b"words"), digest(b"words"))], "the impossible number 1/9999"),
        ([line(1, 2, "AAAA", "0" * 64), line(1, 3, "AAAA", "0" * 64)], "do not agree on their number: 3 and 2"),
        ([line(1, 2, "AAAA", "0" * 64), line(1, 2, "BBBB", "0" * 64)], "twice, with different contents"),
        ([line(1, 1, packed(b"words"), digest(b"words"))[:-1]], "its checksum does not match"),
        ([f"{FRAME_MARK} 2 something else"], "a line of a report is damaged"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(lines: list[str], said: str) -> None:
    found = read(*lines)
    assert found.reports == ()
    assert any(said in problem for problem in found.problems), found.problems


def test_a_small_text_that_unpacks_to_a_huge_one_is_refused() -> None:
    bomb = packed(bytes(REPORT_MAX + 1))
    parts = [bomb[start : start + 6000] for start in range(0, len(bomb), 6000)]
    found = read(*(line(n, len(parts), data, "0" * 64) for n, data in enumerate(parts, start=1)))
    assert found.reports == ()
    assert f"it is larger than {REPORT_MAX:,} bytes when unpacked" in found.problems[0]


def test_a_report_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ValueError, match="is larger than"):
        encode_frames(bytes(REPORT_MAX + 1), RUN, NODE)


def test_two_reports_of_a_node_that_started_again_are_both_read() -> None:
    lines = [*encode_frames(b"first", RUN, NODE), *encode_frames(b"second", RUN, NODE)]
    assert read(*lines).reports == (b"first", b"second")


def test_many_different_reports_are_not_kept() -> None:
    many = [encode_frames(str(number).encode(), RUN, NODE)[0] for number in range(50)]
    found = read(*many)
    assert len(found.reports) == DIFFERENT_MAX
    assert found.problems == (f"the log has more than {DIFFERENT_MAX} different reports of this node (42 times)",)

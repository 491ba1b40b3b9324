"""A report as lines of a log: whatever happens to the log, what is read is what was sent, or nothing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.acceptance.fleet.collect import FRAME_COPIES, FRAME_MAX, FrameReader, decode_frames, encode_frames
from tests.effort import examples

RUN, NODE = "20261117-010203-ab12", "gpu-7"
reports = st.binary(max_size=60_000)
names = st.text(min_size=1, max_size=300)


def printed(report: bytes, run: str = RUN, node: str = NODE) -> bytes:
    return ("\n".join(encode_frames(report, run, node)) + "\n").encode()


def noisy(lines: list[bytes], rng: random.Random) -> bytes:
    """As engines show them: with a time or a name in front, between other output, with other ends of lines."""
    made = []
    for line in lines:
        if rng.random() < 0.3:
            made.append(rng.choice((b"[COMPUTE] PASS GPU 0", b"", b"\xff\xfe", b"GPUKEEPER-REPORT", rng.randbytes(40))))
        made.append(rng.choice((b"", b"2026-11-17T01:02:03.4Z ", b"(accept pid=7) ", b"[job/x/y] ")) + line)
    return rng.choice((b"\n", b"\r\n")).join(made)


@given(reports, names, st.integers(0, 9))
@examples(0.5)
def test_what_was_sent_is_read(report: bytes, node: str, seed: int) -> None:
    lines = encode_frames(report, RUN, node)
    assert all(len(line) <= FRAME_MAX and line.isascii() for line in lines)
    log = noisy([line.encode() for line in lines], random.Random(seed))
    assert decode_frames(log, RUN, node).reports == (report,)


@given(st.binary(min_size=9000, max_size=60_000), st.data())
@examples(0.5)
def test_a_cut_log_has_each_part_once_while_half_of_it_is_there(report: bytes, data: st.DataObject) -> None:
    """Cut at any byte, at both ends, as long as what is left is as long as one of the two sets and a line."""
    log = printed(random.Random(report).randbytes(40_000))
    kept = len(log) // 2 + FRAME_MAX
    start = data.draw(st.integers(0, len(log) - kept))
    found = decode_frames(log[start : start + kept], RUN, NODE)
    assert len(found.reports) == 1
    assert found.missing == ()


@given(st.integers(0, 10**6))
def test_missing_parts_are_named_and_asked_for_again(seed: int) -> None:
    rng = random.Random(seed)
    report = rng.randbytes(rng.randrange(5_000, 60_000))
    lines = [line.encode() for line in encode_frames(report, RUN, NODE)]
    total = len(lines) // FRAME_COPIES
    lost = set(rng.sample(range(total), rng.randrange(1, total + 1)))
    reader = FrameReader(RUN, NODE)
    reader.feed(b"\n".join(line for place, line in enumerate(lines) if place % total not in lost))
    first = reader.result()
    assert first.reports == ()
    if len(lost) < total:
        assert first.missing == tuple(sorted(one + 1 for one in lost))
    reader.feed(b"\n".join(lines[place] for place in lost))
    assert reader.result().reports == (report,)


@given(reports, st.integers(0, 10**6))
def test_a_damaged_log_gives_the_report_or_nothing(report: bytes, seed: int) -> None:
    rng = random.Random(seed)
    log = bytearray(printed(report))
    for _ in range(rng.choice((1, 3, 30))):
        at = rng.randrange(len(log))
        log[at : at + rng.choice((1, 1, 5000))] = rng.choice((b"", b"\n", b"=", bytes([rng.randrange(256)])))
        if not log:
            break
    assert set(decode_frames(bytes(log), RUN, NODE).reports) <= {report}


@given(reports, reports)
@examples(0.4)
def test_another_run_and_another_node_never_count(report: bytes, other: bytes) -> None:
    strange = printed(other, run="another") + printed(other, node="gpu-8")
    found = decode_frames(strange + printed(report), RUN, NODE)
    assert found.reports == (report,)
    assert [words.partition(" (")[0] for words in found.problems] == [
        f"a line belongs to run another, not to {RUN}",
        "a line belongs to node gpu-8, not to gpu-7",
    ]
    alone = decode_frames(strange, RUN, NODE)
    assert (alone.reports, alone.total) == ((), 0)

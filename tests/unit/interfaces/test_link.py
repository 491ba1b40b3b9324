"""Frames between the daemon and its web process."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import LARGEST_QUESTION, Credentials, Question, frame, read_frame

QUESTION = Question(id=7, credentials=Credentials(secret="s", address="a"), request=Request(verb="whoami"))


def read(data: bytes, largest: int = LARGEST_QUESTION) -> list[Question | None]:
    async def do() -> list[Question | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found = [await read_frame(reader, Question, largest)]
        while found[-1] is not None:
            found.append(await read_frame(reader, Question, largest))
        return found

    return asyncio.run(do())


def test_frames_follow_each_other_until_the_end() -> None:
    assert read(frame(QUESTION) * 2) == [QUESTION, QUESTION, None]


def test_a_frame_that_is_cut_off_is_the_end() -> None:
    whole = frame(QUESTION)
    for size in range(len(whole)):
        assert read(whole[:size]) == [None]


DEEP = b'{"type":"question","request":{"verb":"try","described":' + b'{"a":' * 20_000


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        frame("words"),
        frame({"type": "question"}),
        b"\0\0\0\1\xc1",
        pytest.param(len(DEEP).to_bytes(4, "big") + DEEP, id="nested too deeply"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(data)

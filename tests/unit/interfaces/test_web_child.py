"""What a web process that was taken over can do to the daemon: neither end it nor use up its memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.daemon.web import OPEN_MAX, WebChild
from gpukeeper.interfaces.link import (
    Answer,
    Credentials,
    Person,
    Question,
    Revocations,
    Welcome,
    frame,
    new_revocations,
    read_frame,
)

WRITES: dict[str, Callable[[int], object]] = {
    "shorten": lambda descriptor: os.ftruncate(descriptor, 0),
    "lengthen": lambda descriptor: os.ftruncate(descriptor, 4096),
    "write": lambda descriptor: os.pwrite(descriptor, b"\1", 0),
    "map": lambda descriptor: mmap.mmap(descriptor, 8),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("again", [False, True], ids=["as inherited", "opened again"])
def test_the_web_process_cannot_change_the_shared_memory(write: str, again: bool) -> None:
    ours = new_revocations()
    theirs = os.dup(ours.descriptor)
    if again:  # who owns the file may also change its mode
        path = Path(f"/proc/self/fd/{theirs}")
        path.chmod(0o600)
        theirs = os.open(path, os.O_RDWR)
    with pytest.raises(OSError, match=r"."):
        WRITES[write](theirs)
    ours.increase()
    assert (ours.count, Revocations(ours.descriptor).count) == (1, 1)


class SlowBackend:
    """Answers nothing until it may."""

    revocations = None

    def __init__(self) -> None:
        self.may, self.full, self.asked = asyncio.Event(), asyncio.Event(), 0

    async def welcome(self) -> Welcome:
        return Welcome(machine="m", version="0", key=b"k", anonymous=True, session_seconds=1)

    async def publish(self, send: Any) -> None:
        await asyncio.Event().wait()

    async def answer(self, question: Question) -> Answer:
        self.asked += 1
        if self.asked == OPEN_MAX:
            self.full.set()
        await self.may.wait()
        return Answer(id=question.id, person=Person(), done=True, words="")


def test_more_questions_than_can_be_answered_are_not_read() -> None:
    many = 10 * OPEN_MAX

    async def story() -> tuple[int, list[int]]:
        backend, (ours, theirs) = SlowBackend(), socket.socketpair()
        child: Any = WebChild(backend, theirs, lambda line: None)  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection(sock=theirs)
        talking = asyncio.create_task(child._talk(*await asyncio.open_connection(sock=ours)))
        assert await read_frame(reader, Welcome, 1 << 20) is not None
        for number in range(many):
            asked = Question(id=number, credentials=Credentials(), request=Request(verb="whoami", reason="x" * 100))
            writer.write(frame(asked))
        await backend.full.wait()
        for _ in range(1000):  # time enough to read on
            await asyncio.sleep(0)
        open_at_most = backend.asked
        backend.may.set()
        answers = [await read_frame(reader, Answer, 1 << 20) for _ in range(many)]
        writer.close()
        await talking
        return open_at_most, sorted(one.id for one in answers if one is not None)

    assert asyncio.run(story()) == (OPEN_MAX, list(range(many)))

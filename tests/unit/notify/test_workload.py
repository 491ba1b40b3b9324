"""The workload itself as a channel: its own platform is asked, and only while it exists."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Delivered, Message, MessageKind, NotDelivered
from gpukeeper.model.subject import Subject
from gpukeeper.notify.terminals import InsideWorkload
from gpukeeper.platforms.docker.translate import container_subject
from tests.unit.platforms.docker.examples import AT, container, facts

SUBJECT = container_subject(container(), facts(), AT)


class Place:
    def __init__(self, name: str, place: str, answer: bool | PlatformError) -> None:
        self.name, self.place, self.answer = name, place, answer
        self.asked: list[str] = []

    async def notify(self, subject: Subject, message: str) -> bool:
        self.asked.append(message)
        if isinstance(self.answer, PlatformError):
            raise self.answer
        return self.answer


def sent(subject: Subject | None, *places: Place) -> Delivered | NotDelivered:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    message = Message(kind=MessageKind.WARNING, about="x", text="idle", at=at, subject=subject)
    return asyncio.run(InsideWorkload(places).send(message))


def here(answer: bool | PlatformError) -> Place:
    return Place(SUBJECT.ref.platform, SUBJECT.ref.place, answer)


def test_only_its_own_platform_is_queried() -> None:
    own, other = here(True), Place("docker", "elsewhere", True)
    assert sent(SUBJECT, other, own) == Delivered()
    assert (own.asked, other.asked) == (["idle"], [])
    assert isinstance(sent(SUBJECT, other), NotDelivered)


def test_no_terminal_inside_is_not_delivered() -> None:
    assert isinstance(sent(SUBJECT, here(False)), NotDelivered)
    assert sent(SUBJECT, here(PlatformError("it is silent"))) == NotDelivered("it is silent")


def test_what_is_gone_has_nobody_inside() -> None:
    own = here(True)
    assert isinstance(sent(None, own), NotDelivered)
    assert own.asked == []

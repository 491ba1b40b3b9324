"""The workload itself, as a channel for owners: its platform writes to the terminals inside, where it has a way in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.message import Delivered, Message, NotDelivered
from gpukeeper.model.subject import Subject


class PlatformTerminals(Protocol):
    """What this needs of a platform."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    async def notify(self, subject: Subject, message: str) -> bool: ...


class InsideWorkload:
    name = "workload"

    def __init__(self, places: Sequence[PlatformTerminals]) -> None:
        self._places = places

    async def send(self, message: Message) -> Delivered | NotDelivered:
        subject = message.subject
        if subject is None:
            return NotDelivered("it does not exist any more")
        ref = subject.ref
        place = next((one for one in self._places if (one.name, one.place) == (ref.platform, ref.place)), None)
        if place is None:
            return NotDelivered(f"{ref.platform}/{ref.place} is not reachable from here")
        try:
            taken = await place.notify(subject, message.text)
        except PlatformError as error:
            return NotDelivered(str(error))
        return Delivered() if taken else NotDelivered("no terminal inside it accepted the message")

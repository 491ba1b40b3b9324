"""What a channel is. It sends; recipients, repetition and consequences are decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gpukeeper.model.message import Delivered, Message, NotDelivered


class Channel(Protocol):
    @property
    def name(self) -> str: ...
    async def send(self, message: Message) -> Delivered | NotDelivered:
        """Never answers Delivered unless it was. May take as long as it needs: the sender has a deadline."""
        ...


class ChannelKind(Protocol):
    """A kind of channel for admins, as the policy names it: `notify: {admins: [{NAME: WORDS}]}`."""

    @property
    def example(self) -> str:
        """Its words, as a policy would have them."""
        ...

    def problem(self, words: Sequence[str]) -> str | None:
        """Why these words cannot be used, as a sentence that repeats none of them that may be secret."""
        ...

    def shown(self, words: Sequence[str]) -> str:
        """The same words without secrets."""
        ...

    def make(self, words: Sequence[str], log: Callable[[str], None]) -> Channel: ...

"""What a channel is, and every channel, in the order of use. A channel that is not listed here does not exist. The
log of the daemon is the simplest one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, Protocol

from gpukeeper.model.policy import Notify
from gpukeeper.model.ports import Delivered, Message, MessageKind, NotDelivered
from gpukeeper.model.words import in_words
from gpukeeper.notify.apprise import Apprise, AppriseKind, OwnerAppriseKind
from gpukeeper.notify.command import AddressBook, Command, CommandKind
from gpukeeper.notify.terminals import InsideWorkload, PlatformTerminals, Terminals


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


class Log:
    name = "log"

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    async def send(self, message: Message) -> Delivered:
        if message.kind is not MessageKind.FAILURE:  # logged where it happens, also when the ledger cannot be written
            self._log(f"{message.kind}: {message.text}")
        return Delivered()


CHECKED_WITHIN = timedelta(seconds=30)

# By the name that the policy uses.
ADMIN_KINDS: Final[Mapping[str, ChannelKind]] = {
    "command": CommandKind(),
    "apprise": AppriseKind(),
}
OWNER_KINDS: Final[Mapping[str, ChannelKind]] = {
    "apprise": OwnerAppriseKind(),
}


def owner_channels(places: Sequence[PlatformTerminals]) -> tuple[Channel, ...]:
    return (InsideWorkload(places), Terminals())


def owner_services(settings: Notify) -> tuple[Channel, ...]:
    """Mail and chat, as configured."""
    command = settings.address_command
    book = AddressBook(settings.addresses, settings.address, () if command is None else command.words)
    return tuple(Apprise(one.words[0], book) for one in settings.owners)


def admin_channels(settings: Notify, log: Callable[[str], None]) -> tuple[Channel, ...]:
    """The log always; the others as configured."""
    return (Log(log), *(ADMIN_KINDS[one.kind].make(one.words, log) for one in settings.admins))


async def channel_problem(channel: Channel) -> str | None:
    """Why it could not send, as far as that is known without sending."""
    if not isinstance(channel, Command | Apprise):
        return None
    try:
        async with asyncio.timeout(CHECKED_WITHIN.total_seconds()):
            return await channel.problem()
    except TimeoutError:
        return f"the check timed out after {in_words(CHECKED_WITHIN)}"
    finally:
        if isinstance(channel, Apprise):
            await channel.close()

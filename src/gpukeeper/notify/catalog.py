"""Every channel, in the order of use. A channel that is not listed here does not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from gpukeeper.model.durations import in_words
from gpukeeper.model.policy import Notify
from gpukeeper.notify.addresses import AddressBook
from gpukeeper.notify.apprise import Apprise, AppriseKind, OwnerAppriseKind
from gpukeeper.notify.channel import Channel, ChannelKind
from gpukeeper.notify.command import Command, CommandKind
from gpukeeper.notify.log import Log
from gpukeeper.notify.terminals import Terminals
from gpukeeper.notify.workload import InsideWorkload, PlatformTerminals

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

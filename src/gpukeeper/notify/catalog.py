"""Every channel, in the order of use. A channel that is not listed here does not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpukeeper.model.policy import Notify
from gpukeeper.notify.channel import Channel, ChannelKind
from gpukeeper.notify.command import CommandKind
from gpukeeper.notify.log import Log
from gpukeeper.notify.terminals import Terminals
from gpukeeper.notify.workload import InsideWorkload, PlatformTerminals

# By the name that the policy uses.
ADMIN_KINDS: Final[Mapping[str, ChannelKind]] = {
    "command": CommandKind(),
}


def owner_channels(places: Sequence[PlatformTerminals]) -> tuple[Channel, ...]:
    return (InsideWorkload(places), Terminals())


def admin_channels(settings: Notify, log: Callable[[str], None]) -> tuple[Channel, ...]:
    """The log always; the others as configured."""
    return (Log(log), *(ADMIN_KINDS[one.kind].make(one.words, log) for one in settings.admins))

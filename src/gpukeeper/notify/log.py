"""The log of the daemon, as a channel for admins."""

from __future__ import annotations

from collections.abc import Callable

from gpukeeper.model.message import Delivered, Message, MessageKind


class Log:
    name = "log"

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    async def send(self, message: Message) -> Delivered:
        if message.kind is not MessageKind.FAILURE:  # logged where it happens, also when the ledger cannot be written
            self._log(f"{message.kind}: {message.text}")
        return Delivered()

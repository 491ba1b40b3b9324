"""Writes to the terminals of one user on this machine. No file is made anywhere.

A terminal is the user's when its device belongs to the user's uid. Writing never blocks: a terminal that is stopped
or full does not get the message, and this is reported.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from gpukeeper.blocking import in_thread
from gpukeeper.model.message import Delivered, Message, NotDelivered
from gpukeeper.model.printable import plain

DEADLINE = timedelta(seconds=5)
PTS = Path("/dev/pts")
TERMINAL_MAJORS = range(136, 144)  # Unix98 pseudo terminals


class Terminals:
    name = "terminal"

    def __init__(self, devices: Path = PTS) -> None:
        self._devices = devices

    async def send(self, message: Message) -> Delivered | NotDelivered:
        """Delivered when at least one terminal took the message."""
        owner = message.owner
        if owner is None:
            return NotDelivered("its owner is unknown")
        try:
            return await in_thread(lambda: self._send(owner, message.text), DEADLINE)
        except TimeoutError:
            return NotDelivered("the user directory does not respond")

    def _send(self, owner: str, message: str) -> Delivered | NotDelivered:
        try:
            uid = pwd.getpwnam(owner).pw_uid
        except KeyError:
            return NotDelivered(f"{owner} is not a user of this machine")
        text = as_written(message)
        taken = sum(_write(path, uid, text) for path in self._terminals())  # every terminal, not only the first
        return Delivered() if taken else NotDelivered(f"no terminal of {owner} accepted the message")

    def _terminals(self) -> Iterator[Path]:
        try:
            yield from (path for path in self._devices.iterdir() if path.name.isdigit())
        except OSError:
            return


def as_written(message: str) -> bytes:
    """One line with a bell, on a line of its own, whatever is on the screen."""
    return f"\r\n\a[gpukeeper] {plain(message)}\r\n".encode()


def _write(path: Path, uid: int, text: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Checked on the opened file: the name may have got another owner in the meantime.
        facts = os.fstat(fd)
        if facts.st_uid != uid or not stat.S_ISCHR(facts.st_mode) or os.major(facts.st_rdev) not in TERMINAL_MAJORS:
            return False
        return os.write(fd, text) == len(text)
    except OSError:
        return False
    finally:
        os.close(fd)

"""Terminals as channels: those of one user on this machine, and those inside a workload. No file is made anywhere.

Writing never blocks: a terminal that is stopped or full does not get the message, and this is reported. One inside a
workload is reached through what its process has open, never by a name inside: a planted link would be followed.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from gpukeeper.blocking import in_thread
from gpukeeper.devices.counters import TERMINAL_MAJORS
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Delivered, Message, NotDelivered
from gpukeeper.model.subject import Subject
from gpukeeper.model.words import plain

DEADLINE = timedelta(seconds=5)
PTS = Path("/dev/pts")


class Terminals:
    """A terminal is the user's when its device belongs to the user's uid."""

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


STANDARD = (0, 1, 2)  # input, output, errors: where a person sits


def notify_inside(pids: Sequence[int], message: str, proc: str = "/proc") -> int:
    """How many terminals took the whole message. Never blocks: one that is full or stopped does not get it.

    A terminal is reached through what the process itself has open, never by a name inside the workload: a link
    planted there would be followed on the host. Whose processes these are is the caller's business.
    """
    text = as_written(message)
    notified: set[tuple[int, int, int]] = set()
    taken = 0
    for pid in pids:
        for number in STANDARD:
            taken += _write_inside(f"{proc}/{pid}/fd/{number}", text, notified)
    return taken


def _write_inside(path: str, text: bytes, notified: set[tuple[int, int, int]]) -> bool:
    try:
        # Checked before opening, too: opening some devices acts on them.
        if not _is_terminal(os.stat(path)):  # noqa: PTH116 - a link of /proc, resolved by the kernel
            return False
        fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        facts = os.fstat(fd)
        # Every workload may have terminals of its own with the same number; the filesystem distinguishes them.
        terminal = (facts.st_dev, facts.st_ino, facts.st_rdev)
        if terminal in notified or not _is_terminal(facts) or not os.isatty(fd):
            return False
        notified.add(terminal)
        return os.write(fd, text) == len(text)
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_terminal(facts: os.stat_result) -> bool:
    return stat.S_ISCHR(facts.st_mode) and os.major(facts.st_rdev) in TERMINAL_MAJORS


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

"""A program as a channel for admins: it gets the message on stdin and brings it to mail, chat or a pager.

Run without a shell, as the user of the daemon, with a small environment. A program that others could change is not run:
it would give them the rights of the daemon.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from gpukeeper.ledger.trust import why_untrusted
from gpukeeper.model.message import Delivered, Message, NotDelivered
from gpukeeper.model.printable import plain

PASSED_ON = ("HOME", "LANG")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMPLAINT_MAX = 4096  # bytes of stderr that are read
COMPLAINT_SHOWN = 200  # characters


class CommandKind:
    example = "[/usr/local/bin/notify-admins, --channel, gpu]"

    def problem(self, words: Sequence[str]) -> str | None:
        if not words or not PurePosixPath(words[0]).is_absolute() or ".." in PurePosixPath(words[0]).parts:
            return f"a command begins with the absolute path of a program. Write it like {self.example}."
        return "a command must not contain a NUL byte." if any("\0" in word for word in words) else None

    def shown(self, words: Sequence[str]) -> str:
        more = len(words) - 1
        return f"{words[0]} ({more} argument{'s' if more > 1 else ''} not shown)" if more else words[0]

    def make(self, words: Sequence[str], log: Callable[[str], None]) -> Command:
        return Command(words)


class Command:
    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self.name = f"command {words[0]}"

    async def send(self, message: Message) -> Delivered | NotDelivered:
        untrusted = await asyncio.to_thread(why_untrusted, Path(self._words[0]))
        if untrusted is not None:
            return NotDelivered(f"it was not run: {untrusted}")
        complaint = os.memfd_create("complaint")  # not a pipe: a child that it leaves behind cannot keep us waiting
        try:
            status = await self._run(message, complaint)
            said = os.pread(complaint, COMPLAINT_MAX, 0)
        except OSError as error:
            return NotDelivered(f"it cannot be started: {error.strerror or error}")
        finally:
            os.close(complaint)
        return Delivered() if status == 0 else NotDelivered(f"it ended with {status}: {_last_line(said)}")

    async def _run(self, message: Message, complaint: int) -> int:
        running = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=complaint,
            env=_environ(message),
            cwd="/",
            start_new_session=True,
        )
        try:
            await running.communicate(f"{plain(message.text)}\n".encode())
        finally:
            if running.returncode is None:  # the deadline is over
                os.killpg(running.pid, signal.SIGKILL)
                await running.wait()
        return running.returncode or 0


def _environ(message: Message) -> dict[str, str]:
    own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**own, "PATH": PATH, "GPUKEEPER_KIND": message.kind.value, "GPUKEEPER_ABOUT": plain(message.about)}


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    return plain(lines[-1])[:COMPLAINT_SHOWN] if lines else "no message"

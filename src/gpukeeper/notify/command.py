"""A program as a channel for admins: it gets the message on stdin and brings it to mail, chat or a pager.

Run without a shell, as the user of the daemon, with a small environment. A program that others could change is not run:
it would give them the rights of the daemon.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from gpukeeper.ledger.trust import why_untrusted
from gpukeeper.model.message import Delivered, Message, NotDelivered
from gpukeeper.model.printable import plain

PASSED_ON = ("HOME", "LANG")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STDERR_KEPT = 64 * 1024  # bytes
STDERR_MAX = 1024 * 1024  # bytes; a program that writes more is ended
LINE_SHOWN = 200  # characters


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

    async def problem(self) -> str | None:
        """Why it would not be run."""
        program = Path(self._words[0])
        untrusted = await asyncio.to_thread(why_untrusted, program)
        if untrusted is not None:
            return f"it is not run: {untrusted}"
        runs = await asyncio.to_thread(os.access, program, os.X_OK)
        return None if runs else "it does not exist or cannot be executed"

    async def send(self, message: Message) -> Delivered | NotDelivered:
        untrusted = await asyncio.to_thread(why_untrusted, Path(self._words[0]))
        if untrusted is not None:
            return NotDelivered(f"it was not run: {untrusted}")
        stderr = StderrTail()
        try:
            status = await self._run(message, stderr)
        except OSError as error:
            return NotDelivered(f"it cannot be started: {error.strerror or error}")
        finally:
            stderr.close()
        if stderr.too_much:
            return NotDelivered(f"it was ended, because it wrote more than {STDERR_MAX // 1024} KiB to stderr")
        return Delivered() if status == 0 else NotDelivered(f"it ended with {status}: {_last_line(stderr.kept)}")

    async def _run(self, message: Message, stderr: StderrTail) -> int:
        starting = asyncio.create_task(self._start(message, stderr.writing))
        try:
            running = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the deadline is over, and it may have children already
            with suppress(OSError):
                await _end(await starting)
            raise
        stderr.read_until_closed(lambda: _kill(running))
        try:
            words = f"{message.text} {message.link}" if message.link else message.text
            await running.communicate(f"{plain(words)}\n".encode())
        finally:
            await _end(running)  # the deadline is over, if it still runs
        return running.returncode or 0

    async def _start(self, message: Message, stderr: int) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env=_environ(message),
            cwd="/",
            start_new_session=True,
        )


class StderrTail:
    """The end of what a program writes to stderr. Read while it runs, so that it never waits for us, and up to a limit,
    after which the program is ended. Its exit is what we wait for, not the end of the pipe: a child that it leaves
    behind may keep that open.
    """

    def __init__(self) -> None:
        self.kept = b""
        self.too_much = False
        self._read = 0
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._writing_is_open = True

    def read_until_closed(self, end: Callable[[], None]) -> None:
        self._close_writing()
        asyncio.get_running_loop().add_reader(self._reading, self._take, end)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reading)
        while not self.too_much and self._take(lambda: None):
            pass  # what it wrote last
        self._close_writing()
        os.close(self._reading)

    def _take(self, end: Callable[[], None]) -> bool:
        """False: nothing is there now."""
        try:
            some = os.read(self._reading, STDERR_KEPT)
        except BlockingIOError:
            return False
        if not some:
            asyncio.get_running_loop().remove_reader(self._reading)
            return False
        self.kept = (self.kept + some)[-STDERR_KEPT:]
        self._read += len(some)
        if self._read > STDERR_MAX and not self.too_much:
            self.too_much = True
            asyncio.get_running_loop().remove_reader(self._reading)
            end()
        return True

    def _close_writing(self) -> None:
        if self._writing_is_open:
            self._writing_is_open = False
            os.close(self.writing)


async def _end(running: Process) -> None:
    if running.returncode is None:
        _kill(running)
        await running.wait()


def _kill(running: Process) -> None:
    """With its children."""
    if running.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def _environ(message: Message) -> dict[str, str]:
    own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**own, "PATH": PATH, "GPUKEEPER_KIND": message.kind.value, "GPUKEEPER_ABOUT": plain(message.about)}


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return plain(lines[-1])[:LINE_SHOWN] if lines else "no message"

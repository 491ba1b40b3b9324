"""Programs of a site: one as a channel for admins, which brings a message to mail, chat or a pager; one that knows
the addresses of owners, for channels that need one (else from a map or a template).

Names of owners are untrusted input: users who may set a label choose them. A name becomes part of an address, or an
argument of a program, only if it consists of harmless characters; the result is checked again.
"""

from __future__ import annotations

import asyncio
import os
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePosixPath

from gpukeeper.ledger.files import why_untrusted
from gpukeeper.model.ports import Delivered, Message, NotDelivered
from gpukeeper.model.words import in_words, plain
from gpukeeper.processes import KEPT, Tail, kill_group, last_line, read_at_most, running

PASSED_ON = ("HOME", "LANG")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
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
        why = plain(last_line(stderr.kept))[:LINE_SHOWN] or "no message"
        return Delivered() if status == 0 else NotDelivered(f"it ended with {status}: {why}")

    async def _run(self, message: Message, stderr: StderrTail) -> int:
        environ = _environ(message)
        async with running(
            *self._words, stdin=PIPE, stdout=DEVNULL, stderr=stderr.writing, env=environ, cwd="/"
        ) as program:
            stderr.read_until_closed(lambda: kill_group(program))
            words = f"{message.text} {message.link}" if message.link else message.text
            await program.communicate(f"{plain(words)}\n".encode())
        return program.returncode or 0


class StderrTail(Tail):
    """Read while it runs, so that it never waits for us, and up to a limit,
    after which the program is ended. Its exit is what we wait for, not the end of the pipe: a child that it leaves
    behind may keep that open.
    """

    def __init__(self) -> None:
        super().__init__()
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
            some = os.read(self._reading, KEPT)
        except BlockingIOError:
            return False
        if not some:
            asyncio.get_running_loop().remove_reader(self._reading)
            return False
        self.add(some)
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


def _environ(message: Message) -> dict[str, str]:
    own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**own, "PATH": PATH, "GPUKEEPER_KIND": message.kind.value, "GPUKEEPER_ABOUT": plain(message.about)}


REPLY_TIME = timedelta(seconds=5)
FOUND_FOR, FAILED_FOR = timedelta(hours=1), timedelta(minutes=5)
ADDRESSES_KEPT = 1000  # owners
OUTPUT_MAX = 4096  # bytes
# No comma, semicolon, space, percent sign or control character: services take those as the end of an address.
ADDRESS = re.compile(r"[A-Za-z0-9@#_][A-Za-z0-9@#._+=-]{0,253}", re.ASCII)
OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}", re.ASCII)
TEMPLATE_FIELD = "{owner}"


def problem_of_address(address: str) -> str | None:
    if ADDRESS.fullmatch(address):
        return None
    return "an address has up to 254 letters, digits and the characters @ # . _ + = -"


def problem_of_template(template: str) -> str | None:
    if template.count(TEMPLATE_FIELD) != 1:
        return f"it must contain {TEMPLATE_FIELD} once"
    return problem_of_address(template.replace(TEMPLATE_FIELD, "ann"))


class AddressBook:
    def __init__(
        self, known: Mapping[str, str] | None = None, template: str | None = None, command: Sequence[str] = ()
    ) -> None:
        self._known = known or {}
        self._template = template
        self._command = tuple(command)
        self._cache: dict[str, tuple[float, str | NotDelivered]] = {}  # by owner: valid until

    async def of(self, owner: str | None) -> str | NotDelivered:
        if owner is None:
            return _no_address("its owner is unknown")
        if owner in self._known:
            return self._known[owner]
        if not self._template and not self._command:
            return _no_address("no address of this owner is configured (notify.addresses)")
        if not OWNER.fullmatch(owner):
            return _no_address("the owner's name contains characters that are not used in an address")
        if self._template:
            return _checked_address(self._template.replace(TEMPLATE_FIELD, owner))
        return await self._looked_up(owner)

    async def _looked_up(self, owner: str) -> str | NotDelivered:
        now = asyncio.get_running_loop().time()
        cached = self._cache.get(owner)
        if cached is not None and now < cached[0]:
            return cached[1]
        found = await self._ask(owner)
        valid = FAILED_FOR if isinstance(found, NotDelivered) else FOUND_FOR
        self._cache.pop(owner, None)
        self._cache[owner] = (now + valid.total_seconds(), found)
        while len(self._cache) > ADDRESSES_KEPT:
            del self._cache[next(iter(self._cache))]
        return found

    async def _ask(self, owner: str) -> str | NotDelivered:
        program = self._command[0]
        untrusted = await asyncio.to_thread(why_untrusted, Path(program))
        if untrusted is not None:
            return NotDelivered(f"the address command was not run: {untrusted}")
        try:
            status, output = await _reply_of(*self._command, owner)
        except TimeoutError:
            return NotDelivered(f"the address command {program} timed out after {in_words(REPLY_TIME)}", transient=True)
        except OSError as error:
            return NotDelivered(f"the address command {program} cannot be started: {error.strerror or error}")
        if status != 0:
            return _no_address(f"the address command {program} ended with {status}")
        return _checked_address(output.decode("utf-8", "replace").strip())


def _checked_address(address: str) -> str | NotDelivered:
    """What is refused is not repeated: it may contain anything."""
    if not address:
        return _no_address("the owner has no address")
    problem = problem_of_address(address)
    return address if problem is None else _no_address(f"the address of the owner is not valid: {problem}")


def _no_address(why: str) -> NotDelivered:
    return NotDelivered(why, recipient=True)


async def _reply_of(*command: str) -> tuple[int, bytes]:
    """Exit code and output. A program that writes more than OUTPUT_MAX bytes is ended."""
    async with (
        running(*command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, env={"PATH": PATH}, cwd="/") as program,
        asyncio.timeout(REPLY_TIME.total_seconds()),
    ):
        assert program.stdout is not None
        output = await read_at_most(program.stdout, OUTPUT_MAX)
        return (0, b"\0") if len(output) > OUTPUT_MAX else (await program.wait(), output)  # no address

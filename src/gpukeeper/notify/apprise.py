"""Mail and chat through apprise, as a channel for owners and admins.

apprise runs in a process of its own. If a server does not respond, that process is ended at the deadline, and the
channel is not tried again for a while; a plugin that crashes ends only that process. The URL of the service, with its
secrets, is in a file that only we can read; it is passed over a pipe and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import re
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.ledger.files import read_secret
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.ports import Category, Delivered, Message, NotDelivered
from gpukeeper.model.words import in_local_time, in_words, plain
from gpukeeper.notify.apprise_child import NOT_INSTALLED, Outgoing, Reply
from gpukeeper.notify.command import PATH, AddressBook
from gpukeeper.processes import DIRECTORY, environment, kill_group, module_command

# -P: the directory we were started in is not trusted, and -m would import from it first.
CHILD = module_command("gpukeeper.notify.apprise_child")
DEADLINE = timedelta(seconds=12)  # for one message; shorter than what a pass waits for a channel
FILE_DEADLINE = timedelta(seconds=5)
IDLE = timedelta(minutes=1)  # then the process is ended
PAUSES = (timedelta(minutes=1), timedelta(minutes=15))  # after a timeout: the first and the longest
ADDRESS_FIELD = "{address}"
HOME = "/nonexistent"  # apprise and its plugins read files there, such as .netrc
TITLE_MAX, BODY_MAX = 200, 4000  # characters
TITLE_BYTES = 240  # encoded for a header they are up to four times as many, and a mail server takes 998 on one line
# Chat services take these as links or mentions; names that others chose must not make any.
_HARMLESS = str.maketrans(
    {"<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", ">": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"}
)
_MENTION = re.compile(r"@(?=[*_]{0,9}(?:all|channel|everyone|here|room|stream|topic))", re.IGNORECASE)


class AppriseKind:
    example = "/etc/gpukeeper/admins.url"

    def problem(self, words: Sequence[str]) -> str | None:
        path = PurePosixPath(words[0]) if len(words) == 1 else PurePosixPath()
        if path.is_absolute() and ".." not in path.parts and "\0" not in words[0]:
            return None
        return f"this is the absolute path of one file that contains the URL. Write it like {self.example}."

    def shown(self, words: Sequence[str]) -> str:
        return words[0]

    def make(self, words: Sequence[str], log: Callable[[str], None]) -> Apprise:
        return Apprise(words[0])


class OwnerAppriseKind(AppriseKind):
    example = "/etc/gpukeeper/owners.url"


class Apprise:
    def __init__(self, path: str, addresses: AddressBook | None = None, child: Sequence[str] = CHILD) -> None:
        """`addresses`: of owners; None: the channel is for admins."""
        self.name = f"apprise {path}"
        self._path = Path(path)
        self._addresses = addresses
        self._service = ServiceProcess(child)

    async def send(self, message: Message) -> Delivered | NotDelivered:
        url = await self._url(message.owner)
        if isinstance(url, NotDelivered):
            return url
        title = f"[gpukeeper] {message.kind.category}: {message.about}"
        outgoing = Outgoing(url, title_of(title), body_of(message), message.kind.category.value)
        return _as_delivery(await self._service.send(outgoing))

    async def problem(self) -> str | None:
        """Why it could not send, as far as that is known without sending."""
        url = await self._template()
        if isinstance(url, NotDelivered):
            return url.why
        url = url.replace(ADDRESS_FIELD, quote("ann@uni.example", safe=""))
        reply = await self._service.send(Outgoing(url, "", "", Category.NOTICE.value, send=False))
        return None if reply.accepted else reply.why

    async def close(self) -> None:
        await self._service.end()

    async def _url(self, owner: str | None) -> str | NotDelivered:
        template = await self._template()
        if self._addresses is None or isinstance(template, NotDelivered):
            return template
        address = await self._addresses.of(owner)
        if isinstance(address, NotDelivered):
            return address
        return template.replace(ADDRESS_FIELD, quote(address, safe=""))

    async def _template(self) -> str | NotDelivered:
        try:
            url = await in_thread(lambda: read_secret(self._path), FILE_DEADLINE)
        except UsageError as problem:
            return NotDelivered(str(problem))
        except TimeoutError:
            return NotDelivered(f"the file {self._path} could not be read in time", transient=True)
        has_field = ADDRESS_FIELD in url
        if has_field and self._addresses is None:
            return NotDelivered(f"the URL in {self._path} contains {ADDRESS_FIELD}, which is only for owners")
        if not has_field and self._addresses is not None:
            return NotDelivered(
                f"the URL in {self._path} does not contain {ADDRESS_FIELD}, where the owner's address goes"
            )
        return url


def harmless(text: str) -> str:
    """On one line, without links that show other words, mentions of all members, or control characters."""
    words = plain(text).translate(_HARMLESS).replace("](", "] (")
    return _MENTION.sub("@ ", words).replace("=?", "= ?")  # a mail program would decode the word of a header


def title_of(text: str) -> str:
    return harmless(text)[:TITLE_MAX].encode()[:TITLE_BYTES].decode(errors="ignore")


def body_of(message: Message) -> str:
    """With times in the zone of this machine, and where its command works."""
    words = in_local_time(harmless(message.text))[:BODY_MAX]
    where = f"Commands work on {harmless(message.host)}." if message.host and "gpukeeper " in words else ""
    return "\n\n".join(part for part in (words, where, message.link) if part)


def _as_delivery(reply: Reply) -> Delivered | NotDelivered:
    return Delivered() if reply.accepted else NotDelivered(reply.why, reply.transient, reply.recipient)


class ServiceProcess:
    """The process that runs apprise. Started for a message, used for those that follow soon, ended at a deadline."""

    def __init__(self, command: Sequence[str] = CHILD) -> None:
        self._command = tuple(command)
        self._turn: asyncio.Lock | None = None
        self._running: Process | None = None
        self._starting: asyncio.Task[Process | Reply] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._pause = PAUSES[0]
        self._not_before = 0.0

    async def send(self, outgoing: Outgoing) -> Reply:
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            left = in_words(timedelta(seconds=round(self._not_before - loop.time())))
            return Reply(False, f"it timed out recently and is tried again in {left}", transient=True)
        self._turn = self._turn or asyncio.Lock()
        try:
            async with asyncio.timeout(DEADLINE.total_seconds()), self._turn:
                self._stay()
                reply = await self._exchange(outgoing)
        except TimeoutError:
            await self._give_up(loop.time())
            return Reply(False, f"it timed out after {in_words(DEADLINE)}", transient=True)
        except asyncio.CancelledError:
            await self.end()
            raise
        self._pause = PAUSES[0]
        self._stay()
        self._ending = loop.call_later(IDLE.total_seconds(), self._kill)
        return reply

    async def end(self) -> None:
        self._stay()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            self._starting = None
        await self._drop()

    def _stay(self) -> None:
        if self._ending is not None:
            self._ending.cancel()

    async def _exchange(self, outgoing: Outgoing) -> Reply:
        running = await self._started()
        if isinstance(running, Reply):
            return running
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            running.stdin.write(msgspec.json.encode(outgoing) + b"\n")
            await running.stdin.drain()
            line = await running.stdout.readline()
            return reading.decode(line, Reply)
        except (OSError, ValueError):
            await self._drop()
            return Reply(False, "the process that runs apprise ended unexpectedly", transient=True)

    async def _started(self) -> Process | Reply:
        """The process, ready. Starting goes on when a deadline ends the wait for it."""
        if self._running is not None and self._running.returncode is None:
            return self._running
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        found = await asyncio.shield(self._starting)
        self._starting = None
        if not isinstance(found, Reply):
            self._running = found
        return found

    async def _start(self) -> Process | Reply:
        try:
            running = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**environment(), "PATH": PATH, "HOME": HOME},
                cwd=DIRECTORY,
                start_new_session=True,
            )
        except OSError as error:
            return Reply(False, f"the process that runs apprise cannot be started: {error.strerror}", transient=True)
        assert running.stdout is not None
        try:
            ready = await running.stdout.readline()
        except BaseException:
            kill_group(running)
            raise
        if ready:
            return running
        kill_group(running)
        if await running.wait() == NOT_INSTALLED:
            return Reply(False, "apprise is not installed. In a clone of gpukeeper: pip install '.[notify]'")
        return Reply(False, "the process that runs apprise ended while it was started", transient=True)

    async def _give_up(self, now: float) -> None:
        """A request that hangs ends the process; one that waited for its start only ends the wait."""
        if self._starting is not None:
            return
        self._not_before = now + self._pause.total_seconds()
        self._pause = min(2 * self._pause, PAUSES[1])
        await self._drop()

    async def _drop(self) -> None:
        running = self._running
        self._kill()
        if running is not None:
            await running.wait()

    def _kill(self) -> None:
        if self._running is not None:
            kill_group(self._running)
            self._running = None

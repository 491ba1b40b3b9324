"""The web process as a child: started with a link and a listening socket, supervised, and ended.

What it is sent and how its questions are answered is the Backend's: a daemon's, or that of a fleet.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Protocol

from gpukeeper.blocking import real_seconds
from gpukeeper.child_python import DIRECTORY, environment, module_command
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.link import LARGEST_QUESTION, Answer, Question, Welcome, frame, read_frame
from gpukeeper.interfaces.revocations import Revocations
from gpukeeper.model.errors import KeeperError, UsageError

CHILD = module_command("gpukeeper.interfaces.web")
OPEN_MAX = 128  # questions that are answered at a time, of LARGEST_QUESTION bytes each at most: 32 MiB
STUCK = 30.0  # seconds to take a frame; a process that does not is ended
BACKOFF = (1.0, 60.0)
HEALTHY = 60.0  # seconds after which a process that ends is started again at once
Log = Callable[[str], None]
Send = Callable[[object], Awaitable[None]]


class Backend(Protocol):
    """Identifies people and answers their questions; the web process does neither."""

    @property
    def revocations(self) -> Revocations: ...

    async def welcome(self) -> Welcome:
        """Its first frame."""
        ...

    async def publish(self, send: Send) -> None:
        """Sends what changed; a new web process gets everything first. The process is started again if it returns."""
        ...

    async def answer(self, question: Question) -> Answer: ...


@asynccontextmanager
async def supervised(
    backend: Backend, where: Endpoint, listener: socket.socket, log: Log, scheme: str = "http"
) -> AsyncIterator[None]:
    """Runs while the block does. Closes the listener."""
    address = f"[{where.address}]" if ":" in where.address else where.address
    log(f"serving the dashboard on {scheme}://{address}:{listener.getsockname()[1]}/")
    child = WebChild(backend, listener, log)
    supervising = asyncio.create_task(child.supervise())
    try:
        yield
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await child.end_replies()
        listener.close()


def require_web() -> None:
    """The packages of the dashboard are an extra."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "jinja2")):
        raise UsageError("The dashboard needs an extra. In a clone of gpukeeper: pip install '.[web]'")


def listen(where: Endpoint) -> socket.socket:
    require_web()
    family = socket.AF_INET6 if ":" in where.address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((where.address, where.port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise KeeperError(
            f"--web: cannot listen on {where.address}:{where.port} ({error.strerror}). Nothing was started. "
            "Choose another port, or end the program that uses it."
        ) from error
    return listener


class WebChild:
    def __init__(self, backend: Backend, listener: socket.socket, log: Log) -> None:
        self._backend, self._listener, self._log = backend, listener, log
        self._replies: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(OPEN_MAX)

    async def supervise(self) -> None:
        """Starts it again when it ends, later each time it does so soon."""
        loop, pause = asyncio.get_running_loop(), BACKOFF[0]
        while True:
            begun = loop.time()
            try:
                why = _ending(await self._run())
            except Exception as problem:  # passes go on, and it is tried again
                why = repr(problem)
            pause = BACKOFF[0] if loop.time() - begun > real_seconds(HEALTHY) else pause
            self._log(f"the web process ended ({why}); starting it again in {pause:g} s")
            await asyncio.sleep(real_seconds(pause))
            pause = min(pause * 2, BACKOFF[1])

    async def end_replies(self) -> None:
        """Requests in progress are interrupted; the next start inspects open intents first."""
        for task in self._replies:
            task.cancel()
        await asyncio.gather(*self._replies, return_exceptions=True)

    async def _run(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), self._listener.fileno(), self._backend.revocations.descriptor)
            process = await asyncio.create_subprocess_exec(
                *(*CHILD, *map(str, inherited)),
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                env=environment(),
                cwd=DIRECTORY,
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            await self._talk(reader, writer)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), real_seconds(1.0))
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            code = await process.wait()
        return code

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(message: object) -> None:
            writer.write(frame(message))
            await asyncio.wait_for(writer.drain(), real_seconds(STUCK))

        async def reply(question: Question) -> None:
            answer = await self._backend.answer(question)
            with suppress(ConnectionError, TimeoutError):
                await send(answer)

        try:
            await send(await self._backend.welcome())
            async with asyncio.TaskGroup() as group:
                publishing = group.create_task(self._backend.publish(send))
                publishing.add_done_callback(lambda task: writer.close())
                while (question := await self._question(reader)) is not None:
                    # Outside the group: a stop is not left in the middle because the web process ended.
                    task = asyncio.create_task(reply(question))
                    self._replies.add(task)
                    task.add_done_callback(self._answered)
                publishing.cancel()
        except* (ConnectionError, TimeoutError, ValueError, KeeperError) as problems:
            self._log(f"the web process is ended: {problems.exceptions[0]}")
        finally:
            writer.close()

    async def _question(self, reader: asyncio.StreamReader) -> Question | None:
        """The next one, when there is room for it: what is not read stays with the web process."""
        await self._room.acquire()
        question = None
        try:
            question = await read_frame(reader, Question, LARGEST_QUESTION)
        finally:
            if question is None:
                self._room.release()
        return question

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._replies.discard(task)
        self._room.release()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

"""A child process that we exchange lines with, and that never outlives us (`supervisor` enforces that).

Made for one event loop. A caller that waits for a line gives it a deadline; a process that misses it is ended, with
all that it started.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from gpukeeper.acceptance.bench import supervisor
from gpukeeper.processes import Tail

HOLDER = (sys.executable, "-I", "-S", str(Path(supervisor.__file__)))
PATIENCE_S = 3.0  # between SIGTERM and SIGKILL
TO_END_S = PATIENCE_S + supervisor.UNKILLABLE_S + 3.0
LONGEST_LINE = 64 * 1024 * 1024


class ProcessEnded(Exception):
    """It ended, or closed its output, before it answered."""


class ChildProcess:
    """Created by `start`. `words` is the end of its stderr."""

    def __init__(self, process: asyncio.subprocess.Process, owner_pipe: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._owner_pipe, self._input, self._output = process, owner_pipe, process.stdin, process.stdout
        assert process.stderr is not None
        self._tail = Tail()
        self._listening = asyncio.create_task(self._tail.read(process.stderr))

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str] | None = None, directory: str | None = None
    ) -> Self:
        """OSError if not even the supervisor can be started; a program that cannot be started is one that ended at
        once. `directory`: its working directory; None: ours.
        """
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(*HOLDER, str(read_end), str(PATIENCE_S), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=None if environment is None else dict(environment),
                pass_fds=(read_end,),
                start_new_session=True,  # Ctrl-C is ours to handle
                cwd=directory,
                limit=LONGEST_LINE,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end)

    @property
    def pid(self) -> int:
        """The supervisor's; the program and what it starts are below it."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None: it runs, or its exit code is unknown."""
        return self._process.returncode

    @property
    def words(self) -> str:
        return self._tail.kept.decode("utf-8", "replace")

    async def send(self, line: bytes) -> None:
        """Ended, if there is no process to read it."""
        try:
            self._input.write(line + b"\n")
            await self._input.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ProcessEnded("it does not read its input any more") from error

    async def line(self, deadline_s: float) -> bytes:
        """TimeoutError; Ended; ValueError for a line that is too long."""
        async with asyncio.timeout(deadline_s):
            line = await self._output.readline()
        if not line.endswith(b"\n"):
            raise ProcessEnded("it closed its output")
        return line

    async def wait(self, deadline_s: float) -> int:
        """The exit code, 128 + n for signal n. TimeoutError. What it prints in the meantime is discarded."""
        async with asyncio.timeout(deadline_s):
            while await self._output.read(65536):
                pass
            return await self._process.wait()

    async def last_words(self, moment_s: float = 2.0) -> str:
        """Its stderr, after it ended: the rest of it may still be in the pipe."""
        with suppress(TimeoutError):
            async with asyncio.timeout(moment_s):
                await asyncio.shield(self._listening)
        return self.words

    async def end(self) -> None:
        """With everything below it. Returns when all of it is gone, or cannot be killed; not even a cancellation
        shortens that, since it takes seconds and nothing may stay behind.
        """
        self._close_pipe()
        self._input.close()
        interrupted = await self._gone()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        # Kills what is still there, and drops pipes that an unkillable process may hold.
        self._process._transport.close()  # type: ignore[attr-defined]
        if interrupted is not None:
            raise interrupted

    async def _gone(self) -> asyncio.CancelledError | None:
        """Waits for it. Never kills the supervisor while it is working: without it the others would escape."""
        until, interrupted = time.monotonic() + TO_END_S, None
        while True:
            try:
                await self.wait(max(until - time.monotonic(), 0.01))
            except asyncio.CancelledError as error:
                interrupted = error
            except TimeoutError:
                return interrupted
            else:
                return interrupted

    def _close_pipe(self) -> None:
        owner_pipe, self._owner_pipe = self._owner_pipe, -1
        if owner_pipe >= 0:
            os.close(owner_pipe)

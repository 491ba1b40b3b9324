"""Queries the driver through its process (child), which is abandoned after a deadline: a hung driver blocks no caller.

How long a client keeps the driver open, and with it every GPU initialised:

    query_once      inventory, condition   until the reply; the process has ended when it returns
    devices/usage   usage                  from the first reading until close(); a reset closes it before
    devices/health  an acceptance run      from the first request until the end of the run

A process that fails, is late or prints garbage is killed, and the next request starts another. One that cannot be
killed (inside the kernel, state D) is abandoned; with ABANDONED_MAX of these no more are started until one ends.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec

from gpukeeper.child_python import DIRECTORY, environment, module_command
from gpukeeper.devices.driver.protocol import NO_ID, DriverReply, DriverRequest, FactGroup
from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

# -P: the directory we were started in is not trusted, and -m would import from it first.
CHILD = module_command("gpukeeper.devices.driver.child")
TO_OPEN = 3  # deadlines for the first reply: without persistence a driver wakes its GPUs one after the other
A_MOMENT = timedelta(seconds=5)  # to start a process and to abandon one
KILLED_WITHIN_S = 1.0
ABANDONED_MAX = 4
LONGEST_PAUSE = timedelta(minutes=5)
KEPT_WORDS = 64 * 1024
ANSWER_MAX = 64 * 1024 * 1024
_abandoned: list[subprocess.Popen[bytes]] = []
_counting = threading.Lock()


def query_once(about: FactGroup, deadline: timedelta, child: Sequence[str] = CHILD) -> DriverReply | Unknown:
    """Blocks, for no longer than the deadline and a moment. No process of ours has a GPU open afterwards."""
    until = time.monotonic() + deadline.total_seconds()
    client = DriverClient(child, deadline)
    answer = client.query(about)
    if not client.finish(max(until - time.monotonic(), 0.0)):
        return Unknown(f"the NVIDIA driver was not closed within {in_words(deadline)}")
    return answer


class DriverClient:
    """The process and its end. One request at a time; made for threads. Blocks for the deadline and a moment at most.

    `to_open`: deadlines for the first reply of a process. `pause`: before a process is started after a failure, longer
    after each further one.
    """

    def __init__(
        self,
        command: Sequence[str],
        deadline: timedelta,
        *,
        to_open: int = 1,
        pause: timedelta = timedelta(),
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command, self._deadline, self._to_open = command, deadline, to_open
        self._pause, self._ticks = pause, ticks
        self._one_at_a_time = threading.Lock()
        self._child: _Program | None = None
        self._request_id = NO_ID
        self._failures = 0
        self._not_before = -math.inf
        self._last_why = ""

    @property
    def longest(self) -> timedelta:
        """Of one request that has to wait for another one first."""
        return self._deadline * (1 + self._to_open) + A_MOMENT

    def query(self, about: FactGroup) -> DriverReply | Unknown:
        """After a failed reply, as after Unknown, the next request starts another process: what this one opened may be
        stale (the driver was reloaded, a GPU was lost).
        """
        if not self._one_at_a_time.acquire(timeout=self._deadline.total_seconds()):
            return Unknown("an earlier query of the NVIDIA driver is still in progress")
        try:
            wait = self._not_before - self._ticks()
            if self._child is None and wait > 0:
                pause = in_words(timedelta(seconds=max(round(wait), 1)))
                return Unknown(f"{self._last_why}; it is retried in {pause}")
            answer = self._query(about)
            if isinstance(answer, Unknown) or answer.state == "failed":
                self._failed(answer.why)
            else:
                self._failures = 0
            return answer
        finally:
            self._one_at_a_time.release()

    def finish(self, within_s: float) -> bool:
        """Lets the process end by itself. False: it did not, and was abandoned."""
        child, self._child = self._child, None
        return child is None or child.finish(within_s)

    def close(self) -> None:
        """Kills the process, also during a query. The next request starts another."""
        until = time.monotonic() + A_MOMENT.total_seconds()
        while True:
            child = self._child
            if child is not None:
                child.kill()  # a caller that waits for its reply sees that it ended
            if self._one_at_a_time.acquire(timeout=0.1):
                break
            if time.monotonic() >= until:
                return
        try:
            self._drop()
            self._failures, self._not_before = 0, -math.inf
        finally:
            self._one_at_a_time.release()

    def _query(self, about: FactGroup) -> DriverReply | Unknown:
        deadline = self._deadline if self._child is not None else self._deadline * self._to_open
        until = time.monotonic() + deadline.total_seconds()
        try:
            child = self._child = self._child or _Program(self._command)
        except OSError as error:
            return Unknown(
                f"the process that queries the NVIDIA driver could not be started: {error.strerror or error}"
            )
        self._request_id += 1
        try:
            child.send(DriverRequest(self._request_id, about))
            while True:
                answer = reading.decode(child.line(until), type=DriverReply)
                if answer.id in (self._request_id, NO_ID):
                    return answer
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(deadline)}")
        except msgspec.DecodeError as error:
            return Unknown(f"the process that queries the NVIDIA driver returned an invalid reply: {error}")
        except (EOFError, OSError):
            return Unknown(f"querying the NVIDIA driver failed {child.last_words()}")

    def _failed(self, why: str) -> None:
        self._drop()
        pause = min(self._pause * 2 ** min(self._failures, 10), LONGEST_PAUSE)
        self._failures += 1
        self._not_before, self._last_why = self._ticks() + pause.total_seconds(), why

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.abandon()


class _Program:
    """A running child with what was read of its output beyond the last line."""

    def __init__(self, command: Sequence[str]) -> None:
        """OSError, also if too many earlier ones cannot be killed."""
        with _counting:
            _abandoned[:] = [one for one in _abandoned if one.poll() is None]
            if len(_abandoned) >= ABANDONED_MAX:
                raise OSError(f"{len(_abandoned)} earlier ones hang in the driver and cannot be killed")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment(),
            cwd=DIRECTORY,
        )
        self._received = bytearray()
        self._words = bytearray()  # the last of what it printed on stderr
        assert self._process.stderr is not None
        self._stderr = self._process.stderr.fileno()
        os.set_blocking(self._stderr, False)

    def send(self, question: DriverRequest) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last output is more exact
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")

    def line(self, until: float) -> bytes:
        """TimeoutError; EOFError if it ended; DecodeError for a line that is too long."""
        assert self._process.stdout is not None
        fd, seen = self._process.stdout.fileno(), 0
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._stderr, select.POLLIN)  # a process whose stderr is full would block forever
        while (end := self._received.find(b"\n", seen)) < 0:
            seen = len(self._received)
            if seen > ANSWER_MAX:
                raise msgspec.DecodeError("its reply is too long")
            left = until - time.monotonic()
            if left <= 0 or not (ready := poll.poll(math.ceil(left * 1000))):
                raise TimeoutError
            if self._stderr in dict(ready) and not self._listen():
                poll.unregister(self._stderr)
            if fd not in dict(ready):
                continue
            read = os.read(fd, 65536)
            if not read:
                raise EOFError
            self._received += read
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def last_words(self) -> str:
        """Its exit code and the last line of what it printed on stderr."""
        code = "unknown"
        with suppress(BlockingIOError, subprocess.TimeoutExpired):
            code = str(self._process.wait(timeout=KILLED_WITHIN_S))
            while self._listen():
                pass
        last = "".join(self._words.decode("utf-8", "replace").strip().splitlines()[-1:])
        return f"(exit {code}): {last or 'no message'}"

    def _listen(self) -> bool:
        """False: its stderr is closed. BlockingIOError: nothing to read now."""
        read = os.read(self._stderr, 65536)
        self._words += read
        del self._words[:-KEPT_WORDS]
        return bool(read)

    def finish(self, within_s: float) -> bool:
        """Lets it end by itself. False: it did not, and was abandoned."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=within_s)
        ended = self._process.returncode is not None
        self.abandon()
        return ended

    def kill(self) -> None:
        self._process.kill()

    def abandon(self) -> None:
        """A call inside the driver may not even end by SIGKILL."""
        self._process.kill()
        try:
            self._process.wait(timeout=KILLED_WITHIN_S)
        except subprocess.TimeoutExpired:
            with _counting:
                _abandoned.append(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

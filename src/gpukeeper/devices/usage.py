"""How busy each GPU is, read again and again through one child that keeps the driver open. Looks only.

A child that does not answer is given up, and a new one is started later, each time more patiently. As long as the
child lives the driver counts one client more, and no GPU can be reset: close() it before.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices import dcgm
from gpukeeper.devices.busy import Export, GpuReading, Judge, Use
from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

# -P: the folder we were started in is nobody we trust, and -m would import from it first.
CHILD = (sys.executable, "-P", "-m", "gpukeeper.devices.usage_child")
DEADLINE = timedelta(seconds=10)
TO_OPEN = 3  # deadlines for the first answer: without persistence a driver wakes its GPUs one after the other
A_MOMENT = timedelta(seconds=5)  # to start a child and to give one up
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=5), timedelta(minutes=5)
ANSWER_MAX = 4 * 1024 * 1024

Fetch: TypeAlias = Callable[[str, timedelta], Awaitable[Export | Unknown]]


class Answer(msgspec.Struct, frozen=True):
    """What the child prints for one question."""

    state: Literal["answered", "no driver", "failed"]
    gpus: tuple[GpuReading, ...] = ()
    why: str = ""


class GpuUsage:
    def __init__(
        self,
        clock: Clock,
        *,
        exporter: str | None = None,  # address of a DCGM exporter
        deadline: timedelta = DEADLINE,
        child: Sequence[str] = CHILD,
        driver: str = "/proc/driver/nvidia",
        ticks: Callable[[], float] = time.monotonic,
        fetch: Fetch = dcgm.fetch,
    ) -> None:
        self._clock, self._exporter, self._deadline, self._fetch = clock, exporter, deadline, fetch
        self._driver = Path(driver)
        self._asking = Asking(child, deadline, ticks)
        self._judge = Judge()

    async def read(self) -> Mapping[str, Use] | Unknown:
        """Since the reading before, by uuid. A GPU or slice that is not in it is not known."""
        # The driver is asked last and nothing is awaited after: so readings are judged in the order they were made.
        exported = await self._exported()
        answer = await self._ask()
        if isinstance(answer, Unknown):
            return answer
        if answer.state == "no driver" and not self._driver.exists():
            return {}
        if answer.state != "answered":
            return Unknown(answer.why)
        return self._judge.judge(answer.gpus, self._clock.now(), exported)

    @property
    def layout_changed(self) -> Mapping[str, datetime]:
        """When the slices of a GPU, by its uuid, were last seen to be others than before."""
        return self._judge.layout_changed

    def close(self) -> None:
        """Ends the child. The next reading starts another."""
        self._asking.close()

    async def _ask(self) -> Answer | Unknown:
        longest = self._deadline * (1 + TO_OPEN) + A_MOMENT  # it may have to wait for another question first
        try:
            return await in_thread(self._asking.ask, longest)
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(longest)}")

    async def _exported(self) -> Export | Unknown | None:
        return None if self._exporter is None else await self._fetch(self._exporter, self._deadline)


class Asking:
    """The child and its end. Blocks, for no longer than the deadline and a moment; made for threads."""

    def __init__(self, child: Sequence[str], deadline: timedelta, ticks: Callable[[], float]) -> None:
        self._command, self._deadline, self._ticks = child, deadline, ticks
        self._one_at_a_time = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._not_before = -math.inf
        self._last_why = ""

    def ask(self) -> Answer | Unknown:
        if not self._one_at_a_time.acquire(timeout=self._deadline.total_seconds()):
            return Unknown("the NVIDIA driver is still being asked")
        try:
            return self._ask()
        finally:
            self._one_at_a_time.release()

    def close(self) -> None:
        child = self._child
        if child is not None:
            child.kill()  # who waits for its answer hears that it ended
        if self._one_at_a_time.acquire(timeout=A_MOMENT.total_seconds()):
            try:
                self._drop()
                self._failures, self._not_before = 0, -math.inf
            finally:
                self._one_at_a_time.release()

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            give_up(child)

    def _ask(self) -> Answer | Unknown:
        wait = self._not_before - self._ticks()
        if self._child is None and wait > 0:
            pause = in_words(timedelta(seconds=max(round(wait), 1)))
            return Unknown(f"{self._last_why}; it is asked again in {pause}")
        deadline = self._deadline if self._child is not None else self._deadline * TO_OPEN
        try:
            child = self._child = self._child or start(self._command)
        except OSError as error:
            return self._failed(f"the program that asks the NVIDIA driver could not be started: {error.strerror}")
        printed = question(child, deadline)
        if isinstance(printed, Unknown):
            return self._failed(printed.why)
        try:
            answer = reading.decode(printed, type=Answer)
        except msgspec.DecodeError as error:
            return self._failed(f"the program that asks the NVIDIA driver gave no record: {error}")
        if answer.state == "failed":  # what it opened may be stale: the driver was reloaded, a GPU was lost
            return self._failed(answer.why)
        self._failures = 0
        return answer

    def _failed(self, why: str) -> Unknown:
        self._drop()
        pause = min(FIRST_PAUSE * 2 ** min(self._failures, 10), LONGEST_PAUSE)
        self._failures += 1
        self._not_before, self._last_why = self._ticks() + pause.total_seconds(), why
        return Unknown(why)


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def question(child: subprocess.Popen[bytes], deadline: timedelta) -> bytes | Unknown:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(b"?\n")
        return _line(child, child.stdout.fileno(), deadline)
    except (OSError, ValueError) as error:  # it ended, or somebody closed it meanwhile
        return _last_words(child, str(error))


def _line(child: subprocess.Popen[bytes], fd: int, deadline: timedelta) -> bytes | Unknown:
    until, line = time.monotonic() + deadline.total_seconds(), b""
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(deadline)}")
        read = os.read(fd, 65536)
        if not read:
            return _last_words(child, "no word")
        line += read
        if len(line) > ANSWER_MAX:
            return Unknown("the program that asks the NVIDIA driver does not stop talking")
    return line


def _last_words(child: subprocess.Popen[bytes], otherwise: str) -> Unknown:
    assert child.stderr is not None
    code, last = "not known", ""
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        code = str(child.wait(timeout=1))
        os.set_blocking(child.stderr.fileno(), False)
        words = (child.stderr.read(65536) or b"").decode("utf-8", "replace")
        last = "".join(words.strip().splitlines()[-1:])
    return Unknown(f"asking the NVIDIA driver failed (exit {code}): {last or otherwise}")


def give_up(child: subprocess.Popen[bytes]) -> None:
    """A call inside the driver may not even die by SIGKILL, so nobody waits long for the end."""
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()

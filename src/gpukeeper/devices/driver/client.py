"""Queries the driver through its process (child), abandoned after a deadline: a hung driver blocks no caller. How long
it keeps the driver open, and every GPU initialised: `query_once` until the reply, GpuUsage (devices/meter) from the
first reading until close(), HealthMonitor for an acceptance run. A process that fails, is late or prints garbage is
killed, and the next request starts another; one that cannot be killed is abandoned, a few of them at most.
No driver is a valid result (no GPUs); one that is loaded and does not answer is Unknown.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices.driver.facts import (
    NO_ID,
    NO_SLICE_UTILISATION,
    DriverReply,
    DriverRequest,
    FactGroup,
    GpuFacts,
    Listed,
    SliceFacts,
)
from gpukeeper.model import reading
from gpukeeper.model.gpu import Fact, Gpu, Health, Reading, Xid
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.processes import (
    ABANDONED_MAX,
    DIRECTORY,
    KILLED_WITHIN_S,
    Abandoned,
    Tail,
    environment,
    last_line,
    module_command,
)

# -P: the directory we were started in is not trusted, and -m would import from it first.
CHILD = module_command("gpukeeper.devices.driver.child")
TO_OPEN = 3  # deadlines for the first reply: without persistence a driver wakes its GPUs one after the other
A_MOMENT = timedelta(seconds=5)  # to start a process and to abandon one
LONGEST_PAUSE = timedelta(minutes=5)
ANSWER_MAX = 64 * 1024 * 1024
_abandoned = Abandoned()


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
        if (left := len(_abandoned)) >= ABANDONED_MAX:
            raise OSError(f"{left} earlier ones hang in the driver and cannot be killed")
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
        self._words = Tail()
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
        return f"(exit {code}): {last_line(self._words.kept) or 'no message'}"

    def _listen(self) -> bool:
        """False: its stderr is closed. BlockingIOError: nothing to read now."""
        read = os.read(self._stderr, 65536)
        self._words.add(read)
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
        _abandoned.kill(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
DRIVER_LOADED = "/proc/driver/nvidia"


def inventory(
    deadline: timedelta, child: Sequence[str] = CHILD, driver: str = DRIVER_LOADED
) -> tuple[GpuFacts, ...] | Unknown:
    """Blocks, for no longer than the deadline and a moment."""
    return gpus_in(query_once("inventory", deadline, child), Path(driver).exists())


def gpus_in(answer: DriverReply | Unknown, driver_loaded: bool) -> tuple[GpuFacts, ...] | Unknown:
    if isinstance(answer, Unknown):
        return answer
    if answer.state == "answered" or (answer.state == "no driver" and not driver_loaded):
        return answer.gpus
    return Unknown(answer.why)


def gpu_note(driver: str = DRIVER_LOADED, pci: str = "/sys/bus/pci/devices") -> str | None:
    """A sentence for users if no GPU will be shown, or None. Never queries the driver, so it never hangs."""
    if Path(driver).exists():
        return None
    if any(is_nvidia_gpu(device) for device in Path(pci).glob("*")):
        return "An NVIDIA GPU is on the PCI bus, but no NVIDIA driver is loaded: GPUs are not shown."
    return "No NVIDIA driver found: no GPUs to show."


def is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, class_ = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == NVIDIA_VENDOR and class_.startswith(DISPLAY_CLASS)


HEALTH_DEADLINE = timedelta(seconds=20)
NO_SERIAL = Unknown("a slice of a GPU has no serial number", by_design=True)
_PROFILE = re.compile(r"\bMIG (\S+)")


class HealthMonitor:
    """The driver during an acceptance run. It is open from the first query until `close`."""

    def __init__(self, child: Sequence[str] = CHILD, deadline: timedelta = HEALTH_DEADLINE) -> None:
        self._client = DriverClient(child, deadline, to_open=TO_OPEN)
        self._one_at_a_time = asyncio.Lock()

    async def identity(self) -> DriverReply | Unknown:
        """No driver is a valid result: see its state."""
        return await self._query("identity")

    async def health(self) -> tuple[GpuFacts, ...] | Unknown:
        return gpus_in(await self._query("health"), driver_loaded=True)

    async def readings(self) -> tuple[Reading, ...]:
        """`at` by the machine's monotonic clock. Empty if the driver does not answer: `health` reports why."""
        answer = await self._query("readings")
        return () if isinstance(answer, Unknown) else answer.readings

    async def close(self) -> None:
        with suppress(TimeoutError):
            await in_thread(self._client.close, 2 * A_MOMENT)

    async def _query(self, about: FactGroup) -> DriverReply | Unknown:
        longest = self._client.longest
        async with self._one_at_a_time:
            try:
                return await in_thread(lambda: self._client.query(about), longest)
            except TimeoutError:
                return Unknown(f"the NVIDIA driver did not answer within {in_words(longest)}")
            except asyncio.CancelledError:
                await self.close()
                raise


def gpus_of(facts: Sequence[GpuFacts]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """What can be tested: whole GPUs, and instead of one that is split its slices. And why the others cannot."""
    found: list[Gpu] = []
    silent: list[str] = []
    for one in facts:
        if isinstance(one.uuid, Unknown):
            silent.append(f"GPU {one.index} does not report its uuid: {one.uuid.why}")
        elif one.sliced is not True:
            found.append(_facts_of_gpu(one, one.uuid))
        elif isinstance(one.slices, Unknown):
            silent.append(f"GPU {one.index} ({one.uuid}) does not report its slices: {one.slices.why}")
        elif one.slices:
            found += [_facts_of_slice(part, one, one.uuid) for part in one.slices]
        else:
            silent.append(f"GPU {one.index} ({one.uuid}) is in MIG mode and has no slices, so it cannot be used")
    return tuple(found), tuple(silent)


def _facts_of_gpu(one: GpuFacts, uuid: str) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=one.index,
        name=one.name,
        serial=one.serial,
        pci=one.pci,
        memory_mib=one.memory_total_mib,
        facts=one.facts,
    )


def _facts_of_slice(part: SliceFacts, whole: GpuFacts, uuid: str) -> Gpu:
    profile = None if isinstance(part.name, Unknown) else _PROFILE.search(part.name)
    return Gpu(
        uuid=part.uuid,
        index=whole.index,
        name=whole.name,
        serial=NO_SERIAL,
        pci=whole.pci,
        memory_mib=part.memory_total_mib,
        part_of=uuid,
        profile=profile[1] if profile else "not known",
        facts={**whole.facts, "sms": part.sms},
    )


def health_of(
    gpus: Sequence[GpuFacts],
    at: datetime,
    foreign: Callable[[str, Listed, Fact], Listed],
    xids: Mapping[str, tuple[Xid, ...] | Unknown],
) -> dict[str, Health]:
    """By uuid. A slice has the counters of its GPU: errors of the memory they share affect it, too."""
    found: dict[str, Health] = {}
    for gpu in gpus:
        if isinstance(gpu.uuid, Unknown):
            continue
        slices = () if isinstance(gpu.slices, Unknown) else gpu.slices
        for one in slices or (gpu,):
            uuid = str(one.uuid)
            found[uuid] = Health(
                uuid=uuid,
                at=at,
                counters={**gpu.counters, "energy_mj": gpu.energy_mj},
                states={**states_of(gpu), **(states_of_slice(one) if isinstance(one, SliceFacts) else {})},
                xids=xids.get(gpu.uuid, Unknown("its PCI address is unknown")),
                foreign=foreign(uuid, one.listed, one.memory_used_mib),
            )
    return found


def states_of(gpu: GpuFacts) -> dict[str, Fact]:
    return {
        **gpu.states,
        "mig": gpu.sliced,
        "memory_used_mib": gpu.memory_used_mib,
        "advice": gpu.advice,
        "remap_pending": gpu.remap_pending,
        "remap_failed": gpu.remap_failed,
    }


def states_of_slice(part: SliceFacts) -> dict[str, Fact]:
    return {"memory_used_mib": part.memory_used_mib, "utilisation": NO_SLICE_UTILISATION}

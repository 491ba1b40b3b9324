"""The only process that calls the NVIDIA driver. Run it: python -P -m gpukeeper.devices.driver.child

It reads one request per line and prints one reply per line (see `protocol`). It is a process of its own because a call
into a faulty driver may never return: its parent can abandon it. It imports values of gpukeeper, nothing that does I/O.

The driver is open from the first request until the end of the input, and the GPUs stay initialised as long. It ends
with its input, even while a call into the driver hangs (unless the kernel itself cannot interrupt that call).

    inventory   identity, memory, processes, slices of each GPU; the utilisation of the last second
    condition   + what the driver recommends, pending memory repairs, whether a GPU can be reset alone
    usage       + how busy each was since the previous request; between requests it collects utilisation samples
    identity    + serial number, firmware and other constants, how GPUs are connected, versions of the driver
    health      + counters and states; begins to sample
    readings    what was sampled twice a second since the previous request
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from gpukeeper.devices.driver.facts import NO_ID, SUBJECTS, DriverReply, DriverRequest, State
from gpukeeper.devices.driver.health import Sampler, health, identity
from gpukeeper.devices.driver.nvml import ActivityMonitor, condition, errors, gpus, utilisation, words
from gpukeeper.model import reading

COLLECT_EVERY_S = 5.0  # the driver's own buffer of samples covers only some 10 s
TO_END_S = 5.0  # for queries that wait when the input ends


def main() -> None:
    import pynvml

    session = DriverSession(pynvml)
    try:
        serve(sys.stdin.fileno(), lambda line: _print(session.answer(line)), session.collect, _end_soon)
    finally:
        session.close()


def serve(
    fd: int,
    answer: Callable[[bytes], None],
    meanwhile: Callable[[], None],
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Answers line by line until the end of the input. `at_end` runs in a thread, as soon as the input ended."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def listen() -> None:
        with open(fd, "rb", closefd=False) as file:
            for line in file:
                if line.endswith(b"\n"):
                    lines.put(line)
        lines.put(None)
        at_end()

    threading.Thread(target=listen, name="questions", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=COLLECT_EVERY_S)
        except queue.Empty:
            meanwhile()
            continue
        if line is None:
            return
        answer(line)


def _print(answer: DriverReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _end_soon() -> None:
    time.sleep(TO_END_S)
    os._exit(1)  # the main thread is inside the driver


class DriverSession:
    """Opens the driver at the first query, and again after a failure: it may have been reloaded in the meantime."""

    def __init__(
        self, nvml: Any, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._nvml, self._clock, self._sleep = nvml, clock, sleep
        self._opened = False
        self._watch: ActivityMonitor | None = None
        self._sampler: Sampler | None = None

    def answer(self, line: bytes) -> DriverReply:
        try:
            question = reading.decode(line, type=DriverRequest)
        except msgspec.DecodeError as error:
            return DriverReply(id=NO_ID, state="failed", why=f"the request could not be read: {error}")
        if question.about not in SUBJECTS:
            return DriverReply(id=question.id, state="failed", why=f"{question.about!r} is not a valid request")
        try:
            if not self._opened:
                self._nvml.nvmlInit()
                self._opened = True
            return DriverReply(id=question.id, state="answered", **self._found(question.about))
        except errors(self._nvml) as error:
            self.close()
            return DriverReply(id=question.id, state=self._state(error), why=words(error))

    def collect(self) -> None:
        if self._watch is not None:
            self._watch.collect()

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        self._watch = self._sampler = None
        if self._opened:
            self._opened = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _state(self, error: Exception) -> State:
        missing = (self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND, self._nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return "no driver" if getattr(error, "value", None) in missing else "failed"

    def _found(self, about: str) -> dict[str, Any]:
        """Fields of the reply."""
        nvml = self._nvml
        match about:
            case "inventory":
                return {"gpus": gpus(nvml, lambda nvml, handle: {"utilisation": utilisation(nvml, handle)})}
            case "condition":
                return {"gpus": gpus(nvml, condition)}
            case "usage":
                self._watch = self._watch or ActivityMonitor(nvml, self._clock, self._sleep)
                return {"gpus": self._watch.read()}
            case "identity":
                return identity(nvml)
            case "health":
                self._sampling()
                return {"gpus": gpus(nvml, health)}
            case _:
                return {"readings": self._sampling().take()}

    def _sampling(self) -> Sampler:
        if self._sampler is None:
            self._sampler = Sampler(self._nvml, self._clock)
            self._sampler.start()
        return self._sampler


if __name__ == "__main__":
    main()

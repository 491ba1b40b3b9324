"""A thread of the child that samples what changes every second, while GPUs are tested."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from gpukeeper.devices.driver.health import NOW, Ask
from gpukeeper.devices.driver.nvml import errors, every_gpu, fact
from gpukeeper.model.gpu import Reading
from gpukeeper.model.unknown import Unknown

EVERY_S = 0.5
MOST_ROUNDS = 20_000  # nearly three hours; with fewer requests every second one is kept, then every fourth
MOST_READINGS = 160_000  # of all GPUs or slices together: one line of output
Sampled: TypeAlias = tuple[tuple[str, ...], Any]  # the uuids that a GPU's readings are for, and its handle


class Sampler:
    """None in a Reading: not measured. What is not fetched stays bounded: every second round is dropped, and the next
    ones are half as frequent. A request starts again.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._rounds: list[list[Reading]] = []
        self._every_s = EVERY_S
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def take(self) -> tuple[Reading, ...]:
        """Since the last time."""
        with self._writing:
            taken, self._rounds, self._every_s = self._rounds, [], EVERY_S
        return tuple(one for each in taken for one in each)

    def once(self, gpus: list[Sampled]) -> None:
        found: list[Reading] = []
        for uuids, handle in gpus:
            at = self._clock()
            values = {key: self._value(ask, handle) for key, ask in NOW.items()}
            found += [Reading(uuid=uuid, at=at, **values) for uuid in uuids]
        with self._writing:
            self._rounds.append(found)
            if len(self._rounds) >= min(MOST_ROUNDS, MOST_READINGS // max(1, len(found))):
                self._rounds, self._every_s = self._rounds[::2], 2 * self._every_s

    def gpus(self) -> list[Sampled]:
        """A GPU with its own uuid, or with those of its slices."""
        found: list[Sampled] = []
        for handle, gpu in every_gpu(self._nvml):
            if not isinstance(gpu.uuid, Unknown):
                slices = () if isinstance(gpu.slices, Unknown) else gpu.slices
                found.append((tuple(part.uuid for part in slices) or (gpu.uuid,), handle))
        return found

    def _run(self) -> None:
        gpus: list[Sampled] = []
        due = self._clock()
        while not self._over.wait(max(due - self._clock(), 0.0)):
            due = max(due + self._every_s, self._clock())  # missed samples are not made up for
            with suppress(*errors(self._nvml)):
                gpus = gpus or self.gpus()
            self.once(gpus)

    def _value(self, ask: Ask, handle: Any) -> Any:
        value = fact(self._nvml, lambda: ask(self._nvml, handle))
        return None if isinstance(value, Unknown) else value

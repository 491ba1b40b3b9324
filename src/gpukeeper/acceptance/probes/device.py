"""The device a probe computes on: one GPU, or the CPU in its place. Times work, and counts busy time.

Timed by CUDA events on a GPU: the time of the device, not the time Python needs to submit the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

WARM_UPS = 10
WARM_S = 0.15  # an idle GPU needs that long to reach its clocks
ROUNDS_MAX = 200_000


class Device:
    """`name`: cuda:0 or cpu."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.cuda = self.torch.type == "cuda"
        self.busy_s = 0.0
        self._working = False
        if self.cuda:
            torch.cuda.set_device(self.torch)
            self.name = str(torch.cuda.get_device_name(self.torch))
            self.capability: tuple[int, int] = torch.cuda.get_device_capability(self.torch)
            self.l2_bytes = int(getattr(torch.cuda.get_device_properties(self.torch), "L2_cache_size", 0))
        else:
            self.name, self.capability, self.l2_bytes = "CPU", (0, 0), 0

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.torch)

    def generator(self, seed: int) -> Any:
        """Random figures made on the device: the same ones for the same seed on the same kind of device."""
        return torch.Generator(device=self.torch).manual_seed(seed)

    def free_memory(self) -> int:
        """Bytes that may still be taken."""
        if self.cuda:
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return _of_meminfo("MemAvailable")

    def total_memory(self) -> int:
        if self.cuda:
            return int(torch.cuda.mem_get_info(self.torch)[1])
        return _of_meminfo("MemTotal")

    def release(self) -> None:
        """Give back what the last probe took."""
        if self.cuda:
            torch.cuda.empty_cache()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts this as time in which the device had work: from the first to the last, small gaps included."""
        if self._working:  # the outer one counts
            yield
            return
        self._working = True
        self.synchronize()
        began = time.perf_counter()
        try:
            yield
            self.synchronize()
        finally:
            self.busy_s += time.perf_counter() - began
            self._working = False

    def span(self, work: Callable[[], object], rounds: int) -> float:
        """Seconds that the device took for so many calls."""
        with self.working():
            if not self.cuda:
                began = time.perf_counter()
                for _ in range(rounds):
                    work()
                return time.perf_counter() - began
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(rounds):
                work()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1000

    def warm(self, work: Callable[[], object]) -> float:
        """At least ten calls, and until clocks are up. Answers with the seconds of one call."""
        took = self.span(work, WARM_UPS)
        while took < WARM_S and self.cuda:
            took += self.span(work, WARM_UPS)
        return max(self.span(work, 2) / 2, 1e-7)

    def timed(
        self, work: Callable[[], object], *, repeats: int, seconds: float, rounds: int | None = None, slow: float = 0.0
    ) -> list[float]:
        """Seconds of one call, measured so many times, all of them in about `seconds`; warmed up before.

        `slow` is an injected fault: additional work inside what is timed.
        """
        once = self.warm(work)
        wanted = rounds or max(1, min(ROUNDS_MAX, round(seconds / max(1, repeats) / once)))
        extra = 0
        if slow:
            wanted = max(wanted, 10)
            extra = max(1, round(wanted * slow))
        return [self.span(work, wanted + extra) / wanted for _ in range(max(1, repeats))]

    def bursts(
        self, work: Callable[[], object], *, repeats: int, rounds: int, pause_s: float, slow: float = 0.0
    ) -> list[float]:
        """As `timed`, each time a few calls after a pause: what the GPU can do before its power limit slows it down.

        Products that follow each other for half a second run at the power limit of the board, some 15 % slower and
        never twice alike. The stress check reports its speed then.
        """
        self.warm(work)
        extra = max(1, round(rounds * slow)) if slow else 0
        found = []
        for _ in range(max(1, repeats)):
            self.synchronize()
            time.sleep(pause_s)
            self.span(work, 3)  # clocks come back
            found.append(self.span(work, rounds + extra) / rounds)
        return found


def _of_meminfo(key: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - the standard library's least
        for line in lines:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo does not contain {key}")

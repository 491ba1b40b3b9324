"""How busy processes are, between two readings; time is the test's own."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.nodes import TICKS
from gpukeeper.platforms.ray.state import FRESH_RESULT, OLDEST_READING, Cpu
from tests.unit.platforms.ray.nodes_here import process

WINDOW = timedelta(seconds=10)


class Watch:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_nothing_is_known_before_two_readings() -> None:
    cpu = Cpu()
    assert isinstance(cpu.percent([process(1)]), Unknown)
    cpu.begin([process(1)], WINDOW)
    assert isinstance(cpu.percent([process(1)]), Unknown)
    assert not cpu.fresh


def test_what_was_used_in_between_counts_and_who_is_new_counts_whole() -> None:
    watch = Watch()
    cpu = Cpu(watch)
    cpu.begin([process(1, ticks=500), process(2, ticks=0)], WINDOW)
    watch.time += 10
    later = [process(1, ticks=500 + 5 * TICKS), process(2, ticks=0), process(3, ticks=TICKS)]
    cpu.take(later)
    assert cpu.percent(later[:1]) == pytest.approx(50)
    assert cpu.percent(later[1:2]) == 0
    assert cpu.percent(later) == pytest.approx(60)
    # The pid of one that ended, used again.
    assert cpu.percent([process(1, starttime=2, ticks=TICKS)]) == pytest.approx(10)


def test_the_reading_of_the_last_pass_will_do_if_it_is_neither_too_young_nor_too_old() -> None:
    watch = Watch()
    cpu = Cpu(watch)
    cpu.begin([process(1, ticks=0)], WINDOW)
    watch.time += 300
    cpu.begin([process(1, ticks=TICKS)], WINDOW)  # not taken: the earlier one is old enough
    cpu.take([process(1, ticks=30 * TICKS)])
    assert cpu.percent([process(1)]) == pytest.approx(10)
    watch.time += OLDEST_READING + 1
    cpu.begin([process(1, ticks=31 * TICKS)], WINDOW)  # taken: nobody knows when the earlier time was spent
    watch.time += 10
    cpu.take([process(1, ticks=32 * TICKS)])
    assert cpu.percent([process(1)]) == pytest.approx(10)


def test_the_window_is_waited_for_once() -> None:
    watch, reads = Watch(), []
    cpu = Cpu(watch)

    def read() -> list:  # type: ignore[type-arg]
        reads.append(watch.time)
        return [process(1)]

    async def work() -> None:
        cpu.begin([process(1)], timedelta(milliseconds=1))
        watch.time += 0.001
        await cpu.end(read, timedelta(milliseconds=1))

    asyncio.run(work())
    assert len(reads) == 1
    assert cpu.fresh
    watch.time += FRESH_RESULT + 1
    assert not cpu.fresh

"""The fleet of the demo as its dashboard shows it: compressed time, GPUs with one holder, and recorded weeks."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from gpukeeper.blocking import in_thread, real_seconds, real_span
from gpukeeper.interfaces.link import Demo
from gpukeeper.model.event import Closed, NodeTested
from gpukeeper.platforms.simulated import world
from gpukeeper.platforms.simulated.demo import SPAN, ShownUsers, held_gpus, recorded, shown_world
from gpukeeper.platforms.simulated.users import places
from gpukeeper.platforms.simulated.world import PacedLoop, VirtualLoop, run_virtually

NOW = datetime(2026, 3, 2, 8, tzinfo=UTC)


def test_a_paced_loop_jumps_until_it_keeps_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = [0.0]  # for the kernel, which stands for the real time here

    def select(self: object, timeout: float | None = None) -> list[object]:
        waited.append(timeout or 0.0)
        return []

    async def live() -> tuple[float, float, float]:
        begun = loop.time()
        await asyncio.sleep(3600)
        jumped = loop.time() - begun
        assert sum(waited) == 0
        loop.keep_pace(100.0)
        begun = loop.time()
        await asyncio.sleep(5)
        return jumped, loop.time() - begun, sum(waited)

    loop = PacedLoop()
    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    jumped, passed, real = run_virtually(live(), loop)
    assert jumped == pytest.approx(3600)
    assert passed == pytest.approx(5)
    assert real == pytest.approx(0.05)


def test_what_waits_for_a_disk_keeps_its_real_deadline() -> None:
    async def live() -> str:
        loop.keep_pace(1000.0)
        assert real_seconds(2.0) == 2000.0
        assert real_span(timedelta(seconds=2)) == timedelta(seconds=2000)
        return await in_thread(slow, timedelta(seconds=30))

    def slow() -> str:
        time.sleep(0.05)
        return "read"

    loop = PacedLoop()
    assert run_virtually(live(), loop) == "read", "50 s of its own time passed meanwhile"


def test_seconds_of_an_ordinary_loop_are_real() -> None:
    async def live() -> float:
        return real_seconds(2.5)

    assert asyncio.run(live()) == 2.5


def test_the_time_of_a_demo_follows_from_the_real_one() -> None:
    demo = Demo(began=NOW, real=NOW + timedelta(days=1), pace=60.0)
    assert demo.time(demo.real) == NOW
    assert demo.time(demo.real + timedelta(seconds=90)) == NOW + timedelta(minutes=90)


def test_users_take_free_gpus_only() -> None:
    loop = VirtualLoop()
    world = shown_world(7, loop, NOW)
    users, seen = ShownUsers(world, timedelta(hours=1)), 0
    for _ in range(100):
        loop.skip(300)
        world.pulse()
        for place in world.places:
            held, taken = held_gpus(world, place), users.some_gpus(place)
            assert held.isdisjoint(taken)
            assert len(taken) == len(set(taken))
            seen += len(held)
    loop.close()
    assert seen > 1000, "the fleet is in use"


def test_recorded_weeks_count_every_minute_of_every_gpu_once() -> None:
    found = recorded(7, NOW)
    minutes = Counter[tuple[str, str]]()
    for one in found.usage.hours:
        minutes[one.place, one.device] += one.minutes.bit_count()
    expected = int(SPAN / timedelta(minutes=1))
    assert minutes == {(place.place, gpu): expected for place in places() for gpu in place.gpus}


def test_recorded_lines_are_in_order_and_add_up_with_the_hours() -> None:
    found = recorded(7, NOW)
    assert [line.at for line in found.lines] == sorted(line.at for line in found.lines)
    assert found == recorded(7, NOW)
    assert found != recorded(8, NOW)
    given_back = sum(float(line.gpu_hours) for line in found.lines if isinstance(line, Closed))
    idle = sum(one.idle.bit_count() for one in found.usage.hours) / 60
    assert 0 < given_back <= idle
    assert sum(isinstance(line, NodeTested) for line in found.lines) == 4

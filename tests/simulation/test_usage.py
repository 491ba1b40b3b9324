"""The record of GPU usage against the truth: what the simulated fleet really did, minute by minute."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.series import RecordedHour, UsageFold, minute_of
from gpukeeper.model.subject import Outcome, Shape, State
from gpukeeper.platforms.simulated.demo import simulated_keeper
from gpukeeper.platforms.simulated.users import demo_world
from gpukeeper.platforms.simulated.world import VirtualLoop, World, run_virtually
from gpukeeper.views.usage import UsageSums, portions, total
from gpukeeper.wiring.demo import DEMO_POLICY
from tests.usage_in_memory import InMemoryUsage

pytestmark = pytest.mark.slow

LENGTH = timedelta(days=2)
KEPT = timedelta(minutes=15)  # a GPU stays its owner's after a stop by hand
# By minute, place and device: which things have it, and which of them use it. None: it ended, and the device may be
# kept for its owner.
Truth = dict[tuple[int, str, str], dict[str, bool | None]]


class Lived:
    """Some days of the fleet, with its true state noted in the middle of each minute. After each of `runs` but the last
    gpukeeper is killed, and comes back after the pause; only what it wrote is left."""

    def __init__(self, seed: int, runs: Sequence[timedelta] = (LENGTH,), pause: timedelta = timedelta()) -> None:
        loop = VirtualLoop()
        self.world = demo_world(seed, loop)
        self.truth: Truth = {}
        self.usage = InMemoryUsage()
        self.pauses: list[tuple[datetime, datetime]] = []
        keeper, book = simulated_keeper(self.world, self.usage), Rulebook(load_text(DEMO_POLICY, "policy").policy)
        self.begin = self.world.clock.now()

        async def live() -> None:
            stop = asyncio.Event()
            noting = asyncio.create_task(_note(self.world, self.truth, stop))
            for number, length in enumerate(runs):
                again = simulated_keeper(self.world, self.usage)
                again = replace(again, ledger=keeper.ledger, signals=keeper.signals)
                ended = asyncio.Event()
                task = asyncio.create_task(watch(Watch(again, lambda: book, ended)))
                await asyncio.sleep(length.total_seconds())
                if number < len(runs) - 1:
                    task.cancel()
                    killed = self.world.clock.now()
                    await asyncio.sleep(pause.total_seconds())
                    self.pauses.append((killed, self.world.clock.now()))
                else:
                    ended.set()
                await asyncio.gather(task, return_exceptions=True)
            stop.set()
            await noting

        run_virtually(live(), loop)
        self.end = self.world.clock.now()

    @property
    def gpus(self) -> list[str]:
        return [gpu for place in self.world.places for gpu in place.gpus]

    def hours(self) -> list[RecordedHour]:
        return list(self.usage.reader().hours(self.begin, self.end, self.end))


async def _note(world: World, truth: Truth, stop: asyncio.Event) -> None:
    while not stop.is_set():
        now = world.clock.true_now()
        middle = now.replace(second=30, microsecond=0)
        await asyncio.sleep(((middle - now).total_seconds() - 0.001) % 60 + 0.001)
        world.pulse(may_crash=False)
        _note_minute(world, truth, world.clock.true_now())


def _note_minute(world: World, truth: Truth, now: datetime) -> None:
    for (_, place), things in world.things.items():
        for thing in things.values():
            if thing.shape is Shape.DEVICE or thing.root is not None:
                continue
            runs = thing.state is State.RUNNING or (thing.state is State.ENDED and thing.children > 0)
            ended = thing.ended if thing.outcome is Outcome.STOPPED else None
            kept = not runs and ended is not None and now - ended < KEPT
            for device in thing.devices if runs or kept else ():
                use = thing.use(now) > 0 if runs else None
                truth.setdefault((minute_of(now), place, device), {})[thing.ref.key] = use


@pytest.fixture(scope="module")
def lived() -> Lived:
    return Lived(7)


def near(truth: Truth, minute: int, place: str, device: str) -> list[dict[str, bool | None]]:
    """In this minute and those beside it: a minute in which something begins or ends counts as either."""
    return [truth.get((m, place, device), {}) for m in (minute - 1, minute, minute + 1)]


def wrong(lived: Lived) -> Counter[str]:
    """Minutes that were recorded as something that was not the case."""
    found: Counter[str] = Counter()
    for one in lived.hours():
        place, device = one.device.place, one.device.device
        for use in one.uses:
            for bit in range(60):
                mask, minute = 1 << bit, one.hour * 60 + bit
                around = near(lived.truth, minute, place, device)
                key = use.holder.key
                found["minutes"] += bool(use.minutes & mask)
                if use.active & mask and not any(now.get(key) for now in around):
                    found["active"] += 1
                if use.idle & mask and not any(now.get(key, True) in (False, None) for now in around):
                    found["idle"] += 1
                if use.unknown & mask and not any(key in now for now in around):
                    found["held"] += 1
                if use.free & mask and all(map(_is_held, around)) and not _has_holder(one, bit):
                    found["free"] += 1
    return found


def _is_held(holders: dict[str, bool | None]) -> bool:
    return any(use is not None for use in holders.values())


def _has_holder(one: RecordedHour, bit: int) -> bool:
    return any(use.holder.key and use.minutes >> bit & 1 for use in one.uses)


def test_every_recorded_minute_was_so(lived: Lived) -> None:
    found = wrong(lived)
    assert found["minutes"] > 50_000
    assert {name: count for name, count in found.items() if name != "minutes" and count} == {}


def test_the_sums_are_those_of_the_truth(lived: Lived) -> None:
    sums = UsageSums(lived.begin, lived.end, UTC)
    for one in lived.hours():
        sums.add(one)
    hours = total(sums.cells())
    assert hours.all == pytest.approx(len(lived.gpus) * LENGTH / timedelta(hours=1), rel=0.01)
    true_active, true_idle, true_kept = (_hours(lived.truth, use) for use in (True, False, None))
    true_free = hours.all - true_active - true_idle - true_kept
    # Less by what was not measured, never more; the minutes at the edges of a run are rounded.
    assert 0.9 * true_active < hours.active < 1.01 * true_active
    assert 0.8 * true_idle < hours.idle < 1.01 * (true_idle + true_kept)
    assert 0.9 * true_free < hours.free < 1.01 * (true_free + true_kept)
    assert hours.unknown < 0.1 * hours.all


def _hours(truth: Truth, state: bool | None) -> float:
    """GPU-hours in that state; what several have at once is divided."""
    parts = (sum(use is state for use in holders.values()) / len(holders) for holders in truth.values())
    return sum(parts) / 60


def test_each_gpu_has_sixty_minutes_an_hour(lived: Lived) -> None:
    for one in lived.hours():
        minutes = sum(part.hours((1 << 60) - 1).all for part in portions(one)) * 60
        assert minutes == pytest.approx(one.device.in_hour(one.hour).bit_count()), (one.hour, one.device)


def test_a_kill_loses_no_measured_minute_and_invents_none() -> None:
    lived = Lived(8, [timedelta(hours=9), timedelta(hours=7, minutes=3), timedelta(hours=3)], timedelta(minutes=50))
    found = wrong(lived)
    assert {name: count for name, count in found.items() if name != "minutes" and count} == {}
    for killed, back in lived.pauses:
        sums = UsageSums(killed + timedelta(minutes=1), back - timedelta(minutes=1), UTC)
        for one in lived.hours():
            sums.add(one)
        hours = total(sums.cells())
        assert hours.active + hours.idle + hours.free == 0, "nobody looked"
        assert hours.unknown == pytest.approx(len(lived.gpus) * 48 / 60)


def test_recording_everything_again_changes_nothing() -> None:
    lived = Lived(9, [timedelta(hours=6)])
    before = lived.hours()
    uses = tuple(use for one in before for use in one.uses)
    asyncio.run(lived.usage.record(UsageFold(hours=uses)))
    assert lived.hours() == before

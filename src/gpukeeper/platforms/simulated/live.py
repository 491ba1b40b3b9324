"""The fleet of the demo, watched while time passes: each snapshot is some minutes after the previous one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.fleet import FleetSnapshot, observe_fleet
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Shape, State
from gpukeeper.platforms.simulated.clock import VirtualLoop
from gpukeeper.platforms.simulated.fleet import demo_world
from gpukeeper.platforms.simulated.week import simulated_keeper

BEFORE = timedelta(hours=8)  # so that the first snapshot is not empty
PACE = timedelta(minutes=10)
MEMORY_MIB, USED_MIB = 81_920, 61_440


@dataclass
class LiveFleet:
    keeper: Keeper
    book: Rulebook
    loop: VirtualLoop

    def now(self) -> datetime:
        return self.keeper.clock.now()

    def snapshot(self) -> FleetSnapshot:
        self.loop.run_until_complete(asyncio.sleep(PACE.total_seconds()))
        found = self.loop.run_until_complete(observe_fleet(self.keeper, self.book))
        held = {
            (view.subject.ref.place, device)
            for view in found.views
            if view.subject.state is State.RUNNING and isinstance(view.subject.devices, tuple)
            if view.subject.shape is not Shape.DEVICE
            for device in view.subject.devices
        }
        found.views = [_with_memory(view, held) for view in found.views]
        return found


@contextmanager
def live_fleet(seed: int, policy: Policy) -> Iterator[LiveFleet]:
    loop, book = VirtualLoop(), Rulebook(policy)
    keeper = simulated_keeper(demo_world(seed, loop))
    stop = asyncio.Event()
    passes = loop.create_task(watch(Watch(keeper, lambda: book, stop)))
    try:
        loop.run_until_complete(asyncio.sleep(BEFORE.total_seconds()))
        yield LiveFleet(keeper, book, loop)
    finally:
        stop.set()
        loop.run_until_complete(asyncio.wait([passes]))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _with_memory(view: View, held: set[tuple[str, str]]) -> View:
    """Simulated workloads use no memory: a device in use shows some, so that the column is not empty."""
    subject = view.subject
    if subject.shape is not Shape.DEVICE:
        return view
    used = USED_MIB if (subject.ref.place, subject.ref.uid) in held else 0
    labels = {**subject.labels, "memory_total_mib": str(MEMORY_MIB), "memory_used_mib": str(used)}
    return msgspec.structs.replace(view, subject=msgspec.structs.replace(subject, labels=labels))

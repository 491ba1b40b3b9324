"""A compressed week on the simulated fleet: the real engine in virtual time, and the results, as values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from gpukeeper.engine import requests
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import UsageStore
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Result, Verdict
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.event import Closed, Decided, Event, Passed, WarningSent
from gpukeeper.model.policy import Policy
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.workload import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform, SimulatedTerminal
from gpukeeper.platforms.simulated.clock import VirtualLoop, run_virtually
from gpukeeper.platforms.simulated.fleet import demo_world
from gpukeeper.platforms.simulated.world import World

LAST = 12
Sums = list[tuple[str, int, float, int]]


@dataclass(frozen=True)
class Week:
    """`by_rule` and `by_owner`: name, reclaimed, GPU-hours, bytes; most first."""

    seed: int
    length: timedelta
    places: int
    passes: int
    reclaimed: int
    warned: int
    changed: int
    kept_by_hold: int
    by_rule: Sums
    by_owner: Sums
    last: list[Closed]

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def simulated_keeper(world: World, usage: UsageStore | None = None) -> Keeper:
    platforms = tuple(SimulatedPlatform(world, place) for place in world.places)
    return Keeper(
        platforms=platforms,
        ledger=InMemoryLedger(),
        signals=InMemorySignals(),
        evidence=InMemoryEvidence(),
        notifier=Messages((InsideWorkload(platforms), SimulatedTerminal(world))),
        clock=world.clock,
        meter=SimulatedMeter(world),
        usage=usage,
    )


def play(
    seed: int, length: timedelta, policy: Policy, on_report: Callable[[PassReport], None] = lambda report: None
) -> Week:
    loop = VirtualLoop()
    world = demo_world(seed, loop)
    keeper, book = simulated_keeper(world), Rulebook(policy)

    async def live() -> None:
        stop = asyncio.Event()
        loop.call_later(length.total_seconds(), stop.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(keeper, lambda: book, stop, on_report)))
            group.create_task(owners_hold(keeper, book, world, stop))

    run_virtually(live(), loop)
    assert isinstance(keeper.ledger, InMemoryLedger)
    return _week(seed, length, len(world.places), keeper.ledger.lines)


async def owners_hold(keeper: Keeper, book: Rulebook, world: World, stop: asyncio.Event, share: float = 0.25) -> None:
    """Some of the owners who are warned hold their work."""
    warned: list[tuple[str, str]] = []
    world.on_warning = lambda owner, message: warned.append((owner, message.partition(": ")[0]))
    while not stop.is_set():
        await asyncio.sleep(300)
        for owner, path in warned:
            if world.rng.random() < share:
                with suppress(KeeperError):
                    await requests.hold(keeper, book, path, owner, None, reason="still needed")
        warned.clear()


def _week(seed: int, length: timedelta, places: int, lines: list[Event]) -> Week:
    closed = [x for x in lines if isinstance(x, Closed)]
    reclaimed = [x for x in closed if x.result is Result.RECLAIMED]
    held = [x for x in lines if isinstance(x, Decided) and x.rule == "hold" and x.verdict is Verdict.PROTECT]
    return Week(
        seed=seed,
        length=length,
        places=places,
        passes=sum(isinstance(x, Passed) for x in lines),
        reclaimed=len(reclaimed),
        warned=sum(isinstance(x, WarningSent) for x in lines),
        changed=sum(x.result is Result.CHANGED for x in closed),
        kept_by_hold=len({x.ref.uid for x in held if x.ref}),
        by_rule=_sums(reclaimed, lambda x: x.rule),
        by_owner=_sums(reclaimed, lambda x: x.owner or "unknown"),
        last=reclaimed[-LAST:],
    )


def _sums(lines: list[Closed], name: Callable[[Closed], str]) -> Sums:
    found: dict[str, tuple[int, float, int]] = {}
    for line in lines:
        count, hours, size = found.get(name(line), (0, 0.0, 0))
        hours += 0.0 if isinstance(line.gpu_hours, Unknown) else line.gpu_hours
        size += 0 if isinstance(line.bytes_back, Unknown) else line.bytes_back
        found[name(line)] = (count + 1, hours, size)
    return sorted(((key, *sums) for key, sums in found.items()), key=lambda row: (-row[1], row[0]))

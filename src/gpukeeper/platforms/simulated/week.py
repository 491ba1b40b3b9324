"""A compressed week on the simulated fleet: the real engine in virtual time, and the results, as values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpukeeper.engine import requests
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import UsageStore
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.event import Closed, Decided, Event, Held, Intended, Passed, Released, WarningSent
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import State
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.workload import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform, SimulatedTerminal
from gpukeeper.platforms.simulated.clock import VirtualLoop, run_virtually
from gpukeeper.platforms.simulated.fleet import demo_world
from gpukeeper.platforms.simulated.world import LogEntry, World

LAST = 12
PACE = timedelta(hours=4)  # mean time between two arrivals at a place: half of the default, for a week in some seconds
NOT_SUSPENDED = ("max_runtime", "request")  # by the hold of a user
ENDS_RUNNING = ("max_runtime", "restart_loop", "orphan", "live_children", "taken_gpu", "request")  # rules
Sums = list[tuple[str, int, float, int]]


@dataclass(frozen=True)
class Week:
    """`by_rule` and `by_owner`: name, reclaimed, GPU-hours, bytes; most first. `wrong`: see `wrong_steps`."""

    seed: int
    length: timedelta
    places: int
    gpus: int
    passes: int
    reclaimed: int
    gpu_hours: float
    bytes: int
    wrong: int
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
    world = demo_world(seed, loop, PACE)
    keeper, book = simulated_keeper(world), Rulebook(policy)

    async def live() -> None:
        stop = asyncio.Event()
        loop.call_later(length.total_seconds(), stop.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(keeper, lambda: book, stop, on_report)))
            group.create_task(owners_hold(keeper, book, world, stop))

    run_virtually(live(), loop)
    assert isinstance(keeper.ledger, InMemoryLedger)
    return _week(world, length, keeper.ledger.lines)


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


def wrong_steps(world: World, lines: Sequence[Event]) -> list[str]:
    """Of the steps that changed something, those that the simulated world knows to be wrong at that moment: it removed
    what was needed, or ran although its rule is about work that has ended; it stopped work as idle whose GPUs were in
    use; or its owner held it."""
    held: dict[str, datetime] = {}
    on_hold: set[str] = set()  # steps
    rules: dict[str, str] = {}
    for line in lines:
        uid = "" if line.ref is None else line.ref.uid
        if isinstance(line, Held):
            held[uid] = max(line.hold.until, held.get(uid, line.hold.until))
        elif isinstance(line, Released):
            held.pop(uid, None)
        elif isinstance(line, Intended):
            rules[line.step] = line.rule
            if uid in held and line.at < held[uid] and line.rule not in NOT_SUSPENDED:
                on_hold.add(line.step)
    acts = [entry for entry in world.log if entry.kind == "act" and entry.effect in ("done", "halfway")]
    return [act.step for act in acts if act.step in on_hold or _is_wrong(act, rules.get(act.step, ""))]


def _is_wrong(act: LogEntry, rule: str) -> bool:
    if rule == "idle" and act.working:
        return True
    runs = rule not in ENDS_RUNNING and (act.state == State.RUNNING.value or act.children > 0)
    return act.action == Action.REMOVE.value and (runs or act.in_use or act.busy or act.needed)


def _week(world: World, length: timedelta, lines: list[Event]) -> Week:
    closed = [x for x in lines if isinstance(x, Closed)]
    reclaimed = [x for x in closed if x.result is Result.RECLAIMED]
    held = [x for x in lines if isinstance(x, Decided) and x.rule == "hold" and x.verdict is Verdict.PROTECT]
    by_rule = _sums(reclaimed, lambda x: x.rule)
    return Week(
        seed=world.seed,
        length=length,
        places=len(world.places),
        gpus=sum(len(place.gpus) for place in world.places),
        passes=sum(isinstance(x, Passed) for x in lines),
        reclaimed=len(reclaimed),
        gpu_hours=sum(row[2] for row in by_rule),
        bytes=sum(row[3] for row in by_rule),
        wrong=len(wrong_steps(world, lines)),
        warned=sum(isinstance(x, WarningSent) for x in lines),
        changed=sum(x.result is Result.CHANGED for x in closed),
        kept_by_hold=len({x.ref.uid for x in held if x.ref}),
        by_rule=by_rule,
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

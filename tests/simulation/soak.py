"""Weeks of churn in virtual time over a real ledger on disk, and what gpukeeper holds at the end of each day.

Things come and go, platforms answer late, wrongly or not at all, commands are lost, the clock jumps, the daemon dies and
starts again, and the ledger is rotated every night. What is held must follow what is there, not what ever was.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.interfaces.telemetry.metrics import Metrics
from gpukeeper.ledger.archive import rotate
from gpukeeper.ledger.in_memory import InMemoryEvidence
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.signals import SqliteSignals, open_signals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.condition import Advice, Condition
from gpukeeper.model.decision import Accepted, Evidence
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import LedgerKeep, Policy
from gpukeeper.model.series import Signal
from gpukeeper.model.subject import Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedNotifier, SimulatedPlatform
from gpukeeper.platforms.simulated.clock import VirtualClock, VirtualLoop, run_virtually
from gpukeeper.platforms.simulated.faults import ROUGH
from gpukeeper.platforms.simulated.people import People
from gpukeeper.platforms.simulated.world import Crashed, World
from tests.simulation.harness import PLACES, POLICY

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FAULTS = msgspec.structs.replace(ROUGH, crash=0.0003, bug=0.0005, stir=0.002)
GROW_WITH_TIME = frozenset({"journal", "series", "buckets"})  # for as long as they are kept
KEEP = LedgerKeep(keep=4 * DAY, archive_after=DAY, signals=DAY)


class Held(msgspec.Struct, frozen=True):
    """At the end of a day. `kept`: entries of everything the engine and the metrics remember, by name."""

    things: int  # that are there
    kept: dict[str, int]
    rows: dict[str, int]
    blocks: int  # of memory that Python objects have
    descriptors: int
    threads: int


class Inline(ThreadPoolExecutor):
    """Does it at once: virtual time does not pass while a real disk is written."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class CleanGpus:
    def __init__(self, world: World) -> None:
        self._world = world

    async def shares(self) -> dict[str, float]:
        return {gpu: 1.0 for place in self._world.places for gpu in place.gpus}

    async def condition(self, uuid: str, since: datetime) -> Condition:
        return Condition(
            uuid=uuid,
            at=self._world.clock.now(),
            memory_used_mib=600,
            advice=Advice.NONE,
            remap_pending=False,
            remap_failed=False,
            sliced=False,
            reset_alone=True,
        )

    async def reset(self, uuid: str) -> Accepted:
        return Accepted()


class LastEvidence(InMemoryEvidence):
    """Of the last few steps only; a store has its own retention."""

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        while len(self.saved) > 50:
            del self.saved[next(iter(self.saved))]
        return await super().save(ref, step, at, evidence)


@dataclass
class Soak:
    world: World
    path: Path
    days: int
    policy: Policy
    held: list[Held] = field(default_factory=list)
    lives: int = 0
    passes: int = 0
    created: int = 0


def grown(held: Sequence[Held]) -> list[str]:
    """What the last third of the days has more of than the second. The first is for caches to fill."""
    third = len(held) // 3
    before, after = held[third : 2 * third], held[-third:]
    problems = []
    for name, most in (("blocks", 1.03), ("descriptors", 1.1), ("threads", 1.1)):
        was, now = (mean(getattr(one, name) for one in days) for days in (before, after))
        if now > was * most:
            problems.append(f"{name}: {was:.0f} and later {now:.0f}")
    # As many as there ever were at once, and those of the day before; a breaker that is open keeps a few for longer.
    there = 2 * max(one.things for one in held)
    for kind in ("kept", "rows"):
        for name in getattr(held[0], kind).keys() - GROW_WITH_TIME:
            most = max(getattr(one, kind)[name] for one in held)
            if most > there:
                problems.append(f"{name}: {most} entries, and never more than {there // 2} things")
    for name in GROW_WITH_TIME:
        was, now = (mean(one.rows[name] for one in days) for days in (before, after))
        if now > 2 * was:
            problems.append(f"{name}: {was:.0f} rows and later {now:.0f}")
    return sorted(problems)


def soak(folder: Path, days: int, seed: int = 1, every: timedelta = 4 * HOUR) -> Soak:
    """`every`: between two passes; what comes and what is measured follows it, and so does how long this takes."""
    loop = VirtualLoop()
    loop.set_default_executor(Inline())
    world = World(seed, VirtualClock(loop), PLACES, FAULTS)
    People(world, pace=every).settle_in()
    policy = msgspec.structs.replace(
        POLICY,
        schedule=msgspec.structs.replace(POLICY.schedule, every=every),
        activity=msgspec.structs.replace(POLICY.activity, tick=every / 2),
        ledger=KEEP,
    )
    run = Soak(world, folder / "ledger.db", days, policy)
    run_virtually(_live(run, loop), loop)
    return run


async def _live(run: Soak, loop: VirtualLoop) -> None:
    metrics = Metrics(run.world.clock, elects=False, process=False)  # of the process that is replaced at a crash, too
    while len(run.held) < run.days:
        run.lives += 1
        ledger, signals = open_ledger(run.path, write=True), open_signals(run.path, write=True)
        ledger._thread, signals._thread = Inline(), Inline()
        for one in (ledger, signals):
            one._connection.execute("PRAGMA synchronous = OFF")  # nothing here loses its power
        try:
            await _one_life(run, loop, ledger, signals, metrics)
        except* Crashed:
            await asyncio.sleep(run.world.rng.uniform(1, 600))
        finally:
            ledger.close()
            signals.close()


async def _one_life(
    run: Soak, loop: VirtualLoop, ledger: SqliteLedger, signals: SqliteSignals, metrics: Metrics
) -> None:
    world, stop = run.world, asyncio.Event()
    keeper = Keeper(
        platforms=tuple(SimulatedPlatform(world, place) for place in world.places),
        ledger=ledger,
        signals=signals,
        evidence=LastEvidence(),
        notifier=SimulatedNotifier(world),
        clock=world.clock,
        meter=SimulatedMeter(world, (Signal.CPU,)),
        gpus=CleanGpus(world),
    )
    keeper.answering = True
    book = Rulebook(run.policy)

    def on_report(report: Any) -> None:
        run.passes += 1
        metrics.passed(report)

    w = Watch(keeper, lambda: book, stop, on_report)

    async def count_days() -> None:
        while len(run.held) < run.days:
            midnight = (len(run.held) + 1) * DAY.total_seconds()
            await asyncio.sleep(max(midnight - loop.time(), 0.0))
            with suppress(KeeperError):
                await rotate(ledger, KEEP, world.clock.now())
            run.created += sum(one.effect == "created" for one in world.log)
            world.log.clear()
            world.samples.clear()
            keeper.notifier.told.clear()  # type: ignore[attr-defined]
            _tidy(world)
            run.held.append(_measured(run, keeper, ledger, w, metrics))
        stop.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(watch(w))
        group.create_task(count_days())


def _tidy(world: World) -> None:
    """What no rule may touch is removed by people in the end; else the world itself would grow."""
    old = world.clock.true_now() - 2 * DAY
    for here in world.things.values():
        for thing in [one for one in here.values() if one.created < old and one.shape is not Shape.DEVICE]:
            world.remove(thing)
    for nodes in world.nodes.values():
        for node in nodes:
            node.trees = [tree for tree in node.trees if not tree.gone]


def _measured(run: Soak, keeper: Keeper, ledger: SqliteLedger, w: Watch, metrics: Metrics) -> Held:
    for one in gc.get_objects():
        if isinstance(one, functools._lru_cache_wrapper):
            one.cache_clear()  # bounded, and full only after a long time
    gc.collect()
    kept = {f"{type(one).__name__}.{name}": size for one in (keeper, w, metrics) for name, size in _sizes(one).items()}
    tables = ("memories", "present", "decided", "open_intents", "journal", "series", "buckets")
    rows = {one: ledger._connection.execute(f"SELECT count(*) FROM {one}").fetchone()[0] for one in tables}
    return Held(
        things=sum(map(len, run.world.things.values())),
        kept=kept,
        rows=rows,
        blocks=sys.getallocatedblocks(),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
    )


def _sizes(one: object) -> dict[str, int]:
    names = [f.name for f in fields(one)] if hasattr(one, "__dataclass_fields__") else list(vars(one))  # type: ignore[arg-type]
    found = {name: getattr(one, name) for name in names}
    return {
        name: len(value) for name, value in found.items() if isinstance(value, Sized) and not isinstance(value, str)
    }

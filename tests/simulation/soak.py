"""Weeks of churn in virtual time over a real ledger on disk, and what gpukeeper holds at the end of each day.

Things come and go, platforms answer late, wrongly or not at all, commands are lost, the clock jumps, the daemon dies
and starts again, and the ledger is rotated every night. What is held must follow what is there, not what ever was.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
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
from gpukeeper.model.decision import Accepted, Evidence
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.gpu import Advice, Condition
from gpukeeper.model.policy import LedgerKeep, Policy
from gpukeeper.model.series import Signal
from gpukeeper.model.subject import Ref, Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.terminals import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform, SimulatedTerminal
from gpukeeper.platforms.simulated.users import SimulatedUsers
from gpukeeper.platforms.simulated.world import Crashed, VirtualClock, VirtualLoop, World, run_virtually
from tests.simulation.harness import PLACES, POLICY, ROUGH

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FAULTS = msgspec.structs.replace(ROUGH, crash=0.0001, bug=0.0005, change=0.002)
FORGOTTEN, RETIRED = 1, 4  # days after which memory, and the state in the ledger, has nothing of what is gone
KEEP = LedgerKeep(keep=4 * DAY, archive_after=DAY, signals=DAY)


class Held(msgspec.Struct, frozen=True):
    """At the end of a day. `stale`: keys of things that are long gone, by what still has them."""

    things: int  # that are there
    stale: dict[str, int]
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
    alive: list[tuple[int, set[str]]] = field(default_factory=list)  # each day: the newest number, and what was there
    lives: int = 0
    passes: int = 0
    created: int = 0


def grown(held: Sequence[Held]) -> list[str]:
    """What outlasts its thing, and what the last third of the days has more of than the second. The first is for caches
    to fill."""
    problems = [f"{name}: {max(one.stale[name] for one in held)} of things long gone" for name in held[-1].stale]
    problems = [one for one in problems if ": 0 of" not in one]
    third = len(held) // 3
    before, after = held[third : 2 * third], held[-third:]
    for name, most in (("blocks", 1.03), ("descriptors", 1.1), ("threads", 1.1)):
        was, now = (mean(getattr(one, name) for one in days) for days in (before, after))
        if now > was * most:
            problems.append(f"{name}: {was:.0f} and later {now:.0f}")
    for name in held[-1].rows:
        was, now = (mean(one.rows[name] for one in days) for days in (before, after))
        if now > 2 * was + 10:
            problems.append(f"{name}: {was:.0f} rows and later {now:.0f}")
    return problems


def soak(folder: Path, days: int, seed: int = 1, every: timedelta = 4 * HOUR) -> Soak:
    """`every`: between two passes; what comes and what is measured follows it, and so does how long this takes."""
    loop = VirtualLoop()
    loop.set_default_executor(Inline())
    world = World(seed, VirtualClock(loop), PLACES, FAULTS)
    SimulatedUsers(world, pace=every).settle_in()
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
    platforms, terminal = tuple(SimulatedPlatform(world, place) for place in world.places), SimulatedTerminal(world)
    keeper = Keeper(
        platforms=platforms,
        ledger=ledger,
        signals=signals,
        evidence=LastEvidence(),
        notifier=Messages((InsideWorkload(platforms), terminal)),
        clock=world.clock,
        meter=SimulatedMeter(world, (Signal.CPU,)),
        gpus=CleanGpus(world),
        boot="simulated",
    )
    keeper.request_state.enabled = True
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
            terminal.told.clear()
            run.held.append(_measured(run, keeper, ledger, metrics))
            _tidy(world)
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


def _measured(run: Soak, keeper: Keeper, ledger: SqliteLedger, metrics: Metrics) -> Held:
    for one in gc.get_objects():
        if isinstance(one, functools._lru_cache_wrapper):
            one.cache_clear()  # bounded, and full only after a long time
    gc.collect()
    run.alive.append((int(run.world.new_uid()[1:]), {uid for here in run.world.things.values() for uid in here}))
    tables = ("memories", "present", "decided", "open_intents", "journal", "series", "buckets")
    query = ledger._connection.execute
    return Held(
        things=sum(map(len, run.world.things.values())),
        stale=_in_memory(run, keeper, metrics)
        | {name: _stale(run, RETIRED, (key for (key,) in query(f"SELECT key FROM {name}"))) for name in tables[:3]},
        rows={name: query(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables},
        blocks=sys.getallocatedblocks(),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
    )


def _in_memory(run: Soak, keeper: Keeper, metrics: Metrics) -> dict[str, int]:
    kept = {
        "back_off": keeper.back_off.keys(),
        "absences": keeper.absences.keys(),
        "gpu_checks": keeper.gpu_checks.keys(),
        "followed": keeper.followed.keys(),
        "overdue": metrics._overdue,
    }
    return {name: _stale(run, FORGOTTEN, keys) for name, keys in kept.items()}


def _stale(run: Soak, days: int, keys: Iterable[str]) -> int:
    """How many of these are of things that were made before then, and were not there at the end of any day since."""
    if len(run.alive) <= days:
        return 0
    lately, begin = run.alive[-days - 1 :], run.alive[-days - 1][0]
    there = set[str]().union(*(uids for _, uids in lately))
    uids = [key.rpartition("/")[2] for key in keys]
    return sum(uid.startswith("u") and int(uid[1:]) < begin and uid not in there for uid in uids)

"""Runs the real engine for hours of virtual time in a seeded, moving, failing world; hands out what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from zlib import crc32

import msgspec

from gpukeeper.engine import requests
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import LiveState, coming_of
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import Platform
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.activity import Waste
from gpukeeper.lifecycle.claims import runs_on_gpus
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Decision, View
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import Event, Intended
from gpukeeper.model.policy import (
    Activity,
    Amount,
    AtFinish,
    Breaker,
    Budget,
    ClassSettings,
    Demand,
    Exemption,
    Group,
    Kept,
    Mode,
    PlaceScope,
    Policy,
    Retention,
    Schedule,
    Temporary,
    Warnings,
)
from gpukeeper.model.series import Signal
from gpukeeper.model.subject import Ref, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.terminals import InsideWorkload
from gpukeeper.platforms.simulated.adapter import AdapterBug, SimulatedMeter, SimulatedPlatform, SimulatedTerminal
from gpukeeper.platforms.simulated.users import SimulatedUsers
from gpukeeper.platforms.simulated.world import (
    BEGIN,
    CALM,
    Crashed,
    Faults,
    LogEntry,
    SimulatedPlace,
    VirtualClock,
    VirtualLoop,
    World,
    run_virtually,
)

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
ROUGH_HOURS, CALM_HOURS = 2, 1.25
PEOPLE = ("ann", "bob", "eve")
USED_WHILE_DOWN = "used while gpukeeper was down"
ROUGH = Faults(
    change=0.02,
    snatch=0.05,
    silent=0.01,
    partial=0.02,
    blind=0.03,
    vague=0.15,
    mute=0.2,
    lost=0.05,
    halfway=0.06,
    garbled=0.04,
    refused=0.02,
    late=0.05,
    uncaptured=0.05,
    unmeasured=0.03,
    undelivered=0.1,
    crash=0.003,
    jump=0.0005,
)
BUGGY = msgspec.structs.replace(ROUGH, bug=0.01)
UNSTEADY = msgspec.structs.replace(ROUGH, jump=0.01, jumps=(-0.5, 0.4, 1), crash=0.05)


def _class(idle: int | None, max_runtime: int | None) -> ClassSettings:
    return ClassSettings(
        idle=None if idle is None else idle * MINUTE,
        max_runtime=None if max_runtime is None else max_runtime * MINUTE,
        start_grace=10 * MINUTE,
        hold=HOUR,
    )


POLICY = Policy(
    mode=Mode.ENFORCE,
    scope={
        "docker": PlaceScope(),
        "kubernetes": PlaceScope(namespaces=("research",)),
        "ray": PlaceScope(places=("ray-*",)),
        "host": PlaceScope(),
    },
    retention=Retention(succeeded=30 * MINUTE, failed=HOUR, stopped=30 * MINUTE, max=2 * HOUR),
    at_finish=AtFinish.RUNNING,
    classes={
        "managed": _class(idle=20, max_runtime=90),
        "docker": _class(idle=20, max_runtime=60),
        "compose": _class(idle=25, max_runtime=120),
        "devcontainer": _class(idle=None, max_runtime=90),
        "unknown": _class(idle=15, max_runtime=60),
        "cluster": _class(idle=None, max_runtime=None),
        "ray": _class(idle=None, max_runtime=None),
    },
    groups={"researcher": Group(members=("bob",), idle=22 * MINUTE, max_runtime=100 * MINUTE)},
    exemptions=(Exemption(reason="paper deadline", owner="eve", rules=("idle",), until=BEGIN + HOUR),),
    activity=Activity(signals=("cpu",), tick=MINUTE),
    budget=Budget(per_pass=Amount(count=2), per_hour=Amount(count=8), trees=4),
    breaker=Breaker(running=0.5, vanished=0.5, floor=1),
    warnings=Warnings(idle=(0.80, 0.95)),
    demand=Demand(idle_factor=0.5),
    temporary=tuple(
        Temporary(
            root="/tmp",
            names=("ray_tmp_*", "pip-*", "tmp*"),
            above=5 * 1024**3,
            older_than=HOUR / 2,
            keep=("tmp-keep-*",),
            platform=platform,
        )
        for platform in ("host", "ray")
    ),
    kept={
        "unfinished": Kept(older_than=timedelta()),
        "dead-session": Kept(older_than=40 * MINUTE, under_pressure=10 * MINUTE),
        "dead-logs": Kept(older_than=HOUR, under_pressure=20 * MINUTE),
        "report": Kept(older_than=HOUR),
    },
    hold_total=HOUR,
    hold_within=3 * HOUR,
    schedule=Schedule(every=5 * MINUTE),
)

PLACES = (
    SimulatedPlace("docker", "node-1", ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), PEOPLE),
    SimulatedPlace("kubernetes", "prod", tuple(f"GPU-{n}" for n in range(8)), PEOPLE, ("research", "private")),
    SimulatedPlace("ray", "ray-1", ("GPU-0", "GPU-1"), PEOPLE, nodes=("head", "worker-1")),
    SimulatedPlace("host", "node-2", ("GPU-0",), PEOPLE, nodes=("",)),
)


class LoggedLedger(InMemoryLedger):
    """Writes every line into the world's log too: lines, looks and acts have one order. May die before or after."""

    def __init__(self, world: World, before: InMemoryLedger | None = None) -> None:
        """After a crash: all state is rebuilt from the journal, but the record of the clock, which is no part of it."""
        super().__init__(() if before is None else before.lines)
        self._world = world
        self.clocks = {} if before is None else before.clocks

    async def append(self, lines: Sequence[Event]) -> None:
        self._world.pulse()
        await super().append(lines)
        now = self._world.clock.true_now()
        self._world.log += (
            LogEntry("line", now, line.ref.uid if line.ref else "", step=getattr(line, "step", ""), line=line)
            for line in lines
        )
        self._world.pulse()


class Told(msgspec.Struct, frozen=True):
    """What was forecast for running work when a pass had read it."""

    at: datetime
    ref: Ref
    incarnation: str
    steps: tuple[UpcomingAction, ...]


class Teller(LiveState):
    """Forecasts of some of the work that full passes read, as pages would show them. It changes nothing of a story."""

    def __init__(self, run: Run, book: Rulebook) -> None:
        super().__init__(enabled=True)
        self._run, self._book = run, book

    def note(self, platform: Platform, view: View, decision: Decision, now: datetime, waste: Waste | None) -> None:
        ref, calm = view.subject.ref, self._run.world.faults is CALM
        if calm and runs_on_gpus(view.subject) and hash_of(ref.uid, now) % 2 == 0:
            coming = coming_of(view, decision, self._book, now, platform.guards)
            self._run.told.append(Told(now, ref, view.subject.seen.incarnation, coming))


def hash_of(uid: str, now: datetime) -> int:
    """The same in every process."""
    return crc32(f"{uid} {now:%H:%M}".encode())


@dataclass
class Run:
    """Everything a checker may ask."""

    seed: int
    world: World
    policy: Policy = POLICY
    lines: list[Event] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    crashes: int = 0
    end: datetime = BEGIN

    def acts(self) -> list[tuple[int, LogEntry]]:
        return [(i, h) for i, h in enumerate(self.world.log) if h.kind == "act"]

    def intent(self, step: str) -> Intended | None:
        return next((x for x in self.lines if isinstance(x, Intended) and x.step == step), None)

    def last_look(self, uid: str, before: int) -> tuple[int, LogEntry] | None:
        for i in range(before - 1, -1, -1):
            entry = self.world.log[i]
            if entry.kind == "look" and entry.uid == uid:
                return i, entry
        return None


def simulate(seed: int, faults: Faults | None = None, policy: Policy = POLICY) -> Run:
    """In every tenth world the adapters have bugs besides; in another the clock jumps and gpukeeper dies often."""
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    # Every fourth world has two places that act at the same time and share the hour's budget: of work, or of trees.
    pair = PLACES[:2] if seed % 8 == 3 else PLACES[2:]
    places = pair if seed % 4 == 3 else (PLACES[seed % 3],)
    world = World(seed, clock, places, faults or {9: BUGGY, 2: UNSTEADY}.get(seed % 10, ROUGH))
    SimulatedUsers(world, pace=18 * MINUTE, hurry=3).settle_in()
    run = Run(seed, world, policy)
    run_virtually(_live(run, loop), loop)
    run.end = clock.true_now()
    return run


async def _live(run: Run, loop: VirtualLoop) -> None:
    world = run.world
    signals, evidence = InMemorySignals(), InMemoryEvidence()
    rough_end = loop.time() + ROUGH_HOURS * 3600
    end = rough_end + CALM_HOURS * 3600
    loop.call_at(rough_end, _calm_down, world)
    ledger = LoggedLedger(world)
    while end - loop.time() > 1:
        platforms = tuple(SimulatedPlatform(world, place) for place in world.places)
        keeper = Keeper(
            platforms=platforms,
            ledger=ledger,
            signals=signals,
            evidence=evidence,
            notifier=Messages((InsideWorkload(platforms), SimulatedTerminal(world))),
            clock=world.clock,
            meter=SimulatedMeter(world, (Signal.CPU,)),
            boot="simulated",
            live=Teller(run, Rulebook(run.policy)),
        )
        try:
            await _one_life(keeper, run, end - loop.time())
        except* Crashed:
            run.crashes += 1
            await _while_it_is_down(world, world.rng.uniform(1, 600))
            ledger = LoggedLedger(world, ledger)
    run.lines = ledger.lines


async def _while_it_is_down(world: World, seconds: float) -> None:
    """Somebody works meanwhile, and is done before gpukeeper looks again."""
    things = [t for here in world.things.values() for t in here.values() if t.devices and t.root is None]
    for thing in (one for one in things if one.state is State.RUNNING and one.shape is Shape.WORKLOAD):
        now = world.clock.true_now()
        if not thing.use(now) and world.rng.random() < 0.5:
            thing.busy_until = now + timedelta(seconds=0.9 * seconds)
            world.note("person", thing, effect=USED_WHILE_DOWN)
    await asyncio.sleep(seconds)


def _calm_down(world: World) -> None:
    world.faults = CALM
    world.fix_clock()


async def _one_life(keeper: Keeper, run: Run, seconds: float) -> None:
    stop = asyncio.Event()
    book = Rulebook(run.policy)
    asyncio.get_running_loop().call_later(seconds, stop.set)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch(Watch(keeper, lambda: book, stop)))
        group.create_task(_people_ask(keeper, run.world, book, stop))


async def _people_ask(keeper: Keeper, world: World, book: Rulebook, stop: asyncio.Event) -> None:
    """Owners hold and release and make keep-alive files; now and then an admin pauses everything for a while."""
    rng = world.rng
    with suppress(UsageError):  # nothing is paused
        await requests.resume(keeper, book, "root")  # whoever paused may have gone down with the last life
    while not stop.is_set():
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), rng.uniform(300, 1500))
        running = [t for here in world.things.values() for t in here.values() if t.state is State.RUNNING and t.owner]
        with suppress(KeeperError, AdapterBug):  # one request fails, and is answered so
            dice = rng.random()
            if dice < 0.5 and running:
                thing = rng.choice(running)
                span = rng.choice((20 * MINUTE, HOUR, 3 * HOUR))
                request = requests.Request(verb="hold", workload=thing.ref.uid, seconds=span.total_seconds())
                await requests.hold(keeper, book, rng.choice((thing.owner, "ann")), request)
            elif dice < 0.6 and running:
                thing = rng.choice(running)
                await requests.release(keeper, book, thing.ref.uid, thing.owner or "")
            elif dice < 0.7 and world.faults is not CALM:
                await requests.pause(keeper, book, "root", "maintenance")
                await asyncio.sleep(rng.uniform(60, 1200))
                await requests.resume(keeper, book, "root")
            elif dice >= 0.8 and running:
                # A file inside a workload, made and taken away.
                thing = rng.choice(running)
                there = rng.choice((True, True, False, Unknown("its files could not be read")))
                thing.marks = msgspec.structs.replace(thing.marks, keep_alive=there)

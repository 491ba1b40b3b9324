"""The simulated fleet as the demo shows it: a compressed week with the real engine in virtual time, snapshots while
time passes, the GPUs and users of a dashboard, and what was recorded before it begins (made by a formula: to
simulate that would take a minute).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from zlib import crc32

import msgspec

from gpukeeper.engine import requests
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import UsageStore
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.engine.view import FleetSnapshot, observe_fleet
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Result, Snapshot, Verdict, View
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.event import (
    Closed,
    Decided,
    Event,
    Held,
    Intended,
    NodeTested,
    Passed,
    Quarantined,
    Released,
    Restored,
    WarningSent,
)
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.series import DevicePresence, Holder, HourUse, Sample, Signal, UsageFold, minute_of, moment_of
from gpukeeper.model.subject import Gone, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import due_in_words, in_words
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.terminals import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform, SimulatedTerminal
from gpukeeper.platforms.simulated.users import PEOPLE, SimulatedUsers, demo_world, places
from gpukeeper.platforms.simulated.world import (
    LogEntry,
    SimulatedPlace,
    VirtualClock,
    VirtualLoop,
    World,
    run_virtually,
)

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


def play_week(
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
                    request = requests.Request(verb="hold", workload=path, reason="still needed")
                    await requests.hold(keeper, book, owner, request)
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


PLAYED_BEFORE = timedelta(hours=8)  # so that the first snapshot is not empty
LIVE_PACE = timedelta(minutes=10)
MEMORY_MIB, USED_MIB = 81_920, 61_440


@dataclass
class LiveFleet:
    keeper: Keeper
    book: Rulebook
    loop: VirtualLoop

    def now(self) -> datetime:
        return self.keeper.clock.now()

    def snapshot(self) -> FleetSnapshot:
        self.loop.run_until_complete(asyncio.sleep(LIVE_PACE.total_seconds()))
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
        loop.run_until_complete(asyncio.sleep(PLAYED_BEFORE.total_seconds()))
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


MODELS: Mapping[str, tuple[str, int]] = {  # by place: model, and its memory in MiB
    "node-1": ("NVIDIA A100-SXM4-80GB", 81_920),
    "node-2": ("NVIDIA L40S", 46_068),
    "node-3": ("NVIDIA H100 80GB HBM3", 81_559),
    "prod": ("NVIDIA H200", 143_771),
    "ray-1": ("NVIDIA RTX A6000", 49_140),
    "ray-2": ("NVIDIA RTX A6000", 49_140),
}


ARRIVALS: Mapping[str, timedelta] = {"kubernetes": timedelta(minutes=5)}  # mean time between two, by platform
OTHER_ARRIVALS = timedelta(minutes=25)


def shown_world(seed: int, loop: VirtualLoop, begin: datetime) -> World:
    world = World(seed, VirtualClock(loop, begin), places())
    ShownUsers(world, OTHER_ARRIVALS).settle_in()
    return world


class ShownUsers(SimulatedUsers):
    """Of a GPU that several workloads claim the dashboard shows a tile for each, which is rare on a real machine."""

    def pace(self, place: SimulatedPlace) -> timedelta:
        return ARRIVALS.get(place.platform, OTHER_ARRIVALS)

    def some_gpus(self, place: SimulatedPlace) -> tuple[str, ...]:
        wanted, taken = super().some_gpus(place), held_gpus(self._world, place)
        return tuple(gpu for gpu in place.gpus if gpu not in taken)[: len(wanted)]


def held_gpus(world: World, place: SimulatedPlace) -> frozenset[str]:
    things = world.things[place.key].values()
    running = (one for one in things if one.state is State.RUNNING and one.shape is not Shape.DEVICE)
    return frozenset(device for one in running for device in one.devices)


class ShownPlatform(SimulatedPlatform):
    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        async for page in super().observe(scope):
            held = held_gpus(self._world, self._place)
            subjects = tuple(_with_labels(one, held) for one in page.subjects)
            yield msgspec.structs.replace(page, subjects=subjects)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found = await super().read(ref)
        return _with_labels(found, held_gpus(self._world, self._place)) if isinstance(found, Subject) else found


def _with_labels(subject: Subject, held: frozenset[str]) -> Subject:
    if subject.shape is not Shape.DEVICE:
        return subject
    model, memory = MODELS[subject.ref.place]
    share = 0.4 + _noise(subject.ref.key) / 2 if subject.ref.uid in held else 0.0
    labels = {"model": model, "memory_total_mib": str(memory), "memory_used_mib": str(int(memory * share))}
    return msgspec.structs.replace(subject, labels={**subject.labels, **labels})


class ShownMeter(SimulatedMeter):
    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        return [_varied(one) for one in await super().read(subjects)]


def _varied(sample: Sample) -> Sample:
    if sample.signal is not Signal.GPU or isinstance(sample.value, Unknown) or not sample.value:
        return sample
    name, minute = f"{sample.key} {sample.device}", int(sample.at.timestamp()) // 60
    value = 55 + 30 * _noise(name) + 14 * _noise(f"{name} {minute // 5}")
    return msgspec.structs.replace(sample, value=round(value, 1))


def _noise(name: str) -> float:
    """From 0 to 1, always the same for the same name."""
    return crc32(name.encode()) / 2**32


SPAN = timedelta(days=21)
LIMIT = timedelta(minutes=30)
LEAD = timedelta(minutes=15)
KINDS = {"docker": "container", "kubernetes": "trainjob", "ray": "process"}
NAMES = ("train", "eval", "tune", "notebook", "sweep", "render")
TESTED = "node-3"
RUNS = (20, 13, 6, 1)  # days ago
FIGURES = {"gemm.tflops bf16": 720.0, "memory_bandwidth.gb_per_s read": 3020.0, "stress.power_w sustained": 688.0}


class Recorded(NamedTuple):
    usage: UsageFold
    lines: tuple[Event, ...]


class Tenancy(NamedTuple):
    """One workload on one GPU, in minutes since 1970: busy, then idle until it was stopped or ended by itself."""

    ref: Ref
    owner: str
    class_: str
    begin: int
    idle: int
    end: int
    stopped: bool


def recorded(seed: int, until: datetime) -> Recorded:
    """The weeks before `until`."""
    rng = random.Random(f"recorded {seed}")
    since, end = minute_of(until - SPAN), minute_of(until)
    devices: list[DevicePresence] = []
    hours: list[HourUse] = []
    lines: list[Event] = []
    for place in places():
        for gpu in place.gpus:
            model = MODELS[place.place][0]
            devices.append(DevicePresence(place=place.place, device=gpu, since=since, until=end, model=model))
            last = since
            for one in _tenancies(rng, place, gpu, since, end):
                hours += _free(place.place, gpu, last, one.begin)
                hours += _held(place.place, gpu, one)
                lines += _reclaimed(rng, one) if one.stopped else ()
                last = one.end
            hours += _free(place.place, gpu, last, end)
    lines += [*_acceptance(rng, until), _quarantine(until)]
    lines.sort(key=lambda line: line.at)
    return Recorded(UsageFold(devices=tuple(devices), hours=tuple(hours)), tuple(lines))


def _tenancies(rng: random.Random, place: SimulatedPlace, gpu: str, since: int, end: int) -> Iterator[Tenancy]:
    """More and longer in working hours."""
    at = since
    while True:
        night = not 7 <= moment_of(at).hour < 19 or moment_of(at).weekday() > 4
        at += int(rng.expovariate(1 / (420 if night else 90)))
        busy, idle = rng.randrange(30, 540), rng.choice((0, 0, rng.randrange(5, 30), rng.randrange(31, 150)))
        if at + busy + idle >= end:
            return
        owner = rng.choice(PEOPLE)
        number = rng.randrange(10**6)
        name = f"{rng.choice(NAMES)}-{owner}-{number % 1000}"
        namespace = rng.choice(place.namespaces) if place.namespaces else ""
        ref = Ref(place.platform, place.place, KINDS[place.platform], name, f"r{number:06d}-{gpu}", namespace)
        class_ = "docker" if place.platform == "docker" else "cluster"
        yield Tenancy(ref, owner, class_, at, at + busy, at + busy + idle, timedelta(minutes=idle) > LIMIT)
        at += busy + idle


def _held(place: str, gpu: str, one: Tenancy) -> list[HourUse]:
    holder = Holder(key=one.ref.key, path=one.ref.path, owner=one.owner, class_=one.class_)
    busy = [
        HourUse(hour=hour, place=place, device=gpu, holder=holder, active=mask)
        for hour, mask in _masks(one.begin, one.idle)
    ]
    idle = [
        HourUse(hour=hour, place=place, device=gpu, holder=holder, idle=mask)
        for hour, mask in _masks(one.idle, one.end)
    ]
    return busy + idle


def _free(place: str, gpu: str, since: int, until: int) -> list[HourUse]:
    return [HourUse(hour=hour, place=place, device=gpu, free=mask) for hour, mask in _masks(since, until)]


def _masks(since: int, until: int) -> Iterator[tuple[int, int]]:
    """The minutes from `since` to `until`, by hour."""
    for hour in range(since // 60, -(-until // 60)):
        first, last = max(since - hour * 60, 0), min(until - hour * 60, 60)
        if first < last:
            yield hour, (1 << last) - (1 << first)


def _reclaimed(rng: random.Random, one: Tenancy) -> list[Event]:
    """Warned, stopped, and a few of them restored."""
    idle = timedelta(minutes=one.end - one.idle)
    at, reason = moment_of(one.end), f"idle for {in_words(idle)}, allowed {in_words(LIMIT)}"
    lines: list[Event] = [
        WarningSent(
            at=at - LEAD,
            ref=one.ref,
            owner=one.owner,
            rule="idle",
            stage=1,
            incarnation="run-1",
            limit=LIMIT,
            delivered=True,
            channel="terminal",
            message=f"{one.ref.path}: idle, will be stopped {due_in_words(at, at - LEAD)}",
            until=at,
        ),
        Closed(
            at=at,
            ref=one.ref,
            owner=one.owner,
            step=f"{one.ref.uid}-stop",
            action=Action.STOP,
            rule="idle",
            result=Result.RECLAIMED,
            reason=reason,
            incarnation="run-1",
            gpus_back=1,
            gpu_hours=idle / timedelta(hours=1),
            bytes_back=rng.randrange(1, 40) * 2**28,
            owner_verified=True,
        ),
    ]
    if rng.random() < 0.03:
        later = at + timedelta(minutes=rng.randrange(5, 300))
        lines.append(Restored(at=later, ref=one.ref, owner=one.owner, by=one.owner, evidence="", result="restored"))
    return lines


def _acceptance(rng: random.Random, until: datetime) -> Iterator[NodeTested]:
    """Four runs of one node; one of its GPUs gets slower, fails, and is replaced."""
    serials = [f"165372300{number:04d}" for number in range(41, 49)]
    for number, days in enumerate(RUNS):
        if number == len(RUNS) - 1:
            serials[5] = "1653723000077"
        slow = {0: 1.0, 1: 0.97, 2: 0.91}.get(number, 1.0)
        values, grades = {}, {}
        for index, serial in enumerate(serials):
            factor = slow if index == 5 else 1.0
            grades[serial] = {0.97: Grade.WARN, 0.91: Grade.FAIL}.get(factor, Grade.PASS)
            values[serial] = {
                name: round(figure * factor * rng.uniform(0.992, 1.008), 1) for name, figure in FIGURES.items()
            }
        verdict = {0.97: Grade.WARN, 0.91: Grade.FAIL}.get(slow, Grade.PASS)
        yield NodeTested(
            at=until - timedelta(days=days),
            ref=Ref("host", TESTED, "node", TESTED, TESTED),
            by="eve",
            run=f"{until - timedelta(days=days):%Y%m%d}-{TESTED}",
            verdict=verdict,
            reason="8 GPUs passed" if verdict is Grade.PASS else f"GPU {serials[5]}: gemm.tflops below its peers",
            device=MODELS[TESTED][0],
            expected=8,
            gpus=grades,
            values=values,
        )


def _quarantine(until: datetime) -> Quarantined:
    return Quarantined(
        at=until - timedelta(days=2),
        ref=Ref("kubernetes", "prod", "gpu", "GPU-31", "GPU-31"),
        by="eve",
        reason="ECC errors; a replacement is ordered",
    )

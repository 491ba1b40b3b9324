"""The port over the simulated world, with its faults: late, partial, missing, lost and garbled answers, concurrent
changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.devices.counters import NO_TERMINAL
from gpukeeper.engine.ports import Platform
from gpukeeper.model.decision import (
    Accepted,
    Action,
    ActResult,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
)
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.ports import Delivered, Message, NotDelivered
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Category, Gone, Outcome, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import UNKNOWABLE, Crashed, SimulatedPlace, Thing, World, subject_of

PAGE = 200
HINTS_EVERY = 120.0  # seconds
MUTE_EVERY = 40  # minutes
BUSY_CPU = 40.0
NOT_IN_USE: Mapping[Signal, float | Unknown] = {
    Signal.CPU: 0.0,
    Signal.NETWORK: 0.0,
    Signal.DISK: 0.0,
    Signal.TERMINAL: NO_TERMINAL,
}
IN_USE = {**NOT_IN_USE, Signal.CPU: BUSY_CPU}
RAN_MEANWHILE = "ran again, unseen"


class AdapterBug(Exception):
    """A bug in the adapter: an exception that the port does not allow."""


class SimulatedPlatform(Platform):
    """One place of the world. It uses the name of the platform that it simulates."""

    local = True
    guards: Mapping[Action, Guard] = {
        Action.STOP: Guard.LOOKED,
        Action.TRIM: Guard.ATOMIC,
        Action.REMOVE: Guard.ATOMIC,
    }

    def __init__(self, world: World, place: SimulatedPlace) -> None:
        self._world = world
        self._place = place
        if place.platform == "docker" and self.guards.get(Action.REMOVE) is Guard.ATOMIC:
            self.guards = {**self.guards, Action.REMOVE: Guard.NOT_RUNNING}  # as the real one

    @property
    def name(self) -> str:
        return self._place.platform

    @property
    def place(self) -> str:
        return self._place.place

    @property
    def precise(self) -> bool:
        """A cluster reports what changed; the others only that something did."""
        return self._place.platform == "kubernetes"

    def at_once(self, kind: str) -> int:
        return 8 if self.precise else 1

    @property
    def tidies(self) -> bool:
        return self.precise

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        await self._call()
        world, faults = self._world, self._world.faults
        if faults.silent and world.rng.random() < faults.silent:
            raise PlatformError(f"{self.name}/{self.place} did not answer within 10 s (3 tries)")
        here = [t for t in world.things[self._place.key].values() if self._covers(scope, t.ref)]
        running = sum(t.state is State.RUNNING and t.root is None and t.shape is Shape.WORKLOAD for t in here)
        world.note("listing", running=running, place=self.place)
        unseen: tuple[Unseen, ...] = ()
        if here and faults.partial and world.rng.random() < faults.partial:
            here = world.rng.sample(here, k=len(here) // 2)
            unseen = (Unseen("a part of the list", "the server closed the connection"),)
        now = world.clock.now()
        pages = [here[i : i + PAGE] for i in range(0, len(here), PAGE)] or [[]]
        for page in pages:
            subjects = tuple(subject_of(thing, now, self._vague(thing)) for thing in page)
            yield Snapshot(self.name, self.place, now, subjects, unseen)

    async def wake(self) -> AsyncIterator[Ref | None]:
        """A hint whenever a user does something."""
        world = self._world
        seen = 0
        while True:
            await asyncio.sleep(HINTS_EVERY)
            self._trip()
            if len(world.log) > seen:
                fresh, seen = world.log[seen:], len(world.log)
                changed = [entry for entry in fresh if entry.kind == "person" and entry.place == self.place]
                if changed and not self.precise:
                    yield None
                elif changed:
                    for ref in {self._ref(entry.uid) for entry in changed}:
                        yield ref

    def _ref(self, uid: str) -> Ref | None:
        """None: it is gone, and other things may have changed."""
        thing = next((one for one in self._world.things[self._place.key].values() if one.ref.uid == uid), None)
        return None if thing is None else thing.ref

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        await self._call()
        world, faults = self._world, self._world.faults
        if faults.blind and world.rng.random() < faults.blind:
            return Unknown("the platform did not answer")
        thing, now = world.find(ref), world.clock.now()
        if thing is None:
            world.note("look", uid=ref.uid, gone=True)
            return Gone(ref, now)
        vague = self._vague(thing)
        world.note("look", thing, vague=vague or "")
        return subject_of(thing, now, vague)

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        thing = self._world.things[self._place.key].get(uid)
        return await self.read(Ref(self.name, self.place, "container" if thing is None else thing.ref.kind, uid, uid))

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        await self._call()
        world = self._world
        if world.faults.uncaptured and world.rng.random() < world.faults.uncaptured:
            return Unknown("its log could not be read")
        if subject.shape is not Shape.WORKLOAD:
            return NothingToCapture("it has no log and no manifest")
        thing = world.find(subject.ref)
        if thing is None:
            return NothingToCapture("it no longer exists")
        world.note("capture", thing)
        manifest = msgspec.json.encode({"subject": subject, "what": list(what)})
        return Evidence({"manifest.json": manifest, "log.txt": b"epoch 1 done\n"})

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        await self._call()
        world, faults, action = self._world, self._world.faults, step.decision.action
        thing = world.find(fresh.ref)
        if thing is not None and faults.snatch and world.rng.random() < faults.snatch:
            world.rng.choice(world.changes)(thing)
            thing = world.find(fresh.ref)
        if thing is None:
            world.note("act", uid=fresh.ref.uid, step=step.id, action=action.value, gone=True, effect="changed")
            return Changed("it is gone")
        if faults.refused and world.rng.random() < faults.refused:
            world.note("act", thing, step=step.id, action=action.value, effect="refused")
            return Refused("the platform refused")
        if self.guards[action] is not Guard.LOOKED and not self.unchanged(thing, fresh):
            world.note("act", thing, step=step.id, action=action.value, effect="changed")
            return Changed("it is not the version that was read")
        missed = self._run_once_more(thing) if self.guards[action] is Guard.NOT_RUNNING else ""
        if not self.is_free(thing):
            world.note("act", thing, step=step.id, action=action.value, effect="changed")
            return Changed("it was opened, or work began beside it")
        if faults.lost and world.rng.random() < faults.lost:
            world.note("act", thing, step=step.id, action=action.value, effect="nothing")
            return Accepted()
        garbled = bool(faults.garbled) and world.rng.random() < faults.garbled
        if garbled and world.rng.random() < 0.5:
            world.note("act", thing, step=step.id, action=action.value, effect="nothing")
            return Unknown("the answer was lost")
        if thing.shape is Shape.TREE and faults.halfway and world.rng.random() < faults.halfway:
            world.note("act", thing, step=step.id, action=action.value, effect="halfway")
            return self._leave_half(thing)
        world.note("act", thing, step=step.id, action=action.value, effect="done", answer="lost" if garbled else "")
        self._do(thing, action)
        return Unknown("the answer was lost") if garbled else Accepted(bytes_back=fresh.size, missed=missed)

    def _run_once_more(self, thing: Thing) -> str:
        """Between the adapter's last read and the engine's act a user starts it, and it ends at once."""
        world = self._world
        if not (world.faults.snatch and world.rng.random() < world.faults.snatch):
            return ""
        now = world.clock.true_now()
        thing.start(now, timedelta())
        thing.end(now, Outcome.FAILED)
        world.note("person", thing, effect=RAN_MEANWHILE)
        return "it was started at the same time; that run is lost"

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        await self._call()
        world, thing = self._world, self._world.find(ref)
        if thing is not None:
            thing.start(world.clock.true_now(), busy_for=timedelta())
            return Accepted()
        if evidence is None:
            return Refused("it is gone and no evidence of it was captured")
        subject = msgspec.json.decode(evidence.files["manifest.json"], type=_Manifest).subject
        again = Thing(msgspec.structs.replace(ref, uid=world.new_uid()), world.clock.true_now())
        again.owner = subject.owner if isinstance(subject.owner, str) else None
        world.add(again)
        return Accepted()

    @staticmethod
    def unchanged(thing: Thing, fresh: Subject) -> bool:
        """What a real platform checks: uid and version."""
        return str(thing.version) == fresh.seen.version and thing.incarnation == fresh.seen.incarnation

    @staticmethod
    def is_free(thing: Thing) -> bool:
        """Opening a file changes no time and no version: it is checked again after a tree was moved away."""
        return thing.shape is not Shape.TREE or not (thing.in_use or thing.busy is not None)

    def _leave_half(self, thing: Thing) -> Unknown:
        """Moved away, under the same inode; the rest of it is found there."""
        world, name = self._world, thing.ref.name.rsplit("/", 1)[-1]
        thing.ref = msgspec.structs.replace(thing.ref, name=f"/tmp/.gpukeeper-trash-{thing.ref.uid}/{name}")  # noqa: S108
        thing.category, thing.size, thing.last_used = Category.UNFINISHED, thing.size // 2, world.clock.true_now()
        thing.touch()
        if world.rng.random() < 0.5:
            world.note("crash")
            raise Crashed
        return Unknown("the removal did not end in time")

    def _do(self, thing: Thing, action: Action) -> None:
        world = self._world
        match action:
            case Action.REMOVE:
                world.remove(thing, by="gpukeeper")
            case Action.STOP if thing.state is not State.ENDED:
                thing.end(world.clock.true_now(), Outcome.STOPPED)
            case Action.TRIM:
                for child in world.children_of(thing):
                    child.end(world.clock.true_now(), Outcome.STOPPED)
                thing.children = 0
                thing.touch()
            case _:
                pass

    def _covers(self, scope: PlaceScope, ref: Ref) -> bool:
        return not ref.namespace or any(fnmatchcase(ref.namespace, pattern) for pattern in scope.namespaces)

    def _vague(self, thing: Thing) -> str | None:
        world = self._world
        if world.faults.vague and world.rng.random() < world.faults.vague:
            return world.rng.choice(UNKNOWABLE)
        return "busy" if thing.category is Category.TEMPORARY and self._is_mute() else None

    def _is_mute(self) -> bool:
        """By the clock and not by chance, so that the rest of the world is the same."""
        world = self._world
        minute = int(world.clock.true_now().timestamp() // 60) + 7 * world.seed
        return minute % MUTE_EVERY < world.faults.mute * MUTE_EVERY

    def _trip(self) -> None:
        world = self._world
        if world.faults.bug and world.bugs.random() < world.faults.bug:
            world.note("bug", place=self.place)
            raise AdapterBug("planted by the simulation")

    async def _call(self) -> None:
        world = self._world
        world.pulse()
        self._trip()
        if world.faults.late and world.rng.random() < world.faults.late:
            await asyncio.sleep(world.rng.uniform(0.1, 60))
            world.pulse()


class SimulatedMeter:
    """Reads GPUs and, of the rest, the signals it is made for."""

    def __init__(self, world: World, signals: Sequence[Signal] = tuple(Signal)) -> None:
        self._world = world
        self._signals = signals
        self._before: dict[str, datetime] = {}  # by uid: when it was last read; lost when gpukeeper ends

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        world = self._world
        world.pulse()
        true_now, now = world.clock.true_now(), world.clock.now()
        samples: list[Sample] = []
        for subject in subjects:
            thing = world.find(subject.ref)
            if thing is None:
                continue
            failed = bool(world.faults.unmeasured) and world.rng.random() < world.faults.unmeasured
            since = self._before.pop(thing.ref.uid, None)
            use = thing.use(true_now)
            samples += _readings(thing, use, now, failed, self._signals, since)
            if not failed:
                self._before[thing.ref.uid] = now
                given = world.samples.setdefault(thing.ref.uid, [])
                given += [(true_now, device, use) for device in thing.devices]
        return samples


class SimulatedTerminal:
    """The terminals of every owner of the world, as a channel."""

    name = "terminal"

    def __init__(self, world: World) -> None:
        self._world = world
        self.told: list[tuple[str | None, str]] = []

    async def send(self, message: Message) -> Delivered | NotDelivered:
        world = self._world
        world.pulse()
        if message.owner is None or (world.faults.undelivered and world.rng.random() < world.faults.undelivered):
            return NotDelivered("no terminal took the message")
        self.told.append((message.owner, message.text))
        world.note("heard", message=message.text)
        world.on_warning(message.owner, message.text)
        return Delivered()


class _Manifest(msgspec.Struct):
    subject: Subject


def _readings(
    thing: Thing, use: float, now: datetime, failed: bool, signals: Sequence[Signal], since: datetime | None
) -> list[Sample]:
    key = thing.ref.key
    if failed:
        why = Unknown("the driver did not answer")
        return [Sample(key, Signal.GPU, device, now, why) for device in thing.devices]
    readings = [Sample(key, Signal.GPU, device, now, use, since=since) for device in thing.devices]
    others = IN_USE if use else NOT_IN_USE
    readings += [Sample(key, signal, "", now, others[signal], since=since) for signal in signals if signal in others]
    return readings

"""A small simulated place, a ledger in memory and virtual time: everything the engine needs, in one hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.observe import survey
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Step
from gpukeeper.model.event import Event, WarningSent
from gpukeeper.model.policy import (
    Activity,
    AtFinish,
    Breaker,
    ClassSettings,
    Demand,
    Mode,
    PlaceScope,
    Policy,
    Retention,
    Warnings,
)
from gpukeeper.model.subject import Outcome, Ref, Shape, State
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.terminals import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform, SimulatedTerminal
from gpukeeper.platforms.simulated.world import SimulatedPlace, Thing, VirtualClock, VirtualLoop, World, run_virtually

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
HERE = SimulatedPlace("docker", "node-3", ("GPU-0", "GPU-1"), ("ann", "bob"))
POLICY = Policy(
    mode=Mode.ENFORCE,
    scope={"docker": PlaceScope()},
    retention=Retention(succeeded=HOUR, failed=DAY, stopped=HOUR),
    at_finish=AtFinish.RUNNING,
    classes={"docker": ClassSettings(idle=30 * MINUTE, max_runtime=2 * HOUR), "api": ClassSettings()},
    activity=Activity(signals=("cpu",), tick=MINUTE),
    breaker=Breaker(running=1.0),
    warnings=Warnings(idle=(0.80, 0.95)),
    demand=Demand(idle_factor=0.5),
)
L = TypeVar("L")


class Harness:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.world = World(1, self.clock, (HERE,))
        self.ledger, self.signals, self.evidence = InMemoryLedger(), InMemorySignals(), InMemoryEvidence()
        self.terminal, self.meter = SimulatedTerminal(self.world), SimulatedMeter(self.world)
        self.platform: Any = SimulatedPlatform(self.world, HERE)
        self.policy = POLICY
        self.boot = "boot-1"

    @property
    def keeper(self) -> Keeper:
        """Made on the first use, so that a test can put its own parts in before."""
        if not hasattr(self, "_keeper"):
            self._keeper = Keeper(
                platforms=(self.platform,),
                ledger=self.ledger,
                signals=self.signals,
                evidence=self.evidence,
                notifier=self.notifier(self.platform),
                clock=self.clock,
                meter=self.meter,
                boot=self.boot,
            )
        return self._keeper

    def crash(self) -> None:
        """The next use is by a new process: only the ledger, what was measured, and the evidence survive."""
        del self._keeper

    def notifier(self, *platforms: Any) -> Messages:
        return Messages((InsideWorkload(platforms), self.terminal))

    def change_ports(self, **ports: Any) -> None:
        """Other ports from now on; what the keeper remembers stays."""
        self._keeper = replace(self.keeper, **ports)

    @property
    def book(self) -> Rulebook:
        return Rulebook(self.policy)

    def now(self) -> datetime:
        return self.clock.true_now()

    def set_policy(self, **changes: Any) -> None:
        self.policy = msgspec.structs.replace(self.policy, **changes)

    def add(self, name: str, **facts: Any) -> Thing:
        ref = Ref(
            "docker", "node-3", facts.pop("kind", "container"), name, self.world.new_uid(), facts.pop("space", "")
        )
        thing = Thing(ref, self.now() - facts.pop("age", 3 * HOUR), owner="ann")
        for fact, value in facts.items():
            setattr(thing, fact, value)
        return self.world.add(thing)

    def running(self, name: str, ago: timedelta = HOUR, **facts: Any) -> Thing:
        known = {"state": State.RUNNING, "started": self.now() - ago, "run": 1, "devices": ("GPU-0",)}
        return self.add(name, **(known | facts))

    def ended(self, name: str, ago: timedelta = 2 * HOUR, **facts: Any) -> Thing:
        over = {"state": State.ENDED, "ended": self.now() - ago, "outcome": Outcome.SUCCEEDED, "size": 500}
        return self.running(name, ago + HOUR, **(over | facts))

    def device(self, number: int) -> Thing:
        return self.add(f"GPU-{number}", kind="gpu", shape=Shape.DEVICE, state=State.RUNNING)

    async def overdue(self, name: str) -> Thing:
        """Runs beyond its maximum, was warned twice, and is due to be stopped."""
        thing = self.running(name, 3 * HOUR)
        await self.ledger.append([self.warned(thing, 1), self.warned(thing, 2)])
        return thing

    def warned(self, thing: Thing, stage: int) -> WarningSent:
        return WarningSent(
            at=self.now() - 30 * MINUTE,
            ref=thing.ref,
            rule="max_runtime",
            stage=stage,
            incarnation=thing.incarnation,
            limit=2 * HOUR,
            delivered=True,
            channel="terminal",
            message="",
        )

    async def decide(self) -> dict[str, Decision]:
        found = await survey(self.keeper, self.platform, self.book)
        return {one.seen.ref.name: one for one in found.decisions}

    async def step(self, thing: Thing, action: Action) -> Step:
        """The step that a pass would take on it now."""
        made = (await self.decide())[thing.ref.name]
        assert made.action is action, made
        return Step("1.1", made)

    async def pass_in_bulk(self) -> list[str]:
        """One pass. Returns the names of what its platform was asked to prepare together."""
        together: list[str] = []

        def batch(refs: Sequence[Ref]) -> AbstractAsyncContextManager[None]:
            together.extend(ref.name for ref in refs)
            return nullcontext()

        self.platform.batch = batch
        await reclaim(self.keeper, self.platform, self.book)
        return together

    def lines(self, kind: type[L]) -> list[L]:
        return [line for line in self.ledger.lines if isinstance(line, kind)]

    def order(self) -> list[str]:
        return [type(line).__name__ for line in self.ledger.lines]


def virtual(story: Callable[[Harness], Awaitable[None]]) -> Callable[[], None]:
    """Makes a test of a story that is told in virtual time."""

    def test() -> None:
        loop = VirtualLoop()

        async def tell() -> None:
            await story(Harness(loop))

        run_virtually(tell(), loop)

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return test


class Unwritable(InMemoryEvidence):
    """A full disk."""

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Any) -> Any:
        from gpukeeper.model.unknown import Unknown

        return Unknown("no space left on device")


def kinds(lines: Sequence[Event]) -> list[str]:
    return [type(line).__name__ for line in lines]

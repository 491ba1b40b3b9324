"""The simulated fleet behind the daemon's own parts, for a dashboard: real files in a temporary directory, compressed
time.

Begins with six hours that are simulated as fast as possible, in memory: files are written by threads, which cannot
keep up with virtual time. What was recorded in them is written to the files before time slows down to its pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from gpukeeper.config.load import load_text
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import EvidenceStore, Ledger, UsageStore
from gpukeeper.ledger.evidence import DirectoryEvidence, safe_name
from gpukeeper.ledger.in_memory import InMemoryLedger, InMemorySignals
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.paths import usage_path
from gpukeeper.ledger.signals import open_signals
from gpukeeper.ledger.usage import open_usage
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Evidence
from gpukeeper.model.identity import Ref
from gpukeeper.model.ports import Signals
from gpukeeper.model.series import Sample
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.usage import UsageFold
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.workload import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedTerminal
from gpukeeper.platforms.simulated.clock import PacedLoop
from gpukeeper.platforms.simulated.recorded import recorded
from gpukeeper.platforms.simulated.shown import ShownMeter, ShownPlatform, shown_world
from gpukeeper.platforms.simulated.week import owners_hold
from gpukeeper.platforms.simulated.world import World
from gpukeeper.wiring.demo import DEMO_POLICY
from gpukeeper.wiring.demo_backtest import record_in_background
from gpukeeper.wiring.session import Session

PACE = 60.0
BEFORE = timedelta(hours=6)
HOLDING = 0.1  # share of the owners who hold their work after a warning
ADMIN, OWNER = "eve", "ann"
POLICY = f"""{DEMO_POLICY.replace("every: 15m", "every: 5m")}
admins: [{ADMIN}]
prices:
  currency: EUR
  per_gpu_hour: {{"NVIDIA H200": 3.2, "NVIDIA H100*": 2.4, "NVIDIA A100*": 1.6, "NVIDIA L40S": 1.1, "NVIDIA RTX*": 0.8}}
"""
HOST = "demo"


@dataclass
class FleetDemo:
    """Made in a PacedLoop. `session` is there after `prepare`."""

    directory: Path
    seed: int
    now: datetime
    loop: PacedLoop
    session: Session = field(init=False)
    _world: World = field(init=False)

    async def prepare(self) -> None:
        loaded = load_text(POLICY, "the demo's policy")
        self._world = shown_world(self.seed, self.loop, self.now - BEFORE)
        book, before, meter = Rulebook(loaded.policy), _Before(), ShownMeter(self._world)
        await self._play(_keeper(self._world, meter, before.ledger, before, before, before), book, BEFORE)
        path = self.directory / "ledger.db"
        ledger, signals = open_ledger(path, write=True), open_signals(path, write=True)
        hours, evidence = (
            open_usage(usage_path(path), write=True),
            DirectoryEvidence(self.directory / "evidence", 2**30),
        )
        weeks = recorded(self.seed, self.now - BEFORE)
        await ledger.append([*weeks.lines, *before.ledger.lines])
        await hours.record(weeks.usage)
        for fold in before.folds:
            await hours.record(fold)
        await signals.add(before.samples)
        self.loop.keep_pace(PACE)  # until now no time passed: nothing waited for a timer
        for ref, step, at, files in before.saved:
            await evidence.save(ref, step, at, files)
        keeper = _keeper(self._world, meter, ledger, signals, evidence, hours)
        messages = keeper.notifier
        assert isinstance(messages, Messages)
        self.session = Session(keeper, book, loaded, [], ledger, signals, evidence, ADMIN, messages, hours=hours)

    async def play(self, stop: asyncio.Event) -> None:
        """Until it is stopped."""
        session = self.session
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(session.keeper, lambda: session.book, stop)))
            holding = group.create_task(owners_hold(session.keeper, session.book, self._world, stop, HOLDING))
            clock = session.keeper.clock
            backtest = group.create_task(record_in_background(session.ledger, clock, session.loaded, POLICY))
            await stop.wait()
            holding.cancel()
            backtest.cancel()

    async def _play(self, keeper: Keeper, book: Rulebook, length: timedelta) -> None:
        stop = asyncio.Event()
        self.loop.call_later(length.total_seconds(), stop.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(keeper, lambda: book, stop)))
            group.create_task(owners_hold(keeper, book, self._world, stop, HOLDING))


class _Before:
    """What is recorded in the hours before: ledger, signals, hours of GPUs, evidence; in memory, and as it came."""

    def __init__(self) -> None:
        self.ledger = InMemoryLedger()
        self.samples: list[Sample] = []
        self.folds: list[UsageFold] = []
        self.saved: list[tuple[Ref, str, datetime, Evidence]] = []
        self._signals = InMemorySignals()
        self.series = self._signals.series

    async def add(self, samples: Sequence[Sample]) -> None:
        self.samples += samples
        await self._signals.add(samples)

    async def record(self, found: UsageFold) -> None:
        self.folds.append(found)

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        self.saved.append((ref, step, at, evidence))
        return f"{at:%Y%m%d}/{safe_name(ref.name)}-{safe_name(step)}"

    async def load(self, name: str) -> Evidence | Unknown:
        return Unknown("not yet written")


def _keeper(
    world: World, meter: ShownMeter, ledger: Ledger, signals: Signals, evidence: EvidenceStore, usage: UsageStore
) -> Keeper:
    platforms = tuple(ShownPlatform(world, place) for place in world.places)
    return Keeper(
        platforms=platforms,
        ledger=ledger,
        signals=signals,
        evidence=evidence,
        notifier=Messages((InsideWorkload(platforms), SimulatedTerminal(world))),
        clock=world.clock,
        meter=meter,
        usage=usage,
        host=HOST,
    )

"""A plan over 100,000 workloads: seconds, and memory beyond a run over none.

The place hands out its workloads page by page and keeps none. The peer is the same place listed without deciding.
"""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from benchmarks.report import Figure, met, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Platform
from gpukeeper.engine.reclaim import PassReport, look_and_plan
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Evidence, Guard, NothingToCapture, Refused, Snapshot, Step
from gpukeeper.model.policy import ClassSettings, Mode, PlaceScope, Policy
from gpukeeper.model.subject import Gone, Outcome, Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.simulated.world import BEGIN

WORKLOADS, PAGE, RUNS = sized(100_000, tiny=1_000), 500, sized(3, tiny=1)
SECONDS, MEMORY = 5.0, 300.0  # targets; MiB
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
POLICY = Policy(
    mode=Mode.ENFORCE,
    scope={"docker": PlaceScope()},
    classes={"docker": ClassSettings(idle=HOUR / 2, max_runtime=2 * DAY)},
)
NO_VERB = Refused("a place to look at only")


class Measured(msgspec.Struct, frozen=True):
    """What a child process saw. `resident`: its peak, in KiB."""

    seconds: float
    resident: int
    due: int
    deferred: int


class FixedClock:
    def now(self) -> datetime:
        return BEGIN + DAY


class PagedPlatform(Platform):
    """Makes its workloads as they are asked for: half ended, of which a quarter is due; half run."""

    name = "docker"
    place = "large"
    local = True
    guards: Mapping[Action, Guard] = {Action.STOP: Guard.LOOKED, Action.REMOVE: Guard.ATOMIC}

    def __init__(self, workloads: int) -> None:
        self._workloads = workloads

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        rng, now = random.Random(7), FixedClock().now()
        for first in range(0, self._workloads, PAGE):
            numbers = range(first, min(first + PAGE, self._workloads))
            yield Snapshot(self.name, self.place, now, tuple(self._subject(n, rng, now) for n in numbers))

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        return Unknown("a place to list only")

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return Unknown("a place to list only")

    async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
        return ()

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        return NothingToCapture("a place to list only")

    async def act(self, step: Step, fresh: Subject) -> Accepted | Refused | Unknown:
        return NO_VERB

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        return NO_VERB

    def _subject(self, number: int, rng: random.Random, now: datetime) -> Subject:
        over = number % 2 == 0
        started = now - rng.uniform(2, 40) * HOUR
        ended = now - rng.uniform(0, 32) * HOUR if over else None
        ref = Ref(self.name, self.place, "container", f"run-{number}", f"uid-{number:09d}")
        return Subject(
            seen=Seen(ref, "run-1", "1", now),
            state=State.ENDED if over else State.RUNNING,
            owner=f"user-{number % 50}",
            class_="docker",
            created=started,
            started=started,
            ended=ended,
            outcome=Outcome.SUCCEEDED if over else None,
            devices=(f"GPU-{number}",),
            size=0,
        )


def run() -> None:
    empty = min((_child(0) for _ in range(RUNS)), key=lambda one: one.seconds)
    found = [_child(WORKLOADS) for _ in range(RUNS)]
    best = min(found, key=lambda one: one.seconds)
    growth = (min(one.resident for one in found) - empty.resident) / 1024
    listing = min(timed(lambda: asyncio.run(_list(WORKLOADS)))[0] for _ in range(RUNS))
    rows = [
        ("nothing", f"{empty.seconds:.3f}", f"{empty.resident / 1024:.0f}", "0", ""),
        (f"{WORKLOADS:,}", f"{best.seconds:.2f}", f"{best.resident / 1024:.0f}", str(best.due), ""),
        (f"{WORKLOADS:,}, listed only", f"{listing:.2f}", "", "", ""),
    ]
    print_table(("workloads", "seconds", "peak MiB", "due", ""), rows)
    print(f"seconds: target below {SECONDS:g}, {met(best.seconds, SECONDS, least=False)}")
    print(f"memory beyond the empty run: {growth:.0f} MiB, target below {MEMORY:g}, {met(growth, MEMORY, least=False)}")
    print(f"pages of {PAGE}; {best.due:,} due, {best.deferred:,} of them deferred by the budget\n")
    print_figure(
        Figure("plan", round(best.seconds, 2), "s", round(best.seconds / listing, 2), "listing without deciding")
    )


async def _list(workloads: int) -> int:
    return sum([len(page.subjects) async for page in PagedPlatform(workloads).observe(PlaceScope())])


def _child(workloads: int) -> Measured:
    """A fresh process, because a peak never goes down."""
    command = [sys.executable, "-m", "benchmarks.plan", str(workloads)]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    return msgspec.json.decode(printed, type=Measured)


def _measure(workloads: int) -> Measured:
    platform = PagedPlatform(workloads)
    keeper = Keeper((platform,), InMemoryLedger(), InMemorySignals(), InMemoryEvidence(), Messages(()), FixedClock())

    async def plan() -> PassReport:
        return await look_and_plan(keeper, platform, Rulebook(POLICY))

    seconds, report = timed(lambda: asyncio.run(plan()))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(seconds, resident, len(report.survey.due), len(report.plan.deferred))


if __name__ == "__main__":
    print(msgspec.json.encode(_measure(int(sys.argv[1]))).decode())

"""A fleet for the benchmarks of the dashboard: GPUs, workloads that run on them, and workloads that ended. Seeded.

Nine of ten GPUs are held, half of their holders are idle. Everything else ended within the last days.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.plan import PAGE, PagedPlatform
from benchmarks.size import sized
from gpukeeper.blocking import SystemClock
from gpukeeper.config.load import load_text
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import in_slices
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import Answer, Credentials, SourceSettings
from gpukeeper.interfaces.web.source import Source, SourceLost
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Snapshot
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Gone, Outcome, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.views.live import MachineView, difference
from gpukeeper.views.live_rows import LiveRows

LARGE, SMALL = sized(((10_000, 2_000), (300, 64)), tiny=((200, 40), (60, 16)))  # workloads, GPUs
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
MEASURED = 40  # minutes of use before the first pass
POLICY = "preset: shared-host\nmode: plan\nscope: {docker: {}}\nschedule: {every: 1m}\nclasses: {docker: {idle: 30m}}\n"
HARDWARE = Unknown("a GPU neither begins nor ends", by_design=True)
T = TypeVar("T")


def policy() -> Policy:
    return load_text(POLICY, "benchmark policy").policy


class LargeFleet(PagedPlatform):
    """`models`: the model that a GPU reports, where it is not the usual one; a mark that is seen on its tile."""

    precise = True

    def __init__(self, workloads: int, gpus: int) -> None:
        super().__init__(workloads)
        self.models: dict[int, str] = {}
        self._begun, rng = datetime.now(UTC), random.Random(7)
        self._subjects = [
            *(self._gpu(number) for number in range(gpus)),
            *(self._made(number, rng, runs=number < gpus * 9 // 10) for number in range(workloads)),
        ]
        self._numbers = {one.ref.key: number for number, one in enumerate(self._subjects)}

    @property
    def running(self) -> list[Subject]:
        return [one for one in self._subjects if one.state is State.RUNNING]

    def gpu(self, number: int) -> Ref:
        return self._subjects[number].ref

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        now = datetime.now(UTC)
        for first in range(0, len(self._subjects), PAGE):
            numbers = range(first, min(first + PAGE, len(self._subjects)))
            await asyncio.sleep(0)
            yield Snapshot(self.name, self.place, now, tuple(self._now(number, now) for number in numbers))

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        return self._now(self._numbers[ref.key], datetime.now(UTC))

    def samples(self, at: datetime) -> list[Sample]:
        """Of each running workload: every second one is idle, the others are busy to a varying degree."""
        rng = random.Random(at.timestamp())
        return [
            Sample(
                one.ref.key, Signal.GPU, device, at, rng.uniform(60.0, 99.0) if number % 2 else 0.0, since=at - MINUTE
            )
            for number, one in enumerate(self.running)
            for device in (one.devices if isinstance(one.devices, tuple) else ())
        ]

    def _now(self, number: int, now: datetime) -> Subject:
        one = self._subjects[number]
        labels = {**one.labels, "model": self.models[number]} if number in self.models else one.labels
        return _replace(one, seen=_replace(one.seen, at=now), labels=labels)

    def _gpu(self, number: int) -> Subject:
        ref = Ref("docker", self.place, "gpu", f"gpu-{number}", f"GPU-{number:06d}")
        labels = {
            "index": str(number),
            "model": "NVIDIA H100 80GB HBM3",
            "utilisation_percent": "0",
            "memory_used_mib": "4",
            "memory_total_mib": "81559",
        }
        return Subject(
            seen=Seen(ref, ref.uid, "", self._begun),
            shape=Shape.DEVICE,
            state=HARDWARE,
            class_="device",
            created=HARDWARE,
            labels=labels,
            devices=(ref.uid,),
        )

    def _made(self, number: int, rng: random.Random, *, runs: bool) -> Subject:
        started = self._begun - rng.uniform(2, 40) * HOUR
        ref = Ref(self.name, self.place, "container", f"train-{number}", f"uid-{number:09d}")
        return Subject(
            seen=Seen(ref, "run-1", "1", self._begun),
            state=State.RUNNING if runs else State.ENDED,
            owner=f"user-{number % 50}",
            class_="docker",
            created=started,
            started=started,
            ended=None if runs else started + HOUR,
            outcome=None if runs else Outcome.SUCCEEDED,
            devices=(f"GPU-{number:06d}",) if runs else (),
            labels={"image": "registry.lab/train:3", "app": "train"},
            size=0,
        )


def make_keeper(fleet: LargeFleet) -> Keeper:
    return Keeper((fleet,), InMemoryLedger(), InMemorySignals(), InMemoryEvidence(), Messages(()), SystemClock())


async def measure_before(keeper: Keeper, fleet: LargeFleet) -> None:
    """The minutes before now."""
    now = datetime.now(UTC)
    for back in range(MEASURED, 0, -1):
        await keeper.signals.add(fleet.samples(now - back * MINUTE))


async def whole_pass(keeper: Keeper, book: Rulebook, only: Sequence[Ref] | None = None) -> None:
    """`only`: a narrow one."""
    await reclaim(keeper, keeper.platforms[0], book, act=False, only=only)


async def view_of(fleet: LargeFleet) -> MachineView:
    """After one pass."""
    keeper, book = make_keeper(fleet), Rulebook(policy())
    keeper.live.enabled = True
    await measure_before(keeper, fleet)
    await whole_pass(keeper, book)
    now = datetime.now(UTC)
    for back in range(MEASURED, 0, -1):
        keeper.live.measured(fleet.samples(now - back * MINUTE))
    rows = LiveRows("large")
    await in_slices(keeper.live.forecast(book, now))
    await in_slices(rows.update(keeper.live, book, now))
    await in_slices(rows.update_gpus(keeper.live, now, {}))
    head = MachineView(
        machine="large",
        at=now,
        version="0",
        policy=PolicyHead("benchmark policy", book.policy.digest, book.policy.preset, book.policy.mode),
        paused=None,
        places=tuple(one.state for one in keeper.live.places.values()),
        gpus=(),
        workloads=(),
    )
    return rows.view(head)


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def cpu_of(pid: int) -> float:
    """Seconds that the first thread of a process ran, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _replace(value: T, **changes: object) -> T:
    return msgspec.structs.replace(value, **changes)  # type: ignore[type-var]


class FixedSource(Source):
    """One view, and nobody to ask."""

    revocations = 0

    def __init__(self, view: MachineView) -> None:
        super().__init__(SourceSettings(key=b"k" * 32, anonymous=True, session_seconds=3600, version="0"))
        self.change(difference(None, view), view)

    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        raise SourceLost("nobody is there to ask")

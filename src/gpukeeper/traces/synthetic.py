"""A trace that is calculated from a seed: work as on a shared GPU server, with known truth.

The same arguments give the same bytes. A run depends only on the seed and its index, so runs can be made one at a time
and in any order. The truth is the last use of a GPU in the whole life of a run, also in minutes that were not measured
or that come after the end of the trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import NamedTuple

import msgspec

from gpukeeper.model.errors import UsageError
from gpukeeper.model.identity import PlaceKey
from gpukeeper.model.memory import Hold
from gpukeeper.model.series import MINUTE, NOT_MEASURED, Signal
from gpukeeper.model.trace import BadRow, MadePasses, RecordedRun, RecordedSeries
from gpukeeper.traces import synthetic_lives as lives
from gpukeeper.traces.synthetic_lives import Phase

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)  # a Monday
DAY = 24 * 60
DAYS_MAX = 3660
BEFORE_MAX = 2 * DAY  # minutes by which a run can be older than the trace
POOL = 509  # values per signal and phase; a prime, so that repetitions do not fit to hours

# The share of runs that have a signal. The GPU is always there.
MEASURED = ((Signal.CPU, 0.7), (Signal.NETWORK, 0.5), (Signal.DISK, 0.5), (Signal.TERMINAL, 0.4))
CLASSES = {
    "training": ("managed", "docker", "compose", "managed"),
    "session": ("devcontainer", "managed", "docker", "unknown"),
    "notebook": ("devcontainer", "devcontainer", "devcontainer", "compose"),
    "forgotten": ("devcontainer", "managed", "docker", "unknown"),
    "hung": ("managed", "docker", "compose", "unknown"),
    "inference": ("serving", "serving", "compose", "serving"),
    "batch": ("managed", "docker", "docker", "unknown"),
}

PEOPLE = frozenset({"training", "session", "notebook", "forgotten"})  # at a terminal


class Truth(msgspec.Struct, frozen=True):
    """`last_use` is the end of the last minute in which it used a GPU; None: it never did. It may be later than the
    end of the trace: then the run will be used again after it."""

    name: str
    kind: str
    last_use: datetime | None


class _Run(NamedTuple):
    """What is drawn of a run before its minutes. `first` is its first minute, counted from the begin of the trace."""

    kind: str
    first: int
    phases: Sequence[Phase]
    ends: bool
    random: Random


class SyntheticTrace:
    """`runs` makes one run after the other; nothing is kept."""

    def __init__(
        self, seed: int, workloads: int = 128, days: int = 14, *, begin: datetime = BEGIN, owners: int | None = None
    ) -> None:
        if workloads < 1 or not 1 <= days <= DAYS_MAX:
            raise UsageError(f"a synthetic trace needs at least 1 workload and 1 to {DAYS_MAX} days; nothing was made")
        self.seed, self.workloads, self.days = seed, workloads, days
        self._begin = begin
        self._owners = max(1, owners if owners is not None else max(4, workloads // 8))
        self._rows = 0

    @property
    def source(self) -> str:
        return f"synthetic:{self.seed} ({self.workloads} workloads, {self.days} days)"

    @property
    def begin(self) -> datetime:
        return self._begin

    @property
    def end(self) -> datetime:
        return self._begin + timedelta(days=self.days)

    @property
    def signals(self) -> frozenset[Signal]:
        """Others are there for some: a real server cannot measure all of every workload either."""
        return frozenset({Signal.GPU})

    @property
    def rows(self) -> int:
        """Minutes of series that the last call of `runs` made."""
        return self._rows

    @property
    def bad_count(self) -> int:
        return 0

    @property
    def bad(self) -> tuple[BadRow, ...]:
        return ()

    @property
    def made(self) -> Mapping[PlaceKey, MadePasses]:
        return {}

    def runs(self) -> Iterator[RecordedRun]:
        self._rows = 0
        for index in range(self.workloads):
            run = self.run(index)
            self._rows += sum(len(one.minutes) for one in run.series)
            yield run

    def truths(self) -> dict[str, Truth]:
        return {truth.name: truth for truth in map(self.truth, range(self.workloads))}

    def truth(self, index: int) -> Truth:
        drawn = self._draw(index)
        at, last = drawn.first, None
        for phase in drawn.phases:
            at += phase.minutes
            if phase.uses:
                last = at
        return Truth(self._name(index), drawn.kind, None if last is None else self._begin + last * MINUTE)

    def run(self, index: int) -> RecordedRun:
        kind, first, phases, ends, random = self._draw(index)
        after = first + sum(phase.minutes for phase in phases)
        over = ends and after < self.days * DAY
        owner = _owner(random, self._owners)
        class_ = CLASSES[kind][int(random.random() * 4)]
        devices = tuple(f"{self._name(index)}/{number}" for number in range(_gpus(random, kind)))
        started = self._begin + first * MINUTE
        used = 1 if kind in {"session", "notebook"} else len(devices)
        series = [self._series(random, first, phases, Signal.GPU, one, n < used) for n, one in enumerate(devices)]
        for signal, share in MEASURED:
            chosen = random.random() < share
            if chosen and (signal is not Signal.TERMINAL or kind in PEOPLE):
                series.append(self._series(random, first, phases, signal, "", True))
        _forget(random, [one.minutes for one in series])
        return RecordedRun(
            name=self._name(index),
            started=started,
            ended=self._begin + after * MINUTE if over else None,
            devices=devices,
            series=tuple(series),
            owner=owner,
            class_=class_,
            platform="docker",
            kind="container",
            holds=_holds(random, kind, owner, max(started, self._begin)),
        )

    def _draw(self, index: int) -> _Run:
        if not 0 <= index < self.workloads:
            raise IndexError(index)
        random = Random(f"gpukeeper/{self.seed}/{index}")  # noqa: S311
        kind = lives.kind(random)
        first = int(-BEFORE_MAX + random.random() * (self.days * DAY * 0.95 + BEFORE_MAX))
        first = lives.begin(random, kind, first)
        phases, ends = lives.live(random, kind, first)
        if first + sum(phase.minutes for phase in phases) <= 0:  # over before the trace: it begins with the trace
            first = 0
        return _Run(kind, first, phases, ends, random)

    def _name(self, index: int) -> str:
        return f"work-{index:04d}"

    def _series(
        self, random: Random, first: int, phases: Sequence[Phase], signal: Signal, device: str, used: bool
    ) -> RecordedSeries:
        pools: dict[str, array[float]] = {}
        minutes = array("f")
        room = self.days * DAY - first
        for phase in phases:
            name = phase.name if used else "silent"
            if name not in pools:
                low, high, share = lives.LEVELS[name][signal]
                pools[name] = lives.pool(random, low, high, share, POOL)
            _fill(minutes, pools[name], int(random.random() * POOL), min(phase.minutes, room - len(minutes)))
            if len(minutes) >= room:
                break
        if first < 0:
            del minutes[:-first]
        return RecordedSeries(signal, device, self._begin + max(first, 0) * MINUTE, minutes)


def _fill(minutes: array[float], pool: array[float], offset: int, count: int) -> None:
    head = pool[offset : offset + count]
    minutes.extend(head)
    rest = count - len(head)
    if rest > 0:
        minutes.extend(pool * (rest // len(pool)))
        minutes.extend(pool[: rest % len(pool)])


def _forget(random: Random, columns: Sequence[array[float]]) -> None:
    """Gaps: of all signals (the machine was not measured), and of one signal alone."""
    for _gap in range(int(random.random() * 3)):
        _gap_in(random, columns, 3 + int(random.random() ** 3 * 240))
    if random.random() < 0.2:
        _gap_in(random, columns[-1:], 1 + int(random.random() * 30))


def _gap_in(random: Random, columns: Sequence[array[float]], length: int) -> None:
    at = int(random.random() * len(columns[0]))
    for minutes in columns:
        count = max(0, min(length, len(minutes) - at))
        minutes[at : at + count] = array("f", (NOT_MEASURED,)) * count


def _owner(random: Random, owners: int) -> str | None:
    """Few owners have much of the work; of some work the owner is not known."""
    if random.random() < 0.03:
        return None
    return f"user{int(random.random() ** 2 * owners):02d}"


def _gpus(random: Random, kind: str) -> int:
    drawn = random.random()
    if kind in {"training", "hung"}:
        return 1 if drawn < 0.55 else 2 if drawn < 0.8 else 4 if drawn < 0.95 else 8
    return 1 if drawn < 0.9 else 2


def _holds(random: Random, kind: str, owner: str | None, started: datetime) -> tuple[Hold, ...]:
    asks = random.random() < 0.1 and kind in PEOPLE
    if owner is None or not asks:
        return ()
    at = started + int(random.random() * DAY) * MINUTE
    return (Hold(owner, at, at + timedelta(hours=12), "results are not saved"),)

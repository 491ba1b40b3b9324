"""A trace that is calculated from a seed: work as on a shared GPU server, with known truth.

The same arguments give the same bytes. A run depends only on the seed and its index, so runs can be made one at a
time and in any order. How kinds of work use a GPU are assumptions, not measured data: docs/reference/traces.md lists
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import NamedTuple

import msgspec

from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import MINUTE, NOT_MEASURED, BadRow, MadePasses, RecordedRun, RecordedSeries, Signal
from gpukeeper.model.subject import Hold, PlaceKey

_DAY = 24 * 60
LIFE_MAX = 60 * _DAY  # minutes; later phases are not drawn


class Phase(NamedTuple):
    name: str
    minutes: int

    @property
    def uses(self) -> bool:
        return self.name in USING


Level = tuple[float, float, float]  # lowest, highest, and the share of minutes that are not zero


def _levels(gpu: Level, cpu: Level, network: Level, disk: Level, terminal: Level) -> Mapping[Signal, Level]:
    return dict(
        zip(
            (Signal.GPU, Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL),
            (gpu, cpu, network, disk, terminal),
            strict=True,
        )
    )


NOTHING: Level = (0.0, 0.0, 0.0)
_QUIET: Level = (0.0, 20.0, 0.3)  # below what counts as use, also in a day
LEVELS: Mapping[str, Mapping[Signal, Level]] = {
    "train": _levels((70, 100, 1), (90, 800, 1), (1e3, 5e5, 1), (1e5, 2e8, 0.9), (1, 1, 0.005)),
    "evaluate": _levels((0, 3, 0.3), (100, 400, 1), (0, 1e5, 0.5), (1e5, 5e7, 0.8), NOTHING),
    "load": _levels((0, 1, 0.05), (150, 1600, 1), (1e5, 1e8, 0.9), (1e7, 8e8, 1), (1, 1, 0.02)),
    "try": _levels((5, 95, 1), (50, 300, 1), (0, 1e6, 0.5), (0, 1e7, 0.5), (1, 1, 0.5)),
    "think": _levels((0, 1, 0.02), (0, 30, 0.6), (0, 2e5, 0.4), (0, 1e6, 0.2), (1, 1, 0.25)),
    "away": _levels((0, 1, 0.01), (0, 1.5, 0.5), _QUIET, _QUIET, NOTHING),
    "left": _levels((0, 1, 0.01), (0, 1.5, 0.5), _QUIET, _QUIET, NOTHING),
    "spin": _levels(NOTHING, (99, 101, 1), (0, 500, 0.2), NOTHING, NOTHING),
    "crashed": _levels(NOTHING, (0, 0.5, 0.2), NOTHING, NOTHING, NOTHING),
    "serve": _levels((8, 90, 1), (30, 200, 1), (1e4, 5e6, 1), (0, 1e6, 0.3), NOTHING),
    "listen": _levels((0, 1, 0.01), (0.1, 3, 1), (50, 3e3, 1), (0, 1e4, 0.05), NOTHING),
    "silent": _levels(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
}
USING = frozenset({"train", "try", "serve"})

_KINDS = (
    ("training", 0.26),
    ("session", 0.20),
    ("notebook", 0.08),
    ("forgotten", 0.12),
    ("hung", 0.10),
    ("inference", 0.06),
    ("batch", 0.18),
)


def draw_kind(random: Random) -> str:
    drawn = random.random()
    for name, share in _KINDS:
        if drawn < share:
            return name
        drawn -= share
    return _KINDS[-1][0]


def draw_begin(random: Random, of: str, first: int) -> int:
    """People begin in the daytime, most of them not at weekends: then on the Friday before. Minute 0 is a Monday."""
    if of not in {"session", "notebook"}:
        return first
    day = first // _DAY
    weekday = day % 7
    if weekday >= 5 and random.random() < 0.85:
        day -= weekday - 4
    return day * _DAY + int((8 + 10 * random.random()) * 60)


def draw_pool(random: Random, low: float, high: float, share: float, size: int) -> array[float]:
    """Values to cut minutes from. Terminal is 0 or 1; everything else lies between `low` and `high`."""
    draw = random.random
    if share >= 1:
        return array("f", (low + (high - low) * draw() for _ in range(size)))
    if share <= 0:
        return array("f", bytes(4 * size))
    return array("f", (low + (high - low) * draw() if draw() < share else 0.0 for _ in range(size)))


def draw_phases(random: Random, of: str, first: int) -> tuple[list[Phase], bool]:
    """The phases of a whole life that begins at minute `first` (of the day: `first` modulo a day), and whether it is
    ended by someone. Otherwise it runs until after the end of any trace."""
    phases = list(_bounded(_LIVES[of](random, first)))
    ends = phases[-1].name != "left"
    if not ends and random.random() < 0.35:  # somebody removes it after all
        minutes = 1 + int(random.random() * 10 * _DAY)
        return [*phases[:-1], Phase("left", minutes)], True
    return phases, ends


def _bounded(phases: Iterator[Phase]) -> Iterator[Phase]:
    room = LIFE_MAX
    for phase in phases:
        yield Phase(phase.name, max(1, min(phase.minutes, room)))
        room -= phase.minutes
        if room <= 0:
            return


def _between(random: Random, low: float, high: float) -> int:
    """Short ones are more frequent than long ones: even on a logarithmic scale."""
    drawn: float = low * (high / low) ** random.random()
    return max(1, round(drawn))


def _epochs(random: Random, minutes: int) -> Iterator[Phase]:
    yield Phase("load", _between(random, 2, 30))
    epoch, evaluation = _between(random, 15, 240), _between(random, 1, 25)
    pauses = random.random() < 0.4  # of data that comes over a slow network
    while minutes > 0:
        yield Phase("train", min(epoch, max(minutes, 1)))
        yield Phase("evaluate", evaluation)
        minutes -= epoch + evaluation
        if pauses and random.random() < 0.15:
            pause = _between(random, 10, 150)
            yield Phase("load", pause)
            minutes -= pause


def _training(random: Random, first: int) -> Iterator[Phase]:
    del first
    yield from _epochs(random, _between(random, 4 * 60, 6 * _DAY))
    if random.random() < 0.1:  # a second training after the owner has seen the result of the first
        yield Phase("away", _between(random, 60, 16 * 60))
        yield from _epochs(random, _between(random, 4 * 60, 2 * _DAY))
    if random.random() < 0.55:  # finished, and nobody ends it
        yield Phase("left", LIFE_MAX)


def _batch(random: Random, first: int) -> Iterator[Phase]:
    del first
    yield Phase("load", _between(random, 1, 5))
    yield Phase("train", _between(random, 8, 360))
    if random.random() < 0.5:
        yield Phase("evaluate", _between(random, 1, 6))


def _hung(random: Random, first: int) -> Iterator[Phase]:
    del first
    yield from _epochs(random, _between(random, 20, 1 * _DAY))
    yield Phase("spin" if random.random() < 0.5 else "crashed", _between(random, 30, 4 * _DAY))
    yield Phase("left", LIFE_MAX)


def _session(random: Random, first: int) -> Iterator[Phase]:
    """A day of work at most, with lunch or a meeting in between. Most are left open in the evening and never used
    again: the next day begins with another one."""
    del first
    yield from _sitting(random, _between(random, 30, 300), 45)
    if random.random() < 0.7:
        yield Phase("away", _between(random, 30, 180))
        yield from _sitting(random, _between(random, 30, 240), 45)
    if random.random() < 0.75:
        yield Phase("left", LIFE_MAX)


def _notebook(random: Random, first: int) -> Iterator[Phase]:
    """Some days of work. Nights, weekends and lunch are pauses; so is thinking."""
    yield from _days(random, first, 1 + int(random.random() ** 2 * 12))
    if random.random() < 0.5:
        yield Phase("left", LIFE_MAX)


def _forgotten(random: Random, first: int) -> Iterator[Phase]:
    """Used for an afternoon at most, or never."""
    if random.random() < 0.75:
        yield from _sitting(random, _between(random, 5, 240))
    yield Phase("left", LIFE_MAX)


def _days(random: Random, first: int, days: int) -> Iterator[Phase]:
    at = first
    for day in range(days):
        leaves = (17 + 3 * random.random()) * 60
        length = max(30, round(leaves) - at % _DAY)
        for phase in _sitting(random, length):
            yield phase
            at += phase.minutes
        if day == days - 1:
            return
        comes = round((8 + 3 * random.random()) * 60)
        night = (comes - at) % _DAY
        tomorrow = (at + night) // _DAY % 7
        weekend = (7 - tomorrow) * _DAY if tomorrow >= 5 and random.random() < 0.85 else 0
        off = _DAY if random.random() < 0.15 else 0  # another day with other work
        yield Phase("away", max(1, night + weekend + off))
        at += max(1, night + weekend + off)


def _sitting(random: Random, minutes: int, longest: int = 100) -> Iterator[Phase]:
    while minutes > 0:
        trying, thinking = _between(random, 1, 40), _between(random, 3, longest)
        yield Phase("try", trying)
        yield Phase("think", thinking)
        minutes -= trying + thinking


def _inference(random: Random, first: int) -> Iterator[Phase]:
    """Requests come rarely. Some servers are deserted one day."""
    del first
    rest = _between(random, 12 * 60, LIFE_MAX)
    longest = _between(random, 60, 20 * 60)
    while rest > 0:
        requests, silence = _between(random, 1, 8), _between(random, 5, longest)
        yield Phase("serve", requests)
        yield Phase("listen", silence)
        rest -= requests + silence
    yield Phase("left", LIFE_MAX)


_LIVES = {
    "training": _training,
    "session": _session,
    "notebook": _notebook,
    "forgotten": _forgotten,
    "hung": _hung,
    "inference": _inference,
    "batch": _batch,
}


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
    """`last_use` is the end of the last minute in which it used a GPU; None: it never did. It may be later than the end
    of the trace: then the run will be used again after it.

    The last use of a GPU in the whole life of a run, also in minutes that were not measured or come after the trace.
    """

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
        kind = draw_kind(random)
        first = int(-BEFORE_MAX + random.random() * (self.days * DAY * 0.95 + BEFORE_MAX))
        first = draw_begin(random, kind, first)
        phases, ends = draw_phases(random, kind, first)
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
                low, high, share = LEVELS[name][signal]
                pools[name] = draw_pool(random, low, high, share, POOL)
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

"""How the kinds of work in a synthetic trace use a GPU: phases, and what is measured in them. Drawn from a `Random`.

Assumptions about shared GPU servers, not measured data; docs/reference/traces.md lists them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from random import Random
from typing import NamedTuple

from gpukeeper.model.series import Signal

DAY = 24 * 60
LIFE_MAX = 60 * DAY  # minutes; later phases are not drawn


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


def kind(random: Random) -> str:
    drawn = random.random()
    for name, share in _KINDS:
        if drawn < share:
            return name
        drawn -= share
    return _KINDS[-1][0]


def begin(random: Random, of: str, first: int) -> int:
    """People begin in the daytime, most of them not at weekends: then on the Friday before. Minute 0 is a Monday."""
    if of not in {"session", "notebook"}:
        return first
    day = first // DAY
    weekday = day % 7
    if weekday >= 5 and random.random() < 0.85:
        day -= weekday - 4
    return day * DAY + int((8 + 10 * random.random()) * 60)


def pool(random: Random, low: float, high: float, share: float, size: int) -> array[float]:
    """Values to cut minutes from. Terminal is 0 or 1; everything else lies between `low` and `high`."""
    draw = random.random
    if share >= 1:
        return array("f", (low + (high - low) * draw() for _ in range(size)))
    if share <= 0:
        return array("f", bytes(4 * size))
    return array("f", (low + (high - low) * draw() if draw() < share else 0.0 for _ in range(size)))


def live(random: Random, of: str, first: int) -> tuple[list[Phase], bool]:
    """The phases of a whole life that begins at minute `first` (of the day: `first` modulo a day), and whether it is
    ended by someone. Otherwise it runs until after the end of any trace."""
    phases = list(_bounded(_LIVES[of](random, first)))
    ends = phases[-1].name != "left"
    if not ends and random.random() < 0.35:  # somebody removes it after all
        minutes = 1 + int(random.random() * 10 * DAY)
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
    yield from _epochs(random, _between(random, 4 * 60, 6 * DAY))
    if random.random() < 0.1:  # a second training after the owner has seen the result of the first
        yield Phase("away", _between(random, 60, 16 * 60))
        yield from _epochs(random, _between(random, 4 * 60, 2 * DAY))
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
    yield from _epochs(random, _between(random, 20, 1 * DAY))
    yield Phase("spin" if random.random() < 0.5 else "crashed", _between(random, 30, 4 * DAY))
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
        length = max(30, round(leaves) - at % DAY)
        for phase in _sitting(random, length):
            yield phase
            at += phase.minutes
        if day == days - 1:
            return
        comes = round((8 + 3 * random.random()) * 60)
        night = (comes - at) % DAY
        tomorrow = (at + night) // DAY % 7
        weekend = (7 - tomorrow) * DAY if tomorrow >= 5 and random.random() < 0.85 else 0
        off = DAY if random.random() < 0.15 else 0  # another day with other work
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

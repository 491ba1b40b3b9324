"""The simulated world: its true state, an agenda of what users will do, and a log of everything that happened.

It changes at every call: every port call first lets time and users move on. The log is in order over reads, acts and
ledger lines, so that a checker can find out what was true when.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.model.event import Event
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Shape, State
from gpukeeper.platforms.simulated.clock import VirtualClock
from gpukeeper.platforms.simulated.faults import CALM, Faults
from gpukeeper.platforms.simulated.thing import SimulatedNode, Thing

DISK = 200 * 1024**3  # bytes


class Crashed(BaseException):  # a crash is no error that may be caught
    """gpukeeper died here. Only the ledger survives."""


@dataclass(slots=True)
class LogEntry:
    """One entry of the log. `thing` is a copy of the true state, with the facts that checkers need."""

    kind: str  # look, listing, capture, act, line, heard, person, crash
    at: datetime
    uid: str = ""
    place: str = ""
    step: str = ""
    action: str = ""
    incarnation: str = ""
    version: int = 0
    state: str = ""
    root: bool = True
    needed: bool = False  # an owner that does not control it exists
    in_use: bool = False
    busy: bool = False  # work runs beside it
    working: bool = False  # its GPUs are in use
    last_used: datetime | None = None
    full: float = 0.0  # its disk
    children: int = 0
    gone: bool = False
    effect: str = ""  # of an act: done, halfway, nothing, changed, refused
    vague: str = ""
    answer: str = ""  # of an act: lost
    running: int = 0  # of a listing: running roots at that place
    line: Event | None = None
    message: str = ""  # that an owner received


@dataclass
class SimulatedPlace:
    platform: str
    place: str
    gpus: tuple[str, ...]
    people: tuple[str, ...]
    namespaces: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # what trees are on; "" is the place itself

    @property
    def key(self) -> tuple[str, str]:
        return (self.platform, self.place)


@dataclass
class World:
    seed: int
    clock: VirtualClock
    places: tuple[SimulatedPlace, ...] = ()
    faults: Faults = CALM
    log: list[LogEntry] = field(default_factory=list)
    things: dict[tuple[str, str], dict[str, Thing]] = field(default_factory=dict)
    nodes: dict[tuple[str, str], list[SimulatedNode]] = field(default_factory=dict)
    samples: dict[str, list[tuple[datetime, str, float]]] = field(default_factory=dict)  # GPU readings handed out
    on_warning: Callable[[str, str], None] = lambda owner, message: None
    changes: list[Callable[[Thing], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.bugs = random.Random(f"bugs {self.seed}")  # apart, so that a world without them is the same
        self._agenda: list[tuple[datetime, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        for place in self.places:
            self.things[place.key] = {}
            self.nodes[place.key] = [SimulatedNode(name, DISK) for name in place.nodes]

    # Time and people.

    def after(self, span: timedelta, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.clock.true_now() + span, next(self._numbers), do))

    def pulse(self, *, may_crash: bool = True) -> None:
        """Lets the world move on; called before every answer it gives."""
        now = self.clock.true_now()
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        faults = self.faults
        if faults is CALM:
            return
        if faults.change and self.rng.random() < faults.change:
            self.change_something()
        if faults.jump and self.rng.random() < faults.jump:
            self.jump_clock()
        if may_crash and faults.crash and self.rng.random() < faults.crash:
            self.note("crash")
            raise Crashed

    def change_something(self) -> None:
        """A user does something to something, right now."""
        present = [t for things in self.things.values() for t in things.values() if t.shape is not Shape.DEVICE]
        if present and self.changes:
            thing, do = self.rng.choice(present), self.rng.choice(self.changes)
            do(thing)

    def jump_clock(self) -> None:
        """The clock is off for some minutes: by hours, or by less than a daemon may have been down."""
        self.clock.skew = timedelta(hours=self.rng.choice(self.faults.jumps))
        self.note("person", effect="clock jumps")
        self.after(timedelta(minutes=self.rng.randint(1, 10)), self.fix_clock)

    def fix_clock(self) -> None:
        self.clock.skew = timedelta()
        self.note("person", effect="clock is right")

    # Things.

    def new_uid(self) -> str:
        return f"u{next(self._numbers):05d}"

    def add(self, thing: Thing) -> Thing:
        self.things[thing.ref.platform, thing.ref.place][thing.ref.uid] = thing
        if thing.node is not None:
            thing.node.trees.append(thing)
        self.note("person", thing, effect="created")
        return thing

    def remove(self, thing: Thing, by: str = "person") -> None:
        thing.gone = True
        thing.state = State.ENDED
        here = self.things[thing.ref.platform, thing.ref.place]
        here.pop(thing.ref.uid, None)
        for child in [t for t in here.values() if t.root is not None and t.root.uid == thing.ref.uid]:
            self.remove(child, by)
        self.note("person", thing, effect=f"removed by {by}")

    def find(self, ref: Ref) -> Thing | None:
        return self.things[ref.platform, ref.place].get(ref.uid)

    def children_of(self, thing: Thing) -> list[Thing]:
        here = self.things[thing.ref.platform, thing.ref.place].values()
        return [t for t in here if t.root is not None and t.root.uid == thing.ref.uid]

    # The log.

    def note(self, kind: str, thing: Thing | None = None, **facts: object) -> None:
        entry = LogEntry(kind, self.clock.true_now())
        if thing is not None:
            entry.place = thing.ref.place
            entry.uid, entry.incarnation, entry.version = thing.ref.uid, thing.incarnation, thing.version
            entry.state, entry.root, entry.in_use = thing.state.value, thing.root is None, thing.in_use
            entry.children, entry.gone, entry.needed = thing.children, thing.gone, thing.needed is not None
            entry.working = thing.use(entry.at) > 0
            if thing.node is not None:
                entry.busy, entry.last_used, entry.full = thing.busy is not None, thing.last_used, thing.node.disk.full
        for name, value in facts.items():
            setattr(entry, name, value)
        self.log.append(entry)

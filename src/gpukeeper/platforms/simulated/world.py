"""The simulated world: its objects in their true state, virtual time, faults as probabilities per call, an agenda of
what users will do, and a log of everything that happened.

It changes at every call: every port call first lets time and users move on. The log is in order over reads, acts
and ledger lines, so that a checker can find out what was true when.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec

from gpukeeper.model.event import Event
from gpukeeper.model.subject import Category, Disk, Marks, Outcome, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
BEGIN = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)  # a Monday morning


class _JumpingSelector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.loop.skip(timeout)
        return super().select(None if timeout is None else 0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__(self._make_selector())

    def _make_selector(self) -> selectors.BaseSelector:
        selector = _JumpingSelector()
        selector.loop = self
        return selector

    def time(self) -> float:
        return self._virtual

    def skip(self, seconds: float) -> None:
        self._virtual += seconds


class _PacedSelector(selectors.DefaultSelector):
    loop: PacedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop.paced:
            return super().select(None if timeout is None else timeout / self.loop.pace)
        if timeout:
            self.loop.skip(timeout)
        return super().select(None if timeout is None else 0)


class PacedLoop(VirtualLoop):
    """Jumps until `keep_pace` is called; from then on `pace` of its seconds pass in a real one."""

    def __init__(self) -> None:
        self.pace = 1.0
        self.paced = False
        self._since = 0.0
        super().__init__()

    def keep_pace(self, pace: float) -> None:
        self.pace, self.paced, self._since = pace, True, time.monotonic()

    def time(self) -> float:
        return self._virtual + (time.monotonic() - self._since) * self.pace if self.paced else self._virtual

    def _make_selector(self) -> selectors.BaseSelector:
        selector = _PacedSelector()
        selector.loop = self
        return selector


class VirtualClock:
    """Reads the loop. `skew` is how wrong the clock is, which a simulated fault may change."""

    def __init__(self, loop: asyncio.AbstractEventLoop, begin: datetime = BEGIN) -> None:
        self._loop = loop
        self._begin = begin
        self.skew = timedelta()

    def true_now(self) -> datetime:
        return self._begin + timedelta(seconds=self._loop.time())

    def now(self) -> datetime:
        return self.true_now() + self.skew


def run_virtually(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run to the end in virtual time and close the loop."""
    try:
        return loop.run_until_complete(main)
    except KeyboardInterrupt:
        # Each task that it cancelled would be reported with a traceback when it is collected.
        loop.set_exception_handler(lambda loop, about: None)
        raise
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    change: float = 0.0  # something changes just before a call
    snatch: float = 0.0  # the object itself changes between our last read and our act
    silent: float = 0.0  # a listing is not answered at all
    partial: float = 0.0  # a listing is incomplete and reports that
    blind: float = 0.0  # a read returns unknown
    vague: float = 0.0  # one fact of a subject is unknown
    mute: float = 0.0  # share of the time in which nodes do not report whether work runs on them
    lost: float = 0.0  # a command is accepted and has no effect
    halfway: float = 0.0  # the removal of a tree stops halfway, often together with gpukeeper
    garbled: float = 0.0  # a command's answer is lost; it was executed or not
    refused: float = 0.0
    late: float = 0.0  # an answer takes up to a minute
    uncaptured: float = 0.0  # evidence cannot be captured
    unmeasured: float = 0.0  # a meter reading fails
    undelivered: float = 0.0  # a warning is not delivered
    bug: float = 0.0  # the adapter raises an exception that the port does not allow
    crash: float = 0.0  # gpukeeper dies at this call
    jump: float = 0.0  # the clock is wrong for some minutes
    jumps: tuple[float, ...] = (-5, 3, 30)  # by how many hours


CALM = Faults()


DAY = timedelta(hours=24)


@dataclass
class SimulatedNode:
    """What trees are on: a disk, and work beside them."""

    name: str
    capacity: int
    others: int = 0  # bytes of files that are not ours to manage
    busy: str | None = None
    trees: list[Thing] = field(default_factory=list)

    @property
    def disk(self) -> Disk:
        held = self.others + sum(tree.size for tree in self.trees if not tree.gone)
        return Disk("/tmp", min(1.0, held / self.capacity))  # noqa: S108


@dataclass
class Thing:
    ref: Ref
    created: datetime
    shape: Shape = Shape.WORKLOAD
    owner: str | None = None
    class_: str = "docker"
    environment: str | None = None
    state: State = State.CREATED
    started: datetime | None = None
    ended: datetime | None = None
    previous_end: datetime | None = None
    outcome: Outcome | None = None
    devices: tuple[str, ...] = ()
    root: Ref | None = None
    needed: str | None = None  # by an owner that does not control it
    children: int = 0  # that run
    ends_for_good: bool = False
    size: int = 0
    last_used: datetime | None = None  # of a tree, the truth
    changed: datetime | None = None  # of a tree: its last recorded change
    moved: datetime | None = None  # below its root, as its top records it
    read: datetime | None = None  # the last recorded read; others within a day of it are not recorded
    in_use: bool = False
    category: Category = Category.TEMPORARY
    node: SimulatedNode | None = None  # of a tree
    proof: str | None = None
    marks: Marks = field(default_factory=Marks)
    labels: dict[str, str] = field(default_factory=dict)
    image: Ref | None = None
    attached: tuple[Ref, ...] = ()
    busy_until: datetime | None = None  # GPUs are busy until then, while it runs
    removing: bool = False
    gone: bool = False
    run: int = 0  # counts starts
    version: int = 0

    def touch(self) -> None:
        self.version += 1

    def change(self, now: datetime) -> None:
        """Of a tree: it was written to."""
        self.last_used, self.changed, self.read = now, now, None
        self.touch()

    def start(self, now: datetime, busy_for: timedelta) -> None:
        self.previous_end = self.ended
        self.state, self.started, self.ended, self.outcome = State.RUNNING, now, None, None
        self.busy_until = now + busy_for
        self.run += 1
        self.touch()

    def end(self, now: datetime, outcome: Outcome) -> None:
        self.state, self.ended, self.outcome = State.ENDED, now, outcome
        self.touch()

    def use(self, now: datetime) -> float:
        """GPU use in percent."""
        working = self.state is State.RUNNING and self.busy_until is not None and now < self.busy_until
        return 80.0 if working else 0.0

    @property
    def busy(self) -> str | None:
        """Of what users may still need. What has provably ended is needed by none."""
        return self.node.busy if self.node is not None and self.category is Category.TEMPORARY else None

    @property
    def incarnation(self) -> str:
        return f"run-{self.run}" if self.shape is not Shape.TREE else f"v{self.version}"


UNKNOWABLE = (
    "state",
    "outcome",
    "devices",
    "live_children",
    "in_use",
    "owner",
    "class_",
    "started",
    "size",
    "proof",
    "root",
    "needed",
    "busy",
    "last_used",
)


def recorded_last_use(thing: Thing) -> datetime | None:
    """Until when a tree may have been used, according to its disk (relatime)."""
    if thing.changed is None or thing.category is not Category.TEMPORARY:
        return thing.last_used
    hidden = None if thing.read is None else thing.read + DAY
    return max(one for one in (thing.changed, thing.moved, hidden) if one is not None)


def subject_of(thing: Thing, now: datetime, vague: str | None = None) -> Subject:
    """As the adapter sees it. `vague` names the one fact that could not be read."""
    facts: dict[str, object] = {
        "state": State.REMOVING if thing.removing else thing.state,
        "owner": thing.owner,
        "class_": thing.class_,
        "environment": thing.environment,
        "created": thing.created,
        "started": thing.started,
        "ended": thing.ended,
        "previous_end": thing.previous_end,
        "outcome": thing.outcome,
        "devices": thing.devices,
        "root": thing.root.path if thing.root is not None else None,
        "needed": thing.needed,
        "live_children": thing.children,
        "size": thing.size,
        "last_used": recorded_last_use(thing),
        "in_use": thing.in_use,
        "busy": thing.busy,
        "proof": thing.proof,
    }
    if vague is not None:
        facts[vague] = Unknown("the platform did not report it")
    return Subject(
        seen=Seen(thing.ref, thing.incarnation, str(thing.version), now),
        shape=thing.shape,
        category=thing.category,
        disk=thing.node.disk if thing.node is not None else None,
        ends_for_good=thing.ends_for_good,
        marks=thing.marks,
        labels=thing.labels,
        image=thing.image,
        attached=thing.attached,
        **facts,  # type: ignore[arg-type]
    )


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

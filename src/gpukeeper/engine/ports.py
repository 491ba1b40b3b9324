"""What the engine needs, as Protocols. Async; every implementation gives each call a deadline.

A platform returns values. A fact that could not be read is Unknown; what could not be listed is in Snapshot.unseen.
It raises PlatformError only when nothing at all could be read. Here is also what platforms share: one read for all
concurrent callers, how a failure is described, how often an identical line is logged.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gpukeeper.model.decision import (
    Accepted,
    Action,
    ActResult,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
)
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.event import Event, Intended
from gpukeeper.model.gpu import Condition
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.ports import Clock, Delivery, Message, Meter, Signals
from gpukeeper.model.series import UsageFold
from gpukeeper.model.subject import ClockRecord, Diagnosis, Gone, Hold, Memory, PlaceKey, Ref, Subject, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

MOST_READS = 1_000  # in one pass, if a platform can only be queried for one at a time; the rest waits for the next
READS_AT_ONCE = 16


class Platform(Protocol):
    """One place of one platform: a Docker host, a cluster, a Ray node, this machine."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def guards(self) -> Mapping[Action, Guard]:
        """The actions it offers. Any other action is reported, never performed."""
        ...

    @property
    def precise(self) -> bool:
        """Its hints name everything that may have changed, so that a pass may read just that."""
        return False

    def at_once(self, kind: str) -> int:
        """How many steps on ended objects of that kind may run in parallel. More than one if they do not disturb each
        other, and if one read for many steps costs as much as for a single one."""
        return 1

    @property
    def local(self) -> bool:
        """Its workloads run on this machine, so that their GPUs can be inspected here."""
        return False

    @property
    def tidies(self) -> bool:
        """It removes by itself what ended, so that the absence of such an object does not open the breaker."""
        return False

    def follow(self, policy: Policy) -> None:
        """A changed policy applies from the next read on."""
        return

    def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        """Pages, so that memory follows the page."""
        ...

    async def wake(self) -> AsyncIterator[Ref | None]:
        """Hints that something changed (None: it is unknown what). Never facts. Ends when the platform has none."""
        hints: tuple[Ref | None, ...] = ()
        for hint in hints:
            yield hint

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        """One object, by uid. Gone only if it provably does not exist."""
        ...

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        """A workload by the id that its processes carry on this machine. Unknown where they carry none."""
        ...

    async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
        """Those of them that provably do not exist; checked by uid, in bulk where the platform has such a query, or
        else one by one. What could not be checked is left out, like what exists."""
        found: list[Gone] = []
        for first in range(0, min(len(refs), MOST_READS), READS_AT_ONCE):
            some = refs[first : min(first + READS_AT_ONCE, MOST_READS)]
            found += [one for one in await asyncio.gather(*map(self.read, some)) if isinstance(one, Gone)]
        return found

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown: ...

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        """One action on exactly `fresh`. If it is ATOMIC, the platform refuses if the object changed since."""
        ...

    def batch(self, refs: Sequence[Ref]) -> AbstractAsyncContextManager[None]:
        """Steps on all of these run inside this context: what they need may be read for all of them at once."""
        return nullcontext()

    async def notify(self, subject: Subject, message: str) -> bool:
        """Send a message to users inside the workload. False: there are none, or they cannot be reached."""
        return False

    async def announce(self, subject: Subject, message: str, warned: Warned) -> None:
        """Store a warning on the object itself, for its owner and for other instances of gpukeeper. A platform that
        cannot store it does nothing: the ledger has it."""
        return

    async def hold(self, subject: Subject, until: datetime | None) -> Accepted | Refused | Unknown | None:
        """Write a hold onto the object itself, or remove it. None if only the ledger stores holds."""
        return None

    async def parts(self, words: str) -> Sequence[Ref]:
        """Parts of workloads with this name. Only whole workloads are observed; parts are for users who name one."""
        return ()

    async def diagnose(self, ref: Ref) -> Diagnosis | Unknown:
        """What it is part of and made of, and why it still exists; the rules add the rest. Read-only."""
        return Diagnosis()

    async def revert_stop(self, ref: Ref, evidence: Evidence) -> None:
        """A stop was interrupted and did not complete: undo what it has changed. The workload runs on as before.
        Nothing, where a stop is one call."""
        return

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        """Restore what gpukeeper stopped (no evidence) or removed (from its evidence)."""
        ...


def place_name(platform: Platform) -> str:
    return f"{platform.name}/{platform.place}"


def key_of(platform: Platform) -> PlaceKey:
    """The key of everything that is stored for a place."""
    return platform.name, platform.place


class Gpus(Protocol):
    """The GPUs of the machine we run on."""

    async def shares(self) -> Mapping[str, float] | Unknown:
        """The share of each GPU or slice, by uuid: a whole GPU 1, a slice its part of one. A GPU that is split into
        slices is not listed itself."""
        ...

    async def condition(self, uuid: str, since: datetime) -> Condition | Unknown:
        """Which processes have that GPU or slice open, and what driver and kernel report about it since then."""
        ...

    async def reset(self, uuid: str) -> Accepted | Refused | Unknown:
        """That one whole GPU, after closing it ourselves. Refused while any process has it open."""
        ...


class Notifier(Protocol):
    async def to_owner(self, message: Message) -> Delivery:
        """Without channels: it was not delivered."""
        ...


class Ledger(Protocol):
    """Journal and state. `append` returns when the lines are durable."""

    async def append(self, lines: Sequence[Event]) -> None: ...
    async def memories(self, keys: Iterable[str]) -> Mapping[str, Memory]:
        """By key. A key without a memory is absent."""
        ...

    async def present(self, platform: str, place: str) -> Mapping[str, Ref]:
        """By key: what was noticed there and has not vanished."""
        ...

    async def decided(self, keys: Iterable[str]) -> Mapping[str, str]:
        """The last recorded decision of each, as `action rule verdict`."""
        ...

    async def open_intents(self, platform: str, place: str) -> Sequence[Intended]: ...
    async def acts_since(self, since: datetime, rules: frozenset[str], *, but: bool = False) -> int:
        """Intents of these rules, or of all but these, written since then on any place."""
        ...

    async def holds_of(self, owner: str, since: datetime) -> Mapping[str, tuple[Hold, ...]]:
        """By key: the holds on this owner's workloads that were taken since then, gone workloads included."""
        ...

    async def about(self, words: str) -> Sequence[Event]:
        """Every line about the objects whose path or uid ends with these words, oldest first."""
        ...

    async def next_pass(self) -> int: ...
    async def last_line_at(self, before: datetime | None = None) -> datetime | None:
        """When the last line was written, or the newest one that is not later than this."""
        ...

    async def clock_records(self) -> Mapping[str, ClockRecord]:
        """By boot, the newest last."""
        ...

    async def record_clock(self, boot: str, record: ClockRecord) -> None:
        """Durable when it returns. It replaces the one of the same boot."""
        ...

    async def paused(self) -> str | None:
        """Why everything is paused, or None. Read before each step."""
        ...

    def lease(self, platform: str, place: str) -> AbstractAsyncContextManager[None]:
        """Raises LeaseHeld if another pass runs there."""
        ...


class EvidenceStore(Protocol):
    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        """Durable when it returns. The string names it."""
        ...

    async def load(self, name: str) -> Evidence | Unknown: ...


class UsageStore(Protocol):
    """Where the hours of GPUs are kept."""

    async def record(self, found: UsageFold) -> None:
        """In one transaction. Recording the same again changes nothing."""
        ...


@dataclass(frozen=True, eq=False)
class Ports:
    """All of them together."""

    platforms: tuple[Platform, ...]
    ledger: Ledger
    signals: Signals
    evidence: EvidenceStore
    notifier: Notifier
    clock: Clock
    meter: Meter | None = None
    recall: Meter | None = None  # has past values too: read where no daemon has measured
    gpus: Gpus | None = None
    usage: UsageStore | None = None  # None: how GPUs are used is not recorded
    host: str = field(default_factory=socket.gethostname)  # where `gpus` are
    boot: str = ""  # of the machine whose clock this is; empty: the kernel does not report it

    def platform_at(self, ref: Ref) -> Platform | None:
        """The platform it belongs to; None: not reachable from here."""
        return next((one for one in self.platforms if key_of(one) == (ref.platform, ref.place)), None)


T = TypeVar("T")
GATHER = 0.05  # seconds; callers of the last read soon request the next one


class _Read(Generic[T]):
    """One that may not have begun yet; then more may join."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: T
        self.error: BaseException | None = None

    def get(self) -> T:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class Shared(Generic[T]):
    """A blocking read, called by threads. Its result is shared and must not be changed. Reads with other arguments are
    separate.

    A caller gets a read that began after its call, never an older one. Many steps may run at the same time for the
    price of one: while a read runs, later callers wait for the next one and share it. Nothing is cached.
    """

    def __init__(self, read: Callable[..., T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._next: dict[tuple[Hashable, ...], _Read[T]] = {}  # not begun
        self._turn: dict[tuple[Hashable, ...], threading.Lock] = {}  # one at a time; the others gather meanwhile

    def __call__(self, *about: Hashable) -> T:
        with self._lock:
            read = self._next.get(about)
            if read is not None:
                turn = None
            else:
                read = self._next[about] = _Read()
                turn = self._turn.setdefault(about, threading.Lock())
        if turn is not None:
            self._run(read, turn, about)
        return read.get()

    def _run(self, read: _Read[T], turn: threading.Lock, about: tuple[Hashable, ...]) -> None:
        waits = turn.locked()
        with turn:
            if waits:
                threading.Event().wait(GATHER)
            with self._lock:
                del self._next[about]  # later callers came after it began
            try:
                read.result = self._read(*about)
            except BaseException as error:  # every waiting caller gets it
                read.error = error
            finally:
                read.done.set()


class SharedQuestion(Generic[T]):
    """The same for awaited reads. A cancelled caller does not cancel the read for others."""

    def __init__(self, ask: Callable[..., Awaitable[T]]) -> None:
        self._ask = ask
        self._next: dict[tuple[Hashable, ...], asyncio.Task[T]] = {}
        self._under_way: dict[tuple[Hashable, ...], asyncio.Task[T]] = {}

    async def __call__(self, *about: Hashable) -> T:
        loop = asyncio.get_running_loop()
        question = self._next.get(about)
        if question is None or question.done() or question.get_loop() is not loop:  # else of a loop that has ended
            before = self._under_way.get(about)
            if before is not None and before.get_loop() is not loop:
                before = None
            question = self._next[about] = asyncio.create_task(self._run(before, about))
        return await asyncio.shield(question)

    async def _run(self, before: asyncio.Task[T] | None, about: tuple[Hashable, ...]) -> T:
        if before is not None:
            await asyncio.wait([before])
            await asyncio.sleep(GATHER)
        mine = self._under_way[about] = self._next.pop(about)
        try:
            return await self._ask(*about)
        finally:
            if self._under_way.get(about) is mine:
                del self._under_way[about]


LOGGED_AGAIN = timedelta(minutes=15)  # for this long an identical line is counted instead of logged
LINES_KEPT = 200
LONGEST_BUG = 300  # characters of a foreign exception


def bug_words(problem: Exception) -> str:
    """One line: what it is, and where in the code it came from."""
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    text = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    return f"this is a bug in gpukeeper, please report it: {text[:LONGEST_BUG]}{where}"


def pass_stopped(place: str, problem: Exception) -> str:
    why = str(problem) if isinstance(problem, KeeperError) else bug_words(problem)
    return f"the pass on {place} stopped: {why}. Nothing more was touched there; the next pass continues."


class LogThrottle:
    """Lets an identical line through once in a while, with the number of times it was held back."""

    def __init__(self) -> None:
        self._admitted: dict[str, tuple[float, int]] = {}  # by line: when it was last let through, and how often since

    def admit(self, line: str, steady: float) -> str | None:
        """The line to log now; None: it was logged a moment ago."""
        last, held_back = self._admitted.pop(line, (None, 0))
        quiet = LOGGED_AGAIN.total_seconds()
        if last is not None and steady - last < quiet:
            self._admitted[line] = (last, held_back + 1)
            return None
        self._admitted[line] = (steady, 0)
        if len(self._admitted) > LINES_KEPT:
            del self._admitted[next(iter(self._admitted))]
        if last is None or not held_back:
            return line
        span = in_words(timedelta(seconds=round(steady - last)))
        return f"{line} ({held_back + 1} times in the last {span})"

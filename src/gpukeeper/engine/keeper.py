"""One running gpukeeper: its ports, what it remembers between passes, whether it may act, whether it trusts the
clock.

Wiring makes it; the functions of the engine take it as their first argument. What needs no memory takes Ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, cast

import msgspec

from gpukeeper.engine.live import LiveState
from gpukeeper.engine.memory import (
    Absences,
    BackOff,
    Followed,
    GpuChecks,
    LastPasses,
    Pressure,
    RequestState,
    Tenants,
    WorkBeside,
)
from gpukeeper.engine.ports import Ledger, Platform, Ports
from gpukeeper.engine.usage import UsageTracker
from gpukeeper.model.decision import Action, Guard
from gpukeeper.model.event import Closed, Event, Intended
from gpukeeper.model.subject import ClockRecord
from gpukeeper.model.words import in_words

STOPPING = "gpukeeper is being stopped"


@dataclass
class Permission:
    """Whether steps may be taken at all. Checked before each step; a pause by users is in the ledger."""

    stopping: bool = False  # no new step begins; the one in progress is finished
    why_not: Callable[[], str | None] = lambda: None  # a sentence while another instance acts instead of this one


@dataclass
class Uptime:
    """Whether a daemon runs, and since when it has watched without interruption."""

    serving: bool = False  # a daemon: checks of GPUs go on beside the next pass
    watched_from: float | None = None  # steady time of its start, or of when it last stood still
    measured_apart: float | None = None  # seconds between the last two measurements of running work

    def begin(self, steady: float) -> None:
        self.serving, self.watched_from = True, steady

    def watched_since(self, now: datetime) -> datetime | None:
        """By the steady clock, so that a wrong clock at the start of a daemon makes no warning valid again."""
        if self.watched_from is None:
            return None
        return now - timedelta(seconds=asyncio.get_running_loop().time() - self.watched_from)


CLOCK_JUMP = timedelta(minutes=2)
CLOCK_SETTLE = timedelta(minutes=15)  # after a jump, or after a long silence
CLOCK_SILENCE = timedelta(minutes=30)
CLOCK_BEHIND = timedelta(minutes=2)
CLOCK_DRIFT = timedelta(seconds=30)  # many small corrections are no jump: the record follows them


class ClockWatch:
    """Can the clock be trusted? Every age is wrong after a jump, so nothing is acted on for a while.

    The wall clock is compared with the steady one of the event loop at every question: at the beginning of a pass,
    before each step, and once more just before acting. The steady clock is the machine's, from its boot on: what is
    recorded in the ledger lets the next process of the same boot see a jump that happened before it began, and
    continue a doubt.

    After a reboot there is nothing to compare with. A doubt that was not over starts again. A machine that seems to
    have been off for long is doubted: a clock that was set ahead looks the same.
    """

    def __init__(self) -> None:
        self._zero: datetime | None = None  # what the clock showed when the steady one was 0
        self._until = float("-inf")
        self._recorded: ClockRecord | None = None  # of this boot
        self._recalled = False
        self._rebooted = False
        self._watched = False

    def doubt(self, wall: datetime) -> str | None:
        """Why ages cannot be trusted now; None when they can. `wall`: the time of the clock."""
        steady = asyncio.get_running_loop().time()
        zero = wall - timedelta(seconds=steady)
        if self._zero is not None and abs(zero - self._zero) > CLOCK_JUMP:
            self._begin(steady)
        self._zero = zero
        if steady < self._until:
            left = timedelta(seconds=self._until - steady)
            return f"The clock jumped, so ages are not trusted for {in_words(left)} more"
        return None

    async def recall(self, ports: Ports) -> None:
        """Once, before the first question: what earlier processes recorded."""
        if self._recalled:
            return
        records, steady = await ports.ledger.clock_records(), asyncio.get_running_loop().time()
        mine = self._recorded = records.get(ports.boot) if ports.boot else None
        self._rebooted = bool(ports.boot) and any(boot != ports.boot for boot in records)
        if mine is not None:
            if self._zero is not None and abs(self._zero - mine.zero) > CLOCK_JUMP:
                self._begin(steady)  # it was asked before it knew this
            self._zero = self._zero or mine.zero
            self._watched = mine.watched
            if mine.doubted_until is not None:
                # Not more than a whole time: a machine that was reset to a snapshot has an older steady clock.
                self._until = max(self._until, min(mine.doubted_until, steady + CLOCK_SETTLE.total_seconds()))
        elif records and list(records.values())[-1].doubted_until is not None:
            self._begin(steady)
        self._recalled = True

    async def settle_in(self, ports: Ports) -> None:
        """For a daemon that begins, the first one of this boot: was the machine off, or is the clock wrong? That is
        unknown, so it waits a moment. Reads only; the next pass records it."""
        await self.recall(ports)
        wall = ports.clock.now()
        self.doubt(wall)
        if self._watched or self._zero is None:
            return
        # Without a record of an earlier boot only the newest lines can show it: not those of a process that crashed
        # a moment ago.
        began = self._zero if self._rebooted else wall - CLOCK_SETTLE
        before = await ports.ledger.last_line_at(began)
        if before is not None and began - before > CLOCK_SILENCE:
            self._begin(asyncio.get_running_loop().time())
        self._watched = True

    async def record(self, ports: Ports) -> None:
        """Durable when it returns, so that a crash does not end a doubt. Writes only what is new."""
        if not ports.boot or self._zero is None:
            return
        doubted = asyncio.get_running_loop().time() < self._until
        now = ClockRecord(zero=self._zero, doubted_until=self._until if doubted else None, watched=self._watched)
        if self._recorded is None or _clock_differs(now, self._recorded):
            await ports.ledger.record_clock(ports.boot, now)
            self._recorded = now

    def _begin(self, steady: float) -> None:
        self._until = steady + CLOCK_SETTLE.total_seconds()


def _clock_differs(one: ClockRecord, other: ClockRecord) -> bool:
    same = (one.doubted_until, one.watched) == (other.doubted_until, other.watched)
    return not same or abs(one.zero - other.zero) > CLOCK_DRIFT


def behind_the_ledger(now: datetime, last_line: datetime | None) -> str | None:
    """A clock behind our own ledger has jumped."""
    if last_line is not None and now < last_line - CLOCK_BEHIND:
        return f"The clock shows {now:%Y-%m-%d %H:%M}, but the newest ledger line is of {last_line:%Y-%m-%d %H:%M}"
    return None


IRREVERSIBLE = frozenset({Action.REMOVE, Action.TRIM, Action.RELEASE})


@dataclass(frozen=True, eq=False)
class Keeper(Ports):
    """Nothing of this is needed after a restart: what must survive is in the ledger."""

    permission: Permission = field(default_factory=Permission)
    clock_watch: ClockWatch = field(default_factory=ClockWatch)
    uptime: Uptime = field(default_factory=Uptime)
    budget_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # places act at once; the hour is theirs together
    pressure: Pressure = field(default_factory=Pressure)
    tenants: Tenants = field(default_factory=Tenants)
    back_off: BackOff = field(default_factory=BackOff)
    absences: Absences = field(default_factory=Absences)
    beside: WorkBeside = field(default_factory=WorkBeside)
    followed: Followed = field(default_factory=Followed)
    last_passes: LastPasses = field(default_factory=LastPasses)
    gpu_checks: GpuChecks = field(default_factory=GpuChecks)
    request_state: RequestState = field(default_factory=RequestState)
    usage_tracker: UsageTracker = field(default_factory=UsageTracker)
    live: LiveState = field(default_factory=LiveState)

    def __post_init__(self) -> None:
        for platform in self.platforms:
            check_guards(platform)


def check_guards(platform: Platform) -> None:
    """An irreversible verb that its platform never refuses is a bug in the adapter; nothing may run with it."""
    for action, guard in platform.guards.items():
        enough = (Guard.ATOMIC, Guard.NOT_RUNNING) if action is Action.REMOVE else (Guard.ATOMIC,)
        assert action not in IRREVERSIBLE or guard in enough, (
            f"This is a bug in gpukeeper: {platform.name} offers {action} without an atomic condition."
        )


def with_origin(keeper: Keeper, who: str, via: str) -> Keeper:
    """The same keeper, for one request of `who`.

    Its ledger notes, on each line of that request, how the request came here.
    """
    return replace(keeper, ledger=cast(Ledger, _WithOrigin(keeper.ledger, who, via)))


class _WithOrigin:
    """Everything but `append` is the ledger's own."""

    def __init__(self, ledger: Ledger, who: str, via: str) -> None:
        self._ledger, self._who, self._via = ledger, who, via

    async def append(self, lines: Sequence[Event]) -> None:
        await self._ledger.append([self._noted(one) for one in lines])

    def _noted(self, line: Event) -> Event:
        """A step that a person requested is gpukeeper's: its lines name the person in `requested_by`."""
        requested_by = line.requested_by if isinstance(line, Intended | Closed) else line.by
        known = line.via is not msgspec.UNSET  # of an earlier request, which this one closes
        if known or self._who not in (line.by, requested_by):
            return line
        return msgspec.structs.replace(line, via=self._via)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

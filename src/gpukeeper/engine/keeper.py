"""The ports of one running gpukeeper, together. Wiring fills it in; the stories take it as their first argument."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from gpukeeper.engine.clockwatch import ClockWatch
from gpukeeper.engine.confirm import Confirmations
from gpukeeper.engine.ports import EvidenceStore, Gpus, Ledger, Notifier, Platform
from gpukeeper.engine.pressure import Pressure
from gpukeeper.model.decision import Action, Decision, Guard, Unseen
from gpukeeper.model.event import GpuChecked
from gpukeeper.model.identity import Ref
from gpukeeper.model.ports import Clock, Meter, Signals
from gpukeeper.model.unknown import Unknown

IRREVERSIBLE = frozenset({Action.REMOVE, Action.TRIM, Action.RELEASE})


@dataclass
class Keeper:
    platforms: tuple[Platform, ...]
    ledger: Ledger
    signals: Signals
    evidence: EvidenceStore
    notifier: Notifier
    clock: Clock
    meter: Meter | None = None
    recall: Meter | None = None  # knows the past too: asked by a look that no daemon measured for
    gpus: Gpus | None = None
    clock_watch: ClockWatch = field(init=False)
    budget_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # places act at once; the hour is theirs together
    in_vain: dict[str, datetime] = field(default_factory=dict)  # by key: when a step on it last came to nothing
    missing_since: dict[str, datetime] = field(default_factory=dict)  # by key: not listed since then
    patience: timedelta = timedelta()  # how long something must be missing to be believed while the breaker is open
    may_act: Callable[[], str | None] = lambda: None  # asked before each step; a sentence: not now
    stopping: bool = False  # asked before each step, so that a daemon ends after the step under way
    pressure: Pressure = field(default_factory=Pressure)
    working: dict[tuple[str, str, str, str], str] = field(default_factory=dict)  # see act.where_work_runs
    tenants: dict[tuple[str, str], dict[str, dict[str, Tenancy]]] = field(default_factory=dict)  # by place, device, key
    counted: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # by place: seen and running, in all
    broken: dict[tuple[str, str], str] = field(default_factory=dict)  # by place: the breaker that the last look opened
    failures: dict[tuple[str, str], str] = field(default_factory=dict)  # by place: why its last pass stopped midway
    host: str = field(default_factory=socket.gethostname)  # where `gpus` are
    serving: bool = False  # a daemon: checks of GPUs go on beside the next pass
    watched_from: float | None = None  # a daemon: steady time of its start, or of when it last stood still
    checks: dict[str, GpuCheck] = field(default_factory=dict)  # by uuid: under way
    followed: dict[str, Followed] = field(default_factory=dict)  # by step: see verify.settle
    answering: bool = False  # a daemon with a socket: names are looked up in the lists of its passes
    listed: dict[tuple[str, str], Listing] = field(default_factory=dict)  # by place: the last whole list
    outlook: dict[tuple[str, str], Outlook] = field(default_factory=dict)  # by place: for those who ask such a daemon
    finding: asyncio.Lock = field(default_factory=asyncio.Lock)  # one list at a time for all who ask
    turned_away: set[tuple[str, str]] = field(default_factory=set)  # places whose pass waits for a request to end
    next_list: float = 0.0  # steady time before which no list is made for a request
    confirmations: Confirmations = field(default_factory=Confirmations)
    proven: dict[tuple[str, str], datetime] = field(default_factory=dict)  # ended work (key, incarnation): checked when

    def watched_since(self, now: datetime) -> datetime | None:
        """By the steady clock, so that a wrong clock at the start of a daemon makes no warning valid again."""
        if self.watched_from is None:
            return None
        return now - timedelta(seconds=asyncio.get_running_loop().time() - self.watched_from)

    def __post_init__(self) -> None:
        self.clock_watch = ClockWatch(self.clock)
        for platform in self.platforms:
            check_guards(platform)


@dataclass
class GpuCheck:
    """A GPU that is being looked at because work on it ended."""

    uuid: str
    began: datetime
    ended: dict[str, Ref] = field(default_factory=dict)  # by key; more may end while it is looked at
    like: dict[tuple[str, str], Ref] = field(default_factory=dict)  # by place: how other workloads there are asked for
    task: asyncio.Task[GpuChecked] | None = None  # ends with how it came out


class Tenancy(NamedTuple):
    """Running work that has a device, as a list showed it."""

    ref: Ref
    started: datetime


class Followed(NamedTuple):
    """A removal that the platform accepted from this process and that takes its time: what it gives back."""

    ref: Ref
    gpus: int | Unknown
    size: int | Unknown


@dataclass(frozen=True)
class Listing:
    """What one look at a whole place listed."""

    begun: float  # steady time
    refs: tuple[Ref, ...] = ()
    unseen: tuple[str, ...] = ()


@dataclass
class Outlook:
    """What the passes at a place decided about each thing there."""

    at: datetime
    decisions: dict[str, Decision] = field(default_factory=dict)  # by key
    left_out: int = 0  # beyond what is kept
    seen: int = 0
    running: int = 0
    unseen: tuple[Unseen, ...] = ()
    breaker: str | None = None


def check_guards(platform: Platform) -> None:
    """An irreversible verb that its platform never refuses is a bug in the adapter; nothing may run with it."""
    for action, guard in platform.guards.items():
        enough = (Guard.ATOMIC, Guard.NOT_RUNNING) if action is Action.REMOVE else (Guard.ATOMIC,)
        assert action not in IRREVERSIBLE or guard in enough, (
            f"This is a bug in gpukeeper: {platform.name} offers {action} without an atomic condition."
        )

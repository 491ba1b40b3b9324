"""One running gpukeeper: its ports, and what it remembers between passes.

Wiring makes it; the functions of the engine take it as their first argument. What needs no memory takes Ports.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gpukeeper.engine.backoff import BackOff
from gpukeeper.engine.beside import WorkBeside
from gpukeeper.engine.clockwatch import ClockWatch
from gpukeeper.engine.followed import Followed
from gpukeeper.engine.gpu_checks import GpuChecks
from gpukeeper.engine.last_passes import LastPasses
from gpukeeper.engine.live import LiveState
from gpukeeper.engine.missing import Absences
from gpukeeper.engine.permission import Permission
from gpukeeper.engine.ports import Platform, Ports
from gpukeeper.engine.pressure import Pressure
from gpukeeper.engine.request_state import RequestState
from gpukeeper.engine.tenants import Tenants
from gpukeeper.engine.uptime import Uptime
from gpukeeper.engine.usage import UsageTracker
from gpukeeper.model.decision import Action, Guard

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

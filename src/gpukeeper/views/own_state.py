"""What gpukeeper says of itself: the policy in effect with the origin of every value, and what the last change
changed; whether it acts without a backtest; its ledger and disk, budget, channels, and the copy in the fleet
database.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from gpukeeper.ledger.copy.admin import CopyState
from gpukeeper.ledger.meta import BacktestRecord
from gpukeeper.lifecycle.settings import idle_times
from gpukeeper.model.event import PolicyChange
from gpukeeper.model.policy import Mode, Policy


class PolicySetting(msgspec.Struct, frozen=True):
    setting: str
    value: Any
    origin: str


class LastPolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """When another policy came into effect, and what differs. `hidden`: how many differ that only admins see."""

    at: datetime
    before: str  # its digest
    digest: str
    changes: tuple[PolicyChange, ...]
    hidden: int = 0


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """`settings`: empty for readers who may see the sentence only; they get no `change` either. `change` None: none
    since `recorded_since`. That None: nothing is recorded yet."""

    source: str
    digest: str
    mode: Mode
    sentence: str
    warnings: tuple[str, ...] = ()
    settings: tuple[PolicySetting, ...] = ()
    recorded_since: datetime | None = None
    change: LastPolicyChange | None = None


_HOW = "gpukeeper backtest ledger --record"


def backtest_warning(policy: Policy, record: BacktestRecord | None) -> str | None:
    """None: nothing to warn about. Only a policy that stops idle work can be regretted; in mode plan it would be."""
    if not any(idle_times(policy)):
        return None
    if record is None:
        if policy.mode is Mode.PLAN:
            return None
        return (
            "mode is enforce, and what this policy would have done to recorded work is not on record here. "
            f"To see it: {_HOW}"
        )
    limit = policy.backtest.regret_max
    if not record.known or record.regrets / record.known <= limit:
        return None
    share = record.regrets / record.known
    return (
        f"{record.regrets} of {record.known} stops by this policy ({share:.0%}) would have been regretted between "
        f"{record.begin:%Y-%m-%d} and {record.end:%Y-%m-%d} ({record.source}); backtest.regret_max is {limit:.0%}. "
        "Idle times with less regret: gpukeeper advise ledger"
    )


class LedgerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes. `reserve`: there is room set aside for the next lines if the disk is full."""

    lines: int
    oldest: datetime | None
    newest: datetime | None
    size: int
    archives: int
    damaged_archives: int
    reserve: bool
    disk_free: int
    disk_total: int


class BudgetHealth(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit."""

    per_pass_count: int | None
    per_pass_share: float | None
    per_hour_count: int | None
    per_hour_share: float | None
    acted_last_hour: int


class HealthView(msgspec.Struct, frozen=True, kw_only=True):
    """`failures`: places whose last pass stopped midway, and why. `copy`: None: there is no fleet database.
    `web_warnings`: what is wrong with how the dashboard is served."""

    now: datetime
    ledger: LedgerHealth
    budget: BudgetHealth
    paused: str | None
    failures: tuple[tuple[str, str], ...]
    owner_channels: tuple[str, ...]
    admin_channels: tuple[str, ...]
    last_errors: tuple[str, ...]
    copy: CopyState | None
    web_warnings: tuple[str, ...] = ()

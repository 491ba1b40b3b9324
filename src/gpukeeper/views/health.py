"""How gpukeeper itself is: its ledger and disk, budget, channels, and the copy in the fleet database."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpukeeper.ledger.copy.state import CopyState


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

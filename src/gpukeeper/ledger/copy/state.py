"""How the copy in the fleet database is doing: a value for metrics and health."""

from __future__ import annotations

from datetime import datetime

import msgspec


class CopyState(msgspec.Struct, frozen=True, kw_only=True):
    """`unsent`: lines; `lag`: age of the oldest of them, in seconds; None: not known yet."""

    machine: str
    connected: bool = False
    connected_since: datetime | None = None
    ledger: int | None = None
    shipped: int | None = None
    unsent: int | None = None
    lag: float | None = None
    signals_until: datetime | None = None
    last_shipped_at: datetime | None = None
    refused_lines: int = 0  # stored without their content, because the database refused it
    last_error: str | None = None
    last_error_at: datetime | None = None
    failures: int = 0  # since the last success

"""A report of usage and savings from the files of a ledger, for the command and for the daemon that answers it."""

from __future__ import annotations

import sqlite3
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpukeeper.engine.schedule import LocalZone
from gpukeeper.ledger.outcomes import covered_from, outcome_lines
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Prices
from gpukeeper.views.savings import SOON, SavingsSums
from gpukeeper.views.usage import UsageSums
from gpukeeper.views.usage_report import ReportQuery, UsageReport, not_covered, usage_report

if TYPE_CHECKING:
    from gpukeeper.ledger.journal import SqliteLedger
    from gpukeeper.ledger.usage import SqliteUsage, UsageReader


def zone_named(name: str) -> tzinfo:
    """Empty: the zone of this machine."""
    if not name:
        return LocalZone()
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(f'"{name[:60]}" is not a known time zone. Write it like Europe/Berlin.') from None


async def read_report(
    ledger: SqliteLedger, usage: SqliteUsage, query: ReportQuery, prices: Prices, now: datetime
) -> UsageReport:
    zone = zone_named(query.zone)
    sums = UsageSums(query.since, query.until, zone)
    notes: list[str] = []

    def read_usage(reader: UsageReader) -> tuple[dict[str, set[str]], int | None]:
        for one in reader.hours(query.since, query.until, now):
            sums.add(one)
        return reader.models(query.since, query.until), reader.oldest()

    models, oldest = await usage.read(read_usage)
    savings = SavingsSums(query.since, query.until, zone, prices, models)

    def read_lines(c: sqlite3.Connection) -> None:
        notes.extend(not_covered(query, covered_from(c, ledger.path)))
        for line in outcome_lines(c, ledger.path, query.since, query.until + SOON, notes.append):
            savings.add(line)

    await ledger.read(read_lines)
    return usage_report(query, zone, sums, savings, prices, recorded_from=oldest, notes=notes)

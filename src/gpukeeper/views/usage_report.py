"""The report of a span of time: how GPUs were used, what came back, and what was held without use."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, tzinfo

import msgspec

from gpukeeper.model.policy import Prices
from gpukeeper.model.usage import moment_of
from gpukeeper.views.savings import SavingsSums, SavingsView
from gpukeeper.views.usage import (
    NAMES,
    GpuHours,
    HeatRow,
    Money,
    UsageCell,
    UsageRow,
    UsageSums,
    WasteRow,
    cost,
    for_reader,
    rows,
    total,
    waste,
)

BY = (*NAMES, "rule")
NOT_RECORDED = (
    "No use of GPUs is recorded for this time: it is recorded while the daemon runs (gpukeeper serve or operator)."
)


class ReportQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`zone`: name of a time zone; empty: that of this machine. `owner`: only this one's work. `person`: who may see
    only their own figures and the totals; None: everything is shown."""

    since: datetime
    until: datetime
    zone: str = ""
    owner: str | None = None
    person: str | None = None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times in `zone`. `unweighed`: hours of slices of unknown size, which are in no sum."""

    since: datetime
    until: datetime
    zone: str
    owner: str | None
    person: str | None
    total: GpuHours
    money: Money | None
    currency: str
    owners: tuple[UsageRow, ...]
    classes: tuple[UsageRow, ...]
    groups: tuple[UsageRow, ...]
    models: tuple[UsageRow, ...]
    days: tuple[UsageRow, ...]
    waste: tuple[WasteRow, ...]
    heat: tuple[HeatRow, ...]
    savings: SavingsView
    unweighed: float = 0.0
    notes: tuple[str, ...] = ()
    cells: tuple[UsageCell, ...] = ()

    def by(self, name: str) -> tuple[UsageRow, ...]:
        tables = {"owner": self.owners, "class": self.classes, "group": self.groups, "model": self.models}
        return tables.get(name, self.days)


def usage_report(
    query: ReportQuery,
    zone: tzinfo,
    sums: UsageSums,
    savings: SavingsSums,
    prices: Prices,
    *,
    recorded_from: int | None,
    notes: Iterable[str] = (),
) -> UsageReport:
    cells = sums.cells()
    if query.owner is not None:
        cells = tuple(one for one in cells if one.held and one.owner == query.owner)
    elif query.person is not None:
        cells = for_reader(cells, query.person)
    back = savings.view(query.person) if query.owner is None else savings.of_owner(query.owner)
    return UsageReport(
        since=query.since.astimezone(zone),
        until=query.until.astimezone(zone),
        zone=query.zone or query.since.astimezone(zone).tzname() or "",
        owner=query.owner,
        person=query.person,
        total=total(cells),
        money=cost(cells, prices),
        currency=prices.currency,
        owners=rows(cells, NAMES["owner"], prices),
        classes=rows(cells, NAMES["class"], prices),
        groups=rows(cells, NAMES["group"], prices),
        models=rows(cells, NAMES["model"], prices),
        days=tuple(sorted(rows(cells, NAMES["day"], prices), key=lambda row: row.name)),
        waste=_own(waste(cells, prices), query.person),
        heat=sums.heat() if query.owner is None else (),
        savings=back,
        unweighed=sums.unweighed,
        notes=(*_coverage(query, recorded_from), *notes),
        cells=cells,
    )


def not_covered(query: ReportQuery, ledger_from: datetime | None) -> list[str]:
    """`ledger_from`: the oldest line of the ledger. What was done before is not known."""
    if ledger_from is None:
        return ["The ledger is empty: what was given back in this time is not known."]
    if ledger_from > query.since:
        begin = f"{ledger_from:%Y-%m-%d %H:%M} UTC"
        return [f"The ledger begins at {begin}; what was given back before is not in this report."]
    return []


def _own(found: tuple[WasteRow, ...], person: str | None) -> tuple[WasteRow, ...]:
    return found if person is None else tuple(one for one in found if one.owner == person)


def _coverage(query: ReportQuery, recorded_from: int | None) -> list[str]:
    """`recorded_from`: the first hour of which anything is recorded."""
    if recorded_from is None or moment_of(recorded_from * 60) >= query.until:
        return [NOT_RECORDED]
    begin = moment_of(recorded_from * 60)
    if begin > query.since:
        return [f"The use of GPUs is recorded since {begin:%Y-%m-%d %H:%M} UTC; what was before is not in this report."]
    return []

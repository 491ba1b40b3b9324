"""How GPUs were used, what was held without use, and what was given back; the same as CSV."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.terminal.usage import (
    bars,
    csv_text,
    headline,
    heat,
    legend,
    money_line,
    regret_line,
    savings_csv,
    savings_line,
    savings_tables,
    tables,
    total_rows,
    waste_csv,
    zone_named,
)
from gpukeeper.interfaces.web.app import Site, ask_for, machine_or_all
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model.errors import UsageError
from gpukeeper.views.usage import month
from gpukeeper.views.usage_report import UsageReport

SPANS = (("1", "1 day"), ("7", "7 days"), ("30", "30 days"), ("90", "90 days"))

CSV = {"hours": csv_text, "waste": waste_csv, "savings": savings_csv}


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    report = await _report(site, request, visitor)
    query = request.query_params
    return site.page(
        request,
        visitor,
        "usage.html",
        report=report,
        headline=headline(report),
        totals=list(total_rows(report.total)),
        shares=[(name, getattr(report.total, name)) for name in ("active", "idle", "free", "unknown")],
        legend=legend(),
        days=bars(report.days),
        heats=[
            (words, heat(report.heat, name, f"{words}, by hour of the week"))
            for name, words in (("active", "In use"), ("idle", "Held but idle"))
            if report.heat
        ],
        tables=[one for one in tables(report) if not one.name.startswith("back-")],
        back=savings_line(report),
        back_tables=savings_tables(report),
        months=_months(query.get("zone", "")[:60]),
        cost=money_line(report),
        regret=regret_line(report),
        spans=SPANS,
        days_given=query.get("days", "" if query.get("month") else "30"),
        month_given=query.get("month", ""),
        owner=query.get("owner", ""),
        machine=query.get("machine", ""),
        all_machines=True,
        query=urlencode({name: value for name, value in query.items() if name != "table"}),
    )


async def as_csv(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    table = request.query_params.get("table", "") or "hours"
    if table not in CSV:
        raise HTTPException(400, f'There is no table "{table[:40]}". Tables: {", ".join(CSV)}.')
    report = await _report(site, request, visitor)
    name = f"gpu-{table}-{report.since:%Y-%m-%d}-to-{report.until:%Y-%m-%d}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Response(CSV[table](report), media_type="text/csv; charset=utf-8", headers=headers)


async def _report(site: Site, request: HttpRequest, visitor: Visitor) -> UsageReport:
    query = request.query_params
    try:
        since, until = _span(
            query.get("month", ""), query.get("days", "") or "30", query.get("zone", "")[:60], site.now()
        )
    except (ValueError, OverflowError, UsageError) as problem:
        sentence = "The time of the report is not valid. Write a month like 2026-10, or a number of days."
        raise HTTPException(400, sentence) from problem
    asked = Request(
        verb="report",
        since=since,
        until=until,
        zone=query.get("zone", "")[:60],
        owner=query.get("owner", "")[:200] or None,
    )
    return await ask_for(site, visitor, machine_or_all(site, query.get("machine", "")), UsageReport, asked)


def _months(zone: str) -> list[tuple[str, str]]:
    """This one and the last, for links."""
    first = datetime.now(zone_named(zone)).replace(day=1)
    last = first - timedelta(days=1)
    return [(f"{first:%Y-%m}", "This month"), (f"{last:%Y-%m}", "Last month")]


def _span(named: str, days: str, zone: str, now: datetime) -> tuple[datetime, datetime]:
    """Raises ValueError."""
    if named:
        begin, end = month(named, zone_named(zone))
        begin, end = begin.astimezone(UTC), min(end.astimezone(UTC), now)
        if begin >= end:
            raise ValueError("it has not begun")
        return begin, end
    if not (days.isascii() and days.isdecimal() and 0 < int(days) <= 400):
        raise ValueError(days)
    return now - timedelta(days=int(days)), now

"""`gpukeeper report`: how GPUs were used, what came back, and what was held without use. Changes nothing."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import query_daemon
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import opened_for_reading, span
from gpukeeper.interfaces.terminal.usage import (
    csv_text,
    failed_line,
    headline,
    markdown_text,
    money_line,
    read_report,
    regret_line,
    tables,
    total_rows,
    usage_page,
    zone_named,
)
from gpukeeper.ledger.files import usage_path
from gpukeeper.ledger.usage import open_usage
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.views import usage
from gpukeeper.views.usage_report import BY, ReportQuery, UsageReport

DATE = 10  # characters: 2026-10-31


def report(
    month: Annotated[str | None, typer.Option("--month", help="A month. Default: this one.", metavar="YYYY-MM")] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Instead of a month: from this day on, or the last 24h, 7d, …", metavar="DATE"),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="With --since: to the end of this day.", metavar="DATE")
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only work of this owner.")] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Only this table: owner, class, group, model, day or rule.")
    ] = None,
    zone: Annotated[
        str, typer.Option("--zone", help="Time zone of days and hours. Default: that of this machine.", metavar="NAME")
    ] = "",
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Write hours by day, owner, class, group and model.", metavar="FILE"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one HTML file.", metavar="FILE")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the report as Markdown, for a mail.")] = False,
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Report how GPUs were used, and what was given back.

    GPU-hours in use, held but idle, free and not measured; what was held without use; what was undone within a day.
    Recorded while the daemon runs. Users who are not admins see their own figures and the totals.
    """
    if by is not None and by not in BY:
        raise UsageError(f'--by "{by}" is not one of: {", ".join(BY)}')
    if markdown and (json or by is not None):
        raise UsageError("--markdown cannot be combined with --json and --by")
    found = _read(_query(month, since, until, zone, owner), policy)
    for path, text in ((csv, csv_text), (html, usage_page)):
        if path is not None:
            _write(path, text(found))
    if json:
        show.as_json("report", found)
    elif markdown:
        show.text(markdown_text(found))
    elif csv is None and html is None:
        _print(found, by)


def _read(query: ReportQuery, policy: Path | None) -> UsageReport:
    asked = {"since": query.since, "until": query.until, "zone": query.zone, "owner": query.owner}
    found = query_daemon(UsageReport, "report", policy, **asked)
    if found is None:
        return asyncio.run(_read_files(query, policy))
    if found.person is not None:
        print_message("From the daemon's ledger: your own figures and the totals (admins: all figures).")
    return found


async def _read_files(query: ReportQuery, policy: Path | None) -> UsageReport:
    prices = load_policy(policy).policy.prices
    with opened_for_reading() as ledger:
        hours = open_usage(usage_path(ledger.path), write=False)
        try:
            return await read_report(ledger, hours, query, prices, datetime.now(UTC))
        finally:
            hours.close()


def _query(month: str | None, since: str | None, until: str | None, zone: str, owner: str | None) -> ReportQuery:
    there, now = zone_named(zone), datetime.now(UTC)
    if month is not None and (since is not None or until is not None):
        raise UsageError("--month cannot be combined with --since and --until")
    if since is None and until is not None:
        raise UsageError("--until needs --since")
    if since is None:
        try:
            begin, end = usage.month(month or f"{now.astimezone(there):%Y-%m}", there)
        except ValueError:
            raise UsageError(f'--month "{month}" is not a month. Write it like 2026-10.') from None
    else:
        begin = _begin(since, there, now)
        end = now if until is None else usage.midnight(_day(until, "--until") + timedelta(days=1), there)
    begin, end = begin.astimezone(UTC), min(end.astimezone(UTC), now)
    if begin >= end:
        raise UsageError("the time span of the report is empty or has not begun")
    return ReportQuery(since=begin, until=end, zone=zone, owner=owner)


def _begin(words: str, zone: tzinfo, now: datetime) -> datetime:
    if words[:4].isdecimal() and "-" in words:
        return usage.midnight(_day(words, "--since"), zone)
    length = span(words, "--since")
    assert length is not None
    try:
        return now - length
    except OverflowError:
        raise UsageError("--since: the time span is too long") from None


def _day(words: str, flag: str) -> date:
    try:
        if len(words) != DATE:
            raise ValueError
        return reading.moment(words, naive_is_utc=True).date()
    except ValueError:
        raise UsageError(f'{flag} "{words}" is not a day. Write it like 2026-10-31.') from None


def _print(found: UsageReport, by: str | None) -> None:
    for note in found.notes:
        print_message(note)
    show.text(f"{headline(found)} ({found.zone})")
    show.text("\nTotal (in GPU-hours):")
    show.table(list(total_rows(found.total)))
    if (cost := money_line(found)) is not None:
        show.text(cost)
    if found.unweighed > 0:
        show.text(f"{found.unweighed:,.1f} hours of slices of unknown size are in no sum.")
    for one in tables(found, by):
        show.text(f"\n{one.title} ({one.about}):")
        show.table(one.rows, head=one.head)
        if not one.rows:
            show.text("none")
    if by in (None, "rule"):
        show.text(f"\n{regret_line(found)}\n{failed_line(found)}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror}. Write to another file.") from error
    typer.echo(f"written: {path}", err=True)

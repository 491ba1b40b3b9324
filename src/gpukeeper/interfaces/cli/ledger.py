"""`gpukeeper ledger`: what happened. Changes nothing, except rotate and restore."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer

from gpukeeper.interfaces.cli.lazy import Entry, group_of
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.daemon import query_daemon
from gpukeeper.interfaces.terminal.local_ledger import opened_for_reading
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import opened, span
from gpukeeper.ledger.archive import rotate as rotate_ledger
from gpukeeper.ledger.export import csv_lines, json_lines, syslog_lines
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.lines import TYPES, NumberedLine, says
from gpukeeper.ledger.queries import lines_after
from gpukeeper.model.durations import size_in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.model.event import Event
from gpukeeper.views.history import (
    LineView,
    TotalsRow,
    TotalsView,
    line_body,
    line_document,
    line_row,
    lines_view,
    totals_rows,
)

MOST_ASKED = 1000  # lines that a daemon gives at once
COMMANDS = {
    "status": Entry(
        "gpukeeper.interfaces.cli.ledger_status:status",
        "Show size, files, schema and archives of the ledger.",
    ),
    "verify": Entry(
        "gpukeeper.interfaces.cli.ledger_status:verify", "Read every line and archive and verify the checksums."
    ),
    "backup": Entry(
        "gpukeeper.interfaces.cli.ledger_backup:backup", "Write the ledger, measured use and archives to one file."
    ),
    "restore": Entry(
        "gpukeeper.interfaces.cli.ledger_backup:restore", "Replace the ledger by a backup, and pause all actions."
    ),
}
app = typer.Typer(
    cls=group_of(COMMANDS),
    no_args_is_help=True,
    help="Read the record of everything gpukeeper observed, decided and did.",
)

Type = Annotated[
    list[str] | None,
    typer.Option(
        "--type", metavar="TYPE", help="Only lines of this type; may be repeated.", autocompletion=completion.line_types
    ),
]
About = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="Only lines about this workload (an ending of its path).",
        autocompletion=completion.workloads,
    ),
]
Whose = Annotated[str | None, typer.Option("--owner", metavar="USER", help="Only lines about work of this owner.")]
Search = Annotated[str | None, typer.Option("--search", help="Only lines that contain this text.", metavar="TEXT")]
Since = Annotated[str | None, typer.Option("--since", metavar="DURATION", help="Only lines of the last 24h, 7d, …")]


@app.command("list")
def list_(
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="Number of lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    errors: Annotated[bool, typer.Option("--errors", help="Only failures and what needs an admin.")] = False,
    owner: Whose = None,
    workload: About = None,
    type_: Type = None,
    since: Since = None,
    search: Search = None,
    json: o.Json = False,
) -> None:
    """List the newest lines, oldest first."""
    types = tuple(type_ or ())
    if not follow and _through_daemon(last, types, owner, workload, errors, since, search, json=json):
        return
    with opened_for_reading() as ledger:
        found = asyncio.run(_lines(ledger, last, types, owner, workload, errors, since, search))
        _print_lines(found, json=json, follow=follow)
        if follow:
            asyncio.run(_follow(ledger, found[-1][0] if found else 0, json=json))


def _through_daemon(
    last: int,
    types: tuple[str, ...],
    owner: str | None,
    workload: str | None,
    errors: bool,
    since: str | None,
    search: str | None,
    *,
    json: bool,
) -> bool:
    """Whether another user's daemon answered. It returns only lines about the caller's own work."""
    length = span(since, "--since")
    seconds = None if length is None else length.total_seconds()
    asked = {
        "last": last if search is None else MOST_ASKED,
        "types": types,
        "owner": owner,
        "workload": workload or "",
        "errors": errors,
    }
    found = query_daemon(NumberedLine, "ledger", None, seconds=seconds, **asked)
    if found is None:
        return False
    print_message("From the daemon's ledger: lines about your own work (admins: all lines).")
    fitting = [one for one in found.lines if search is None or says(one[1], search)]
    _print_lines(fitting[-last:], json=json, follow=False)
    return True


def _print_lines(found: Sequence[tuple[int, Event]], *, json: bool, follow: bool) -> None:
    if json and not follow:
        shown.as_json("ledger-list", lines_view(found))
        return
    if not found and not follow:
        print_message("No lines found.")
    for seq, line in found:
        _print(seq, line, json=json)


@app.command()
def show(
    seq: Annotated[int, typer.Argument(metavar="SEQ", help="Number of the line, as printed by `ledger list`.")],
    json: o.Json = False,
) -> None:
    """Show one line with all its fields."""
    with opened_for_reading() as ledger:
        found = asyncio.run(_one(ledger, seq))
    if found is None:
        raise UsageError(f"the ledger has no line {seq}. To list the lines: gpukeeper ledger list")
    if json:
        shown.as_json("ledger-show", LineView(line_document(seq, found)))
        return
    shown.table([(key, _said(value)) for key, value in line_body(found).items() if value not in (None, "", [], {})])


@app.command()
def totals(since: Since = None, json: o.Json = False) -> None:
    """Show totals of GPU-hours, GPUs and bytes reclaimed. By owner, rule and platform."""
    begin = _begin(since) or datetime.fromtimestamp(0, UTC)
    with opened_for_reading() as ledger:
        found = asyncio.run(ledger.totals(begin))
    if json:
        shown.as_json("ledger-totals", TotalsView(begin, found))
        return
    rows = [_totals_row(row) for row in totals_rows(found)]
    shown.table(rows, head=("by", "name", "steps", "GPUs", "GPU-hours", "bytes", "not measured"))


@app.command()
def export(
    format_: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="json (one object per line), csv, or syslog (one short line with a tag)."
        ),
    ] = "json",
    owner: Whose = None,
    workload: About = None,
    type_: Type = None,
    since: Since = None,
    search: Search = None,
) -> None:
    """Export all lines for other programs. Fields: timestamp, event_type, user, source, details, schema_version."""
    writers = {"json": json_lines, "csv": csv_lines, "syslog": syslog_lines}
    if format_ not in writers:
        raise UsageError(f'--format "{format_}" is not one of: {", ".join(writers)}')
    with opened_for_reading() as ledger:
        found = asyncio.run(_lines(ledger, None, tuple(type_ or ()), owner, workload, False, since, search))
        for row in writers[format_](found):
            typer.echo(row, nl=False)


@app.command()
def rotate(policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Archive old lines and delete expired data. `serve` does this daily, as configured in the policy."""
    with opened(policy, write=True) as session:
        keep, now = session.book.policy, session.keeper.clock.now()
        done = asyncio.run(rotate_ledger(session.ledger, keep.ledger, now, keep_unsent=keep.fleet.kept_unsent))
    if json:
        shown.as_json("ledger-rotate", {"rotation": done})
    else:
        where = f" to {done.archive}" if done.archive else ""
        gone = f"{len(done.archives_deleted)} archives and {done.signals_deleted} expired measurements deleted"
        typer.echo(f"{done.lines} lines archived{where}; {gone}.")


async def _lines(
    ledger: SqliteLedger,
    last: int | None,
    types: tuple[str, ...],
    owner: str | None,
    workload: str | None,
    errors: bool,
    since: str | None,
    search: str | None = None,
) -> list[tuple[int, Event]]:
    unknown = [name for name in types if name not in TYPES]
    if unknown:
        raise UsageError(f'unknown line type "{unknown[0]}". Types: {", ".join(sorted(TYPES))}')
    return await ledger.lines(
        last=last,
        types=types,
        owner=owner,
        workload=workload,
        errors_only=errors,
        since=_begin(since),
        search=search,
    )


async def _one(ledger: SqliteLedger, seq: int) -> Event | None:
    found = await ledger.read(lambda c: lines_after(c, seq - 1, "the ledger"))
    return next((line for number, line in found if number == seq), None)


async def _follow(ledger: SqliteLedger, after: int, *, json: bool) -> None:
    async for seq, line in ledger.follow(after):
        _print(seq, line, json=json)


def _begin(since: str | None) -> datetime | None:
    length = span(since, "--since")
    return datetime.now(UTC) - length if length is not None else None


def _print(seq: int, line: Event, *, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode(line_document(seq, line)))
    else:
        shown.table([shown.line_row(line_row(seq, line))])


def _said(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _totals_row(row: TotalsRow) -> tuple[str, ...]:
    hours, size = f"{row.gpu_hours:.1f}", size_in_words(row.bytes)
    return (row.by, row.name, str(row.steps), str(row.gpus), hours, size, str(row.unmeasured))

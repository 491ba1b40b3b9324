"""`gpukeeper ledger`: what happened; its size and content, whether it is undamaged; in one file (backup), and the
way back. Changes nothing, except rotate and restore.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpukeeper import __version__
from gpukeeper.devices.holders import user_name
from gpukeeper.interfaces.cli.main import Entry, group_of
from gpukeeper.interfaces.terminal import completion, show
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.daemon import query_daemon
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import confirmed, opened, opened_for_reading, span
from gpukeeper.ledger.archive import (
    Header,
    InspectionResult,
    LedgerFile,
    LedgerStatus,
    archived_size,
    files_of,
    inspect,
    schema_of,
)
from gpukeeper.ledger.archive import rotate as rotate_ledger
from gpukeeper.ledger.archive import status as status_of
from gpukeeper.ledger.backup import Manifest, back_up, read_back
from gpukeeper.ledger.backup import restore as restore_ledger
from gpukeeper.ledger.files import state_folder
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.lines import TYPES, NumberedLine, csv_lines, json_lines, says, syslog_lines
from gpukeeper.ledger.tables import LineFilter, lines_after
from gpukeeper.model.errors import LedgerError, UsageError
from gpukeeper.model.event import Event
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.host.connect import hostname
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


def status(json: o.Json = False) -> None:
    """Show size, files, schema and archives of the ledger. Also its first and last line."""
    with opened_for_reading() as ledger:
        found, schema = asyncio.run(_status(ledger))
        files, path = files_of(ledger), ledger.path
    if json:
        body = {"path": str(path), "schema": schema, "files": files, "status": found}
        show.as_json("ledger-status", {"ledger": body})
        return
    show.table(_status_rows(str(path), schema, files, found))


def verify(json: o.Json = False) -> None:
    """Read every line and archive and verify the checksums. Changes nothing. Exit code 1: something is damaged."""
    with opened_for_reading() as ledger:
        found, path = asyncio.run(inspect(ledger)), ledger.path
    if json:
        show.as_json("ledger-verify", {"path": str(path), "verified": found})
    else:
        typer.echo(_verified(str(path), found))
    for words in found.problems:
        print_message(words)
    if found.problems:
        raise typer.Exit(LedgerError.exit_code)


async def _status(ledger: SqliteLedger) -> tuple[LedgerStatus, int]:
    return await status_of(ledger), await schema_of(ledger)


def _status_rows(path: str, schema: int, files: tuple[LedgerFile, ...], found: LedgerStatus) -> list[tuple[str, str]]:
    names = ", ".join(f"{one.name} ({size_in_words(one.size)})" for one in files) or "none yet"
    ends = [f"{at:%Y-%m-%d %H:%M:%S} UTC" if at is not None else "-" for at in (found.oldest, found.newest)]
    whole = f"{len(found.archives)} ({size_in_words(archived_size(found))})"
    return [
        ("ledger", path),
        ("schema", str(schema)),
        ("size", size_in_words(found.size)),
        ("files", names),
        ("lines", str(found.lines)),
        ("first", ends[0]),
        ("last", ends[1]),
        ("archives", whole),
        *(("archive", _archive(one.name, one.header, one.damage)) for one in found.archives),
        ("reserve", "present" if found.reserve else "absent: released on a full disk, or not created yet"),
        ("paused", found.paused or "no"),
    ]


def _archive(name: str, header: object, damage: str | None) -> str:
    if damage is not None or not isinstance(header, Header):
        return f"{name}: {damage or 'its header could not be read'}"
    return f"{name}: {header.lines} lines, {header.since:%Y-%m-%d} to {header.until:%Y-%m-%d}"


def _verified(path: str, found: InspectionResult) -> str:
    what = f"{found.lines} lines and {len(found.archives)} archives of {path} were read"
    if found.problems:
        return f"{what}; {len(found.problems)} problems"
    return f"{what}: no damage found"


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write. It must not exist.")],
    json: o.Json = False,
) -> None:
    """Write the ledger, measured use and archives to one file. The daemon may run meanwhile. Verifies the result."""
    made = back_up(state_folder(), file.absolute(), now=datetime.now(UTC), machine=hostname(), version=__version__)
    if json:
        show.as_json("ledger-backup", {"file": str(file), "backup": made, "before": None})
    else:
        show.text(f"{file}: {_words(made)}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `ledger backup` wrote.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: o.Json = False,
) -> None:
    """Replace the ledger by a backup, and pause all actions. The ledger that is there is kept beside it."""
    found, state = read_back(file.absolute()), state_folder()
    if not yes:
        if json or not sys.stdin.isatty():
            raise UsageError(
                "restore needs a confirmation, and stdin is not a terminal. Nothing was done. For scripts: --yes"
            )
        show.text(f"{file}: {_words(found)}")
        if not confirmed(f"Put it in the place of the ledger in {state}?"):
            raise typer.Exit(1)
    made, aside = restore_ledger(file.absolute(), state, now=datetime.now(UTC), who=user_name(os.getuid()))
    if json:
        show.as_json("ledger-backup", {"file": str(file), "backup": made, "before": str(aside) if aside else None})
        return
    show.text(
        "Restored. All actions are paused, because what happened since the backup is unknown. "
        "Read `gpukeeper plan`, then: gpukeeper resume" + (f"\nThe ledger that was there: {aside}" if aside else "")
    )


def _words(found: Manifest) -> str:
    size = size_in_words(sum(one.size for one in found.files.values()))
    return (
        f"{len(found.files)} files, {size}, of {found.machine} at {found.made:%Y-%m-%d %H:%M:%S} UTC by gpukeeper "
        f"{found.version}; every checksum was verified"
    )


MOST_ASKED = 1000  # lines that a daemon gives at once
COMMANDS = {
    "status": Entry(
        "gpukeeper.interfaces.cli.ledger:status",
        "Show size, files, schema and archives of the ledger.",
    ),
    "verify": Entry("gpukeeper.interfaces.cli.ledger:verify", "Read every line and archive and verify the checksums."),
    "backup": Entry(
        "gpukeeper.interfaces.cli.ledger:backup", "Write the ledger, measured use and archives to one file."
    ),
    "restore": Entry(
        "gpukeeper.interfaces.cli.ledger:restore", "Replace the ledger by a backup, and pause all actions."
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
    wanted = LineFilter(
        last=last,
        types=tuple(type_ or ()),
        owner=owner,
        workload=workload,
        errors_only=errors,
        since=_begin(since),
        search=search,
    )
    if not follow and _through_daemon(wanted, since, json=json):
        return
    with opened_for_reading() as ledger:
        found = asyncio.run(_lines(ledger, wanted))
        _print_lines(found, json=json, follow=follow)
        if follow:
            asyncio.run(_follow(ledger, found[-1][0] if found else 0, json=json))


def _through_daemon(wanted: LineFilter, since: str | None, *, json: bool) -> bool:
    """Whether another user's daemon answered. It returns only lines about the caller's own work."""
    length = span(since, "--since")
    asked = {
        "last": wanted.last if wanted.search is None else MOST_ASKED,
        "seconds": None if length is None else length.total_seconds(),
        "types": wanted.types,
        "owner": wanted.owner,
        "workload": wanted.workload or "",
        "errors": wanted.errors_only,
    }
    found = query_daemon(NumberedLine, "ledger", None, **asked)
    if found is None:
        return False
    print_message("From the daemon's ledger: lines about your own work (admins: all lines).")
    fitting = [one for one in found.lines if wanted.search is None or says(one[1], wanted.search)]
    _print_lines(fitting[-(wanted.last or 0) :], json=json, follow=False)
    return True


def _print_lines(found: Sequence[tuple[int, Event]], *, json: bool, follow: bool) -> None:
    if json and not follow:
        shown.as_json("ledger-list", lines_view(found))
        return
    if not found and not follow:
        print_message("No lines found.")
    for seq, line in found:
        _print(seq, line, json=json)


@app.command("show")
def show_line(
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
        wanted = LineFilter(
            last=None,
            types=tuple(type_ or ()),
            owner=owner,
            workload=workload,
            since=_begin(since),
            search=search,
        )
        found = asyncio.run(_lines(ledger, wanted))
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


async def _lines(ledger: SqliteLedger, wanted: LineFilter) -> list[tuple[int, Event]]:
    unknown = [name for name in wanted.types if name not in TYPES]
    if unknown:
        raise UsageError(f'unknown line type "{unknown[0]}". Types: {", ".join(sorted(TYPES))}')
    return await ledger.lines(wanted)


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

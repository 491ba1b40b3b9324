"""`gpukeeper ledger`: what happened: list, show, totals, export, status, verify. Changes nothing, except rotate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.cli import ledger_status
from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from gpukeeper.ledger.journal import SqliteLedger
    from gpukeeper.ledger.queries import Reclaimed
    from gpukeeper.model.event import Event

MOST_ASKED = 1000  # lines that a daemon gives at once
app = typer.Typer(no_args_is_help=True, help="Read the record of everything gpukeeper saw, decided and did.")

Type = Annotated[list[str] | None, typer.Option("--type", help="Only lines of this type; may be repeated.")]
About = Annotated[str | None, typer.Option("--workload", help="Only about this workload (an ending of its path).")]
Whose = Annotated[str | None, typer.Option("--owner", help="Only about this person's work.")]
Search = Annotated[
    str | None, typer.Option("--search", help="Only with this text in any of its words.", metavar="TEXT")
]
Since = Annotated[str | None, typer.Option("--since", help="Only the last 24h, 7d, …")]


@app.command("list")
def list_(
    last: Annotated[int, typer.Option("--last", min=1, help="How many lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    errors: Annotated[bool, typer.Option("--errors", help="Only what failed or needs an admin.")] = False,
    owner: Whose = None,
    workload: About = None,
    type_: Type = None,
    since: Since = None,
    search: Search = None,
    json: o.Json = False,
) -> None:
    """The newest lines, oldest first."""
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
    """Whether a daemon of somebody else answered: of its ledger one is told what concerns one's own work."""
    from gpukeeper.interfaces.terminal.daemon import from_daemon
    from gpukeeper.interfaces.terminal.session import say, span
    from gpukeeper.ledger.lines import Numbered, says

    length = span(since, "--since")
    seconds = None if length is None else length.total_seconds()
    asked = {
        "last": last if search is None else MOST_ASKED,
        "types": types,
        "owner": owner,
        "workload": workload or "",
        "errors": errors,
    }
    found = from_daemon(Numbered, "ledger", None, seconds=seconds, **asked)
    if found is None:
        return False
    say("From the daemon's ledger: lines about your own work (all of them for an admin).")
    fitting = [one for one in found.lines if search is None or says(one[1], search)]
    _print_lines(fitting[-last:], json=json, follow=False)
    return True


def _print_lines(found: Sequence[tuple[int, Event]], *, json: bool, follow: bool) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say

    if json and not follow:
        show.as_json("ledger-list", {"lines": [{"seq": seq, **_body(line)} for seq, line in found]})
        return
    if not found and not follow:
        say("No such lines.")
    for seq, line in found:
        _print(seq, line, json=json)


@app.command()
def show(seq: Annotated[int, typer.Argument(help="The number in front of a line.")], json: o.Json = False) -> None:
    """One line, whole."""
    from gpukeeper.interfaces.terminal import show as shown
    from gpukeeper.model.errors import UsageError

    with opened_for_reading() as ledger:
        found = asyncio.run(_one(ledger, seq))
    if found is None:
        raise UsageError(f"the ledger has no line {seq}. See: gpukeeper ledger list")
    if json:
        shown.as_json("ledger-show", {"line": {"seq": seq, **_body(found)}})
        return
    shown.table([(key, _said(value)) for key, value in _body(found).items() if value not in (None, "", [], {})])


@app.command()
def totals(since: Since = None, json: o.Json = False) -> None:
    """GPU-hours, GPUs and bytes that came back, by owner, rule and platform."""
    from gpukeeper.interfaces.terminal import show

    begin = _begin(since) or datetime.fromtimestamp(0, UTC)
    with opened_for_reading() as ledger:
        found = asyncio.run(ledger.totals(begin))
    if json:
        show.as_json("ledger-totals", {"since": begin, "totals": found})
        return
    rows = [("all", "", *_figures(found.whole))]
    for by, group in (("owner", found.owners), ("rule", found.rules), ("platform", found.platforms)):
        rows += ((by, name or "nobody known", *_figures(sums)) for name, sums in sorted(group.items()))
    show.table(rows, head=("by", "name", "steps", "GPUs", "GPU-hours", "bytes", "not measured"))


@app.command()
def export(
    format_: Annotated[
        str, typer.Option("--format", help="json (one object a line), csv, or syslog (one short line with a tag).")
    ] = "json",
    owner: Whose = None,
    workload: About = None,
    type_: Type = None,
    since: Since = None,
    search: Search = None,
) -> None:
    """Every line for other programs: timestamp, event_type, user, source, details, schema_version."""
    from gpukeeper.ledger.export import csv_lines, json_lines, syslog_lines
    from gpukeeper.model.errors import UsageError

    writers = {"json": json_lines, "csv": csv_lines, "syslog": syslog_lines}
    if format_ not in writers:
        raise UsageError(f'--format "{format_}" is none of: {", ".join(writers)}')
    with opened_for_reading() as ledger:
        found = asyncio.run(_lines(ledger, None, tuple(type_ or ()), owner, workload, False, since, search))
        for row in writers[format_](found):
            typer.echo(row, nl=False)


@app.command()
def rotate(policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Archive old lines, delete what is past its retention, as the policy says. `serve` does this daily."""
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import opened
    from gpukeeper.ledger.archive import rotate as rotate_ledger

    with opened(policy, write=True) as session:
        done = asyncio.run(rotate_ledger(session.ledger, session.book.policy.ledger, session.keeper.clock.now()))
    if json:
        show.as_json("ledger-rotate", {"rotation": done})
    else:
        where = f" to {done.archive}" if done.archive else ""
        gone = f"{len(done.archives_deleted)} archives and {done.signals_deleted} measurements were past their time"
        typer.echo(f"{done.lines} lines archived{where}; {gone}.")


app.command("status")(ledger_status.status)
app.command("verify")(ledger_status.verify)


@contextmanager
def opened_for_reading() -> Iterator[SqliteLedger]:
    from gpukeeper.ledger.journal import open_ledger
    from gpukeeper.ledger.paths import ledger_path

    ledger = open_ledger(ledger_path(), write=False)
    try:
        yield ledger
    finally:
        ledger.close()


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
    from gpukeeper.ledger.lines import TYPES
    from gpukeeper.model.errors import UsageError

    unknown = [name for name in types if name not in TYPES]
    if unknown:
        raise UsageError(f'there are no lines of type "{unknown[0]}". Types: {", ".join(sorted(TYPES))}')
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
    from gpukeeper.ledger.queries import lines_after

    found = await ledger.read(lambda c: lines_after(c, seq - 1, "the ledger"))
    return next((line for number, line in found if number == seq), None)


async def _follow(ledger: SqliteLedger, after: int, *, json: bool) -> None:
    async for seq, line in ledger.follow(after):
        _print(seq, line, json=json)


def _begin(since: str | None) -> datetime | None:
    from gpukeeper.interfaces.terminal.session import span

    length = span(since, "--since")
    return datetime.now(UTC) - length if length is not None else None


def _print(seq: int, line: Event, *, json: bool) -> None:
    import msgspec

    from gpukeeper.interfaces.terminal import show

    if json:
        typer.echo(msgspec.json.encode({"seq": seq, **_body(line)}))
    else:
        show.table([line_row(seq, line)])


def line_row(seq: int, line: Event) -> tuple[str, ...]:
    what = str(line.__struct_config__.tag)
    where = line.ref.path if line.ref else getattr(line, "place", "")
    result = str(getattr(line, "result", "") or getattr(line, "action", "") or getattr(line, "verdict", ""))
    return (str(seq).rjust(6), f"{line.at:%Y-%m-%d %H:%M:%S}Z", what.ljust(10), result.ljust(11), where, _words(line))


def _words(line: Event) -> str:
    """Who and why, as far as the line says."""
    from gpukeeper.model.event import Held, Noticed, Passed, Paused, Released, Resumed, WarningSent

    match line:
        case Noticed():
            how = f" with {line.ended_with}" if line.ended_with else ""
            return f"{line.state}, {line.outcome}{how}" if line.outcome is not None else str(line.state)
        case Held():
            reason = f": {line.hold.reason}" if line.hold.reason else ""
            return f"by {line.by} until {line.hold.until:%Y-%m-%d %H:%M}{reason}"
        case Paused() | Resumed() | Released():
            return f"by {line.by}" + (f": {line.reason}" if isinstance(line, Paused) and line.reason else "")
        case WarningSent():
            return ("delivered: " if line.delivered else "undelivered: ") + line.message
        case Passed():
            counts = f"{line.seen} seen, {line.due} due, {line.reclaimed} reclaimed, {line.deferred} deferred"
            return "; ".join([counts, *([line.breaker] if line.breaker else []), *line.unseen])
        case _:
            return str(getattr(line, "reason", "") or getattr(line, "what", "") or getattr(line, "note", ""))


def _body(line: Event) -> dict[str, object]:
    import msgspec

    body: dict[str, object] = msgspec.to_builtins(line)
    return body


def _said(value: object) -> str:
    import msgspec

    return value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _figures(sums: Reclaimed) -> tuple[str, ...]:
    from gpukeeper.model.durations import size_in_words

    unmeasured = sums.unmeasured_gpus + sums.unmeasured_gpu_hours + sums.unmeasured_bytes
    return (str(sums.steps), str(sums.gpus), f"{sums.gpu_hours:.1f}", size_in_words(sums.bytes), str(unmeasured))

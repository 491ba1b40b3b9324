"""`gpukeeper ledger status` and `verify`: size and content of the ledger, and whether it is undamaged."""

from __future__ import annotations

import asyncio

import typer

from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.local_ledger import opened_for_reading
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.archive import LedgerStatus
from gpukeeper.ledger.archive import status as status_of
from gpukeeper.ledger.archive_file import Header
from gpukeeper.ledger.inspection import InspectionResult, LedgerFile, archived_size, files_of, inspect, schema_of
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.model.durations import size_in_words
from gpukeeper.model.errors import LedgerError


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

"""`gpukeeper node register`: what was taken out again and again, by serial number. From the ledger of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.cli.node_records import read_register
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import UsageError
from gpukeeper.views.register import Register, RegisterEntry, RegisterEvent, entries_of

PARTLY = 3
HEAD = ("kind", "name", "model", "node", "taken out", "returned", "failed", "last")


def register(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Serial number, UUID of a GPU or a machine, or node: each event.")
    ] = "",
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
    ] = None,
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """List GPUs and machines that were taken out or failed. By serial number, from the ledger of this machine.

    Taken out most often first. A machine is the same under another node name. Exit code 3: an archive of the ledger
    or a report could not be read."""
    found = read_register(load_policy(policy).policy.marks, report_dir)
    if name:
        found = Register(entries_of(found, name), found.unread)
        if not found.entries and not found.unread:
            raise UsageError(f'the register has nothing about "{name}". To list it: gpukeeper node register')
    if json:
        shown.as_json("node-register", found)
    else:
        _print(found, name)
    if found.unread:
        raise typer.Exit(PARTLY)


def _print(found: Register, name: str) -> None:
    shown.table([_row(one) for one in found.entries], head=HEAD)
    if name:
        events = sorted({event for one in found.entries for event in one.events})
        shown.table([_event(one) for one in events], head=("at", "event", "node", "run", "by", "reason"))
    for one in found.entries:
        if one.warning:
            print_message(f"{one.warning}.")
    for problem in found.unread:
        print_message(f"The register is not complete: {problem}")
    if not found.entries and not found.unread:
        print_message("The ledger has no failed acceptance runs and no nodes or GPUs that were taken out.")


def _row(one: RegisterEntry) -> tuple[str, ...]:
    failed = f"{one.failed} ({one.not_marked} not marked)" if one.not_marked else str(one.failed)
    counts = (str(one.taken_out), str(one.returned), failed)
    return (one.kind, one.name, one.model or "-", one.nodes[0], *counts, f"{one.events[-1].at:%Y-%m-%d}")


def _event(one: RegisterEvent) -> tuple[str, ...]:
    return (f"{one.at:%Y-%m-%d %H:%M}Z", one.what, one.node, one.run or "-", one.by, one.reason)

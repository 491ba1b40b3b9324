"""`gpukeeper ledger backup` and `restore`: the ledger in one file, and the way back."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper import __version__
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.session import confirmed
from gpukeeper.ledger.backup import Manifest, back_up, read_back
from gpukeeper.ledger.backup import restore as restore_ledger
from gpukeeper.ledger.paths import state_folder
from gpukeeper.model.durations import size_in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.platforms.host.connect import hostname, user_name


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

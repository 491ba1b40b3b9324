"""`gpukeeper tidy`: run a command with its own temporary directory, which is deleted when the command ends."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.host import tidy as host


def tidy(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Command to run, with its arguments.")],
    root: Annotated[
        str | None,
        typer.Option("--root", help="Parent of the directory. Default: $TMPDIR, else /tmp.", metavar="DIR"),
    ] = None,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Keep the directory if the command fails, for inspection.")
    ] = False,
) -> None:
    """Run a command with a private TMPDIR, deleted when it ends. Exits with the command's exit code.

    Files that a surviving process still has open are kept and reported.
    """
    try:
        folder = host.make_folder(root, os.environ)
    except OSError as error:
        where = error.filename or root
        raise UsageError(
            f"no temporary directory could be created at {where} ({error.strerror}); nothing was run"
        ) from error
    code, failure, since = 1, None, host.moment()
    try:
        code = host.run(command, host.environment(folder, os.environ))
    except OSError as error:
        # As shells do: a directory of PATH that may not be read says nothing about the command.
        absent = isinstance(error, FileNotFoundError) or shutil.which(command[0], mode=os.F_OK) is None
        code, why = (127, "it was not found") if absent else (126, error.strerror)
        failure = f"{command[0]} could not be started: {why}"
        print_message(failure)
    if code != 0 and failure is None and keep_on_failure:
        print_message(f"The command exited with {code}; its temporary files are in {folder / host.INSIDE}")
    else:
        left = host.remove_folder(folder, since)
        if isinstance(left, host.Remainder):
            print_message(f"{left.path} was kept: {left.why}")
        elif left and sys.stderr.isatty():
            print_message(f"{size_in_words(left)} of temporary files deleted.")
    raise typer.Exit(code)

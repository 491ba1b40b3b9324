"""`gpukeeper tidy`: run a command with a temporary folder of its own, which goes when the command ended."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def tidy(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to run, with its arguments.")],
    root: Annotated[
        str | None,
        typer.Option("--root", help="Make the folder here. Default: $TMPDIR, else /tmp.", metavar="FOLDER"),
    ] = None,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Keep the folder when the command fails, to look into it.")
    ] = False,
) -> None:
    """Run a command with a private TMPDIR, and remove that when the command ended. Ends with the command's exit code.

    What a process that outlives the command still has open is kept, and said.
    """
    from gpukeeper.interfaces.terminal.session import say
    from gpukeeper.model.durations import size_in_words
    from gpukeeper.model.errors import UsageError
    from gpukeeper.platforms.host import tidy as host

    try:
        folder = host.make_folder(root, os.environ)
    except OSError as error:
        where = error.filename or root
        raise UsageError(f"no temporary folder could be made at {where} ({error.strerror}); nothing was run") from error
    code, failure, since = 1, None, host.moment()
    try:
        code = host.run(command, host.environment(folder, os.environ))
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        failure = f"{command[0]} could not be started: {error.strerror}"
        say(failure)
    if code != 0 and failure is None and keep_on_failure:
        say(f"The command ended with {code}; its temporary files are in {folder / host.INSIDE}")
    else:
        left = host.remove_folder(folder, since)
        if isinstance(left, host.Remainder):
            say(f"{left.path} was kept: {left.why}")
        elif left and sys.stderr.isatty():
            say(f"{size_in_words(left)} of temporary files were removed.")
    raise typer.Exit(code)

"""Messages on stderr. Imported by every command, so it imports little."""

from __future__ import annotations

import sys

import typer

from gpukeeper.interfaces.terminal.layout import width_of, wrapped
from gpukeeper.model.printable import plain


def print_message(words: str) -> None:
    """Prints a message to stderr; results go to stdout. Control characters in names are removed; line breaks stay."""
    lines = (line for part in words.split("\n") for line in wrapped(plain(part), width_of(sys.stderr)))
    typer.echo("\n".join(lines), err=True)

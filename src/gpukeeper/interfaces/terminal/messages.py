"""Messages on stderr; how rows and sentences fit into the width of a terminal, and when output has colours.
Imported by every command, so it imports little.

Nothing is cut: a name that does not fit beside others goes to the next line whole, so that it can be copied. A word
that is longer than the whole line is left to the terminal, which breaks it without inserting anything.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

import typer

from gpukeeper.model.words import plain

_OFF = ("0", "false")  # FORCE_COLOR=0: without colours, as npm and its kin read it


def colours(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """An empty variable counts as one that is not set."""
    if environ.get("NO_COLOR"):
        return False
    if forced := environ.get("FORCE_COLOR"):
        return forced.lower() not in _OFF
    return environ.get("TERM") != "dumb" and stream.isatty()


def overwrites(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the screen can be cleared and a line be drawn again. Colours have nothing to do with it."""
    return environ.get("TERM") != "dumb" and stream.isatty()


GAP = "  "
TEXT_MIN = 24  # columns; a sentence in less than that is a ladder of words
INDENT_MAX = 12
_NOTHING = ("", "-")
_OBVIOUS = ("", "because", "what", "workload")  # heads of columns that read well without them


def width_of(stream: TextIO) -> int | None:
    """Of the terminal, or from COLUMNS. None: it is no terminal, and every row is one line for grep."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def wrapped(words: str, width: int | None) -> list[str]:
    """A sentence in as many lines as it needs; lines after the first are indented as the first is."""
    if width is None or len(words) <= width:
        return [words]
    indent = " " * (len(words) - len(words.lstrip()))
    return _wrap(words.strip(), width - len(indent), indent) or [words]


def laid_out(rows: Sequence[Sequence[str]], head: Sequence[str], width: int | None) -> list[list[str]]:
    """The lines of each row, the head (if there is one) being the first row. All rows have as many cells as the head.

    As wide as needed if that fits; else the last column is wrapped; else the columns that do not fit go below, each
    after the name of its column.
    """
    every = [[cell.upper() for cell in head], *rows] if head else rows
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    if width is None or max(map(len, (_one_line(row, widths) for row in every))) <= width:
        return [[_one_line(row, widths)] for row in every]
    if len(widths) == 1:
        return [_wrap(row[0], width) for row in every]
    beside = _fitting(widths, width)
    left = width - _total(widths[:-1]) - len(GAP)
    if beside == len(widths) - 1 and left >= max(TEXT_MIN, *(_longest_word(row[-1]) for row in every)):
        return [_with_last_wrapped(row, widths, left) for row in every]
    firsts = [wrapped(_one_line(row[:beside], widths[:beside]), width) for row in every]
    indent = _indent(rows, widths, beside, width)
    texts = [[], *(_below(row, head, beside) for row in rows)] if head else [_below(row, head, beside) for row in rows]
    return [[*first, *_flow(text, width, indent)] for first, text in zip(firsts, texts, strict=True)]


def _one_line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(widths[i]) for i, cell in enumerate(row[:-1])]
    return GAP.join([*cells, row[-1]]).rstrip()


def _fitting(widths: Sequence[int], width: int) -> int:
    """How many of the first columns fit beside each other; the last one is never among them."""
    return max((n for n in range(1, len(widths)) if _total(widths[:n]) <= width), default=1)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _with_last_wrapped(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    first, *more = _wrap(row[-1], left) or [""]
    before = " " * (_total(widths[:-1]) + len(GAP))
    return [_one_line([*row[:-1], first], widths), *(before + line for line in more)]


def _below(row: Sequence[str], head: Sequence[str], beside: int) -> list[str]:
    """The cells that go below, in words: `owner ann`, `due in 2h`."""
    names = head or [""] * len(row)
    rest = [(name, cell.strip()) for name, cell in zip(names, row, strict=True)][beside:]
    return [cell if name in _OBVIOUS else f"{name} {cell}" for name, cell in rest if cell not in _NOTHING]


def _indent(rows: Sequence[Sequence[str]], widths: Sequence[int], beside: int, width: int) -> str:
    """Below the second column, where every word fits there."""
    longest = max((_longest_word(cell) for row in rows for cell in row[beside:]), default=0)
    second = widths[0] + len(GAP)
    return " " * (second if second <= INDENT_MAX and longest <= width - second else len(GAP))


def _flow(texts: Sequence[str], width: int, indent: str) -> list[str]:
    """As many beside each other as fit; one that does not is wrapped, on lines of its own."""
    lines: list[str] = []
    room = width - len(indent)
    for text in texts:
        if lines and len(lines[-1]) + len(GAP) + len(text) <= width:
            lines[-1] += GAP + text
        else:
            lines += _wrap(text, room, indent)
    return lines


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines]


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def print_message(words: str) -> None:
    """Prints a message to stderr; results go to stdout. Control characters in names are removed; line breaks stay."""
    lines = (line for part in words.split("\n") for line in wrapped(plain(part), width_of(sys.stderr)))
    typer.echo("\n".join(lines), err=True)

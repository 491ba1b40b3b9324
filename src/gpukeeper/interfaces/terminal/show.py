"""Output for people: aligned tables and sentences in the width of the terminal; messages.py decides when in colour."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import typer

from gpukeeper.interfaces.terminal.messages import colours, laid_out, overwrites, width_of, wrapped
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.model.decision import Decision, Result
from gpukeeper.model.event import Closed, WarningSent
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, plain, size_in_words, when_in_words

if TYPE_CHECKING:  # of the commands that print them
    from gpukeeper.lifecycle.claims import GpuClaim
    from gpukeeper.views.history import LineRow

CLEAR = "\x1b[H\x1b[2J"
OLD = timedelta(minutes=2)  # a measurement older than this is marked
COLOURS = {
    "remove": typer.colors.RED,
    "stop": typer.colors.MAGENTA,
    "trim": typer.colors.MAGENTA,
    "warn": typer.colors.YELLOW,
    "keep": typer.colors.GREEN,
    "kept": typer.colors.GREEN,
    "unknown": typer.colors.CYAN,
    "report": typer.colors.CYAN,
    "still there": typer.colors.RED,
    "refused": typer.colors.RED,
    "free": typer.colors.GREEN,
    "outside": typer.colors.YELLOW,
    "orphan": typer.colors.YELLOW,
    "quarantine": typer.colors.RED,
    "PASS": typer.colors.GREEN,
    "WARN": typer.colors.YELLOW,
    "FAIL": typer.colors.RED,
    "INCONCLUSIVE": typer.colors.CYAN,
}


def as_json(schema: str, body: dict[str, object] | msgspec.Struct) -> None:
    """One document with the name and version of its schema; see docs/reference/json.md."""
    if isinstance(body, msgspec.Struct):
        body = {name: getattr(body, field) for name, field in zip(*_names(body), strict=True)}
    document = {"schema": f"gpukeeper/{schema}/v1", **body}
    typer.echo(msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2).decode())


def _names(view: msgspec.Struct) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Its fields as they are written, and as they are called."""
    return view.__struct_encode_fields__, view.__struct_fields__


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), stamps: Sequence[str] = ()) -> None:
    """Columns as wide as their widest cell, in the width of the terminal; the first is coloured by its word. `stamps`:
    what each line begins with."""
    lines = [[plain(cell) for cell in row] for row in rows]
    if not lines:
        return
    width = width_of(sys.stdout)
    stamp = max(map(len, stamps), default=0)
    found = laid_out(lines, head, None if width is None else width - stamp)
    words = [*head[:1], *(line[0] for line in lines)]
    for number, (word, (first, *more)) in enumerate(zip(words, found, strict=True)):
        cell, rest = first[: len(word)], first[len(word) :]
        begin = stamps[number] if stamps else ""
        coloured = _coloured(cell, head=bool(head) and number == 0)
        typer.echo(f"{begin}{coloured}{rest}", color=colours(sys.stdout))
        for line in more:
            typer.echo(" " * stamp + line)


def text(words: str) -> None:
    """Sentences on stdout, in the width of the terminal; line breaks in them are ours and are kept."""
    for line in words.split("\n"):
        typer.echo("\n".join(wrapped(plain(line), width_of(sys.stdout))))


def progress_line(words: str) -> None:
    """One line on stderr that the next one overwrites; nothing where lines cannot be overwritten."""
    if overwrites(sys.stderr):
        width = shutil.get_terminal_size().columns
        typer.echo("\r" + plain(words)[: width - 1].ljust(width - 1) + "\r", nl=False, err=True)


def decision_row(d: Decision) -> tuple[str, ...]:
    return (d.word, d.seen.ref.path, d.owner or "-", holds(d), d.reason)


def plan_row(d: Decision, *, verbose: bool) -> tuple[str, ...]:
    """With --verbose also the class, whose limits apply."""
    word, path, owner, holds_, reason = decision_row(d)
    return (word, path, owner, d.class_ or "-", holds_, reason) if verbose else (word, path, owner, holds_, reason)


def holds(d: Decision) -> str:
    """GPUs of a workload, bytes of what lies around or has ended: of a tree they are what matters, elsewhere seldom
    measured."""
    if isinstance(d.gpus, Unknown):
        return "? GPUs"
    if d.gpus:
        words = f"{d.gpus} GPU{'s' if d.gpus > 1 else ''}"
        return words if d.running or isinstance(d.size, Unknown) or not d.size else f"{words}, {size_in_words(d.size)}"
    if isinstance(d.size, Unknown):
        return "?" if d.rule in TREES and not d.size.by_design else "-"
    return size_in_words(d.size) if d.size else "-"


def outcome_row(line: Closed) -> tuple[str, ...]:
    assert line.ref is not None
    return (line.result.value, line.ref.path, line.action.value, line.owner or "-", line.reason)


def warning_row(line: WarningSent) -> tuple[str, ...]:
    assert line.ref is not None
    word = Result.DELIVERED if line.delivered else Result.UNDELIVERED
    return ("warned", line.ref.path, word.value, line.owner or "-", line.message.partition(": ")[2])


def line_row(row: LineRow) -> tuple[str, ...]:
    """One line of the ledger."""
    at = f"{row.at:%Y-%m-%d %H:%M:%S}Z"
    return (str(row.seq).rjust(6), at, row.type.ljust(10), row.result.ljust(11), row.where, row.words)


def claim_row(claim: GpuClaim, now: datetime, beside: Sequence[str] = ()) -> tuple[str, ...]:
    """One device and its holder. `beside`: infrastructure that has it, too."""
    holder = claim.holder.path if claim.holder is not None else claim.by or "-"
    holder += f", {', '.join(beside)} (infrastructure)" if beside else ""
    since = in_words(now - claim.since) if claim.since is not None else "-"
    owner = fact(claim.owner) if claim.holder is not None else "-"
    return (claim.how.value, claim.name, holder, owner, since, _use(claim, now), claim.next)


def _use(claim: GpuClaim, now: datetime) -> str:
    """Percent, and how old that is when it is not from just now."""
    if claim.holder is None or claim.how.value == "kept for its owner":
        return "-"  # nothing runs that could use it
    if isinstance(claim.use, Unknown):
        return "?"
    age = now - claim.use_at if claim.use_at is not None else timedelta()
    return f"{claim.use:.3g} %" + (f" {in_words(age)} ago" if age >= OLD else "")


def fact(value: object) -> str:
    """In a cell: unknown and absent are shown differently."""
    return "?" if isinstance(value, Unknown) else "-" if value is None else str(value)


def when(at: datetime | None, now: datetime) -> str:
    return "-" if at is None else when_in_words(at, now)


def clear(*, when: bool) -> None:
    """Clears the screen before the next result; only on a terminal."""
    if when and overwrites(sys.stdout):
        typer.echo(CLEAR, nl=False)


def _coloured(cell: str, *, head: bool) -> str:
    colour = COLOURS.get(cell.strip())
    if not colours(sys.stdout) or (colour is None and not head):
        return cell
    return typer.style(cell, bold=True) if head else typer.style(cell, fg=colour)

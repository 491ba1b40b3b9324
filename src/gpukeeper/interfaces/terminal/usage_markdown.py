"""A usage report as Markdown, for a mail: readable as plain text, too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpukeeper.interfaces.terminal.usage_tables import (
    Table,
    failed_line,
    headline,
    money_line,
    regret_line,
    savings_line,
    tables,
    total_rows,
)
from gpukeeper.model.printable import plain
from gpukeeper.views.usage_report import UsageReport

_MARKUP = re.compile(r"[\\`*_\[\]<>|#&!~]")
TOTAL = ("state", "GPU-hours", "share")


def markdown_text(report: UsageReport) -> str:
    return "\n".join(_lines(report))


def _lines(report: UsageReport) -> Iterator[str]:
    yield f"# {_text(headline(report))} ({_text(report.zone)})"
    for note in report.notes:
        yield f"\n> {_text(note)}"
    yield ""
    sentences = (savings_line(report), regret_line(report), failed_line(report), money_line(report))
    yield from (f"- {_text(one)}" for one in sentences if one is not None)
    if report.unweighed > 0:
        yield f"- {report.unweighed:,.1f} hours of slices of unknown size are in no sum."
    yield from _table(Table("total", "Total", "in GPU-hours", TOTAL, tuple(total_rows(report.total))), words=1)
    for one in tables(report):
        yield from _table(one, words={"waste": 2, "failed": 3}.get(one.name, 1))


def _table(table: Table, words: int) -> Iterator[str]:
    """All but the first columns (`words` of them) are numbers."""
    yield f"\n## {_text(table.title)} ({_text(table.about)})\n"
    if not table.rows:
        yield "none"
        return
    yield _row(table.head)
    yield "|" + "|".join("---" if i < words else "---:" for i in range(len(table.head))) + "|"
    yield from map(_row, table.rows)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_text(cell.strip()) for cell in cells) + " |"


def _text(words: str) -> str:
    """Names of owners and classes come from elsewhere: none is markup, and none begins a new line."""
    return _MARKUP.sub(lambda found: f"\\{found.group()}", " ".join(plain(words).split()))

"""A usage report as one HTML file: tables and pictures, without scripts and without anything loaded from elsewhere;
or as Markdown for a mail, readable as plain text, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from gpukeeper.interfaces.terminal.usage import (
    CHART_STYLE,
    STATES,
    Table,
    bars,
    failed_line,
    headline,
    heat,
    legend,
    money_line,
    regret_line,
    savings_line,
    tables,
    total_rows,
)
from gpukeeper.markup.elements import Child, Markup, document, element, facts, section, table
from gpukeeper.model.words import in_words, plain
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


def page(report: UsageReport) -> str:
    return usage_document(headline(report), "", _sections(report))


def usage_document(title: str, style: str, sections: Iterable[Markup]) -> str:
    return document(title, element("main", *sections), style=CHART_STYLE + style)


def _sections(report: UsageReport) -> Iterable[Markup]:
    yield _header(report)
    yield from (element("p", words, class_="note") for words in report.notes)
    yield section("days", "GPU-hours by day", _figure(legend(), _wide(bars(report.days))))
    if report.heat:
        yield section(
            "week",
            "Hours of the week",
            element(
                "p", "Percent of the measured time, mean over the whole span. Hatched: not measured.", class_="muted"
            ),
            _figure(element("figcaption", "In use"), _wide(heat(report.heat, "active", "In use, by hour of the week"))),
            _figure(
                element("figcaption", "Held but idle"),
                _wide(heat(report.heat, "idle", "Held but idle, by hour of the week")),
            ),
        )
    for one in tables(report):
        yield section(one.name, one.title, *_described(one))
    yield section("regret", "Undone within a day", element("p", regret_line(report)), *_regrets(report))
    yield element("footer", "gpukeeper report · times in ", report.zone)


def _header(report: UsageReport) -> Markup:
    hours, shown = report.total, dict[str, str]()
    for name, words in STATES:
        share = getattr(hours, name) / hours.all if hours.all else 0.0
        shown[words] = f"{getattr(hours, name):,.1f} GPU-hours ({share:.0%})"
    shown["given back"] = f"{report.savings.total.gpu_hours:,.1f} GPU-hours in {report.savings.total.steps} steps"
    cost = money_line(report)
    return element(
        "header",
        element("p", "GPU usage and savings", class_="eyebrow"),
        element("h1", headline(report)),
        facts(shown),
        None if cost is None else element("p", cost),
        class_="card",
    )


def _described(one: Table) -> list[Markup]:
    if not one.rows:
        return [element("p", "None.")]
    return [text_table(one.head, one.rows, one.about[:1].upper() + one.about[1:])]


def _regrets(report: UsageReport) -> list[Markup]:
    rows = [(one.path, one.owner, one.rule, f"{one.how} after {in_words(one.after)}") for one in report.savings.regrets]
    return [text_table(("workload", "owner", "rule", "what happened"), rows, "Steps that were undone")] if rows else []


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Markup:
    """Of plain cells; columns that hold only numbers are aligned as such."""
    lines = [[row[0], *(cell.strip() for cell in row[1:])] for row in rows]
    numbers = [all(_is_number(row[i]) for row in lines) for i in range(len(head))]
    return table([name.strip() for name in head], lines, caption, numbers=numbers)


def _is_number(cell: str) -> bool:
    return cell.strip()[:1].isdecimal() or cell.strip() in ("", "-")


def _figure(*children: Child) -> Markup:
    return element("figure", *children)


def _wide(picture: Markup) -> Markup:
    return element("div", picture, class_="wide", tabindex="0", role="region", aria_label="Picture, can be scrolled")

"""A usage report as one HTML file: tables and pictures, without scripts and without anything loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpukeeper.interfaces.terminal.usage_charts import CHART_STYLE, bars, heat, legend
from gpukeeper.interfaces.terminal.usage_tables import STATES, Table, headline, money_line, regret_line, tables
from gpukeeper.markup.elements import Child, Markup, document, element, facts, section, table
from gpukeeper.model.durations import in_words
from gpukeeper.views.usage_report import UsageReport


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

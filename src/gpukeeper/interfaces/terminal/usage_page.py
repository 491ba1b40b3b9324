"""A usage report as one HTML file: tables and pictures, without scripts and without anything loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpukeeper.acceptance.reports.html import section
from gpukeeper.acceptance.reports.markup import Child, Markup, element
from gpukeeper.acceptance.reports.style import STYLE
from gpukeeper.interfaces.terminal.usage_charts import CHART_STYLE, bars, heat, legend
from gpukeeper.interfaces.terminal.usage_tables import STATES, Table, headline, money_line, regret_line, tables
from gpukeeper.model.durations import in_words
from gpukeeper.views.usage_report import UsageReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(report: UsageReport) -> str:
    return document(headline(report), "", _sections(report))


def document(title: str, style: str, sections: Iterable[Markup]) -> str:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", **{"http-equiv": "Content-Security-Policy"}, content=_POLICY),
        element("title", title),
        element("style", Markup(STYLE + CHART_STYLE + style)),
    )
    body = element("main", *sections)
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


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
    hours, facts = report.total, dict[str, str]()
    for name, words in STATES:
        share = getattr(hours, name) / hours.all if hours.all else 0.0
        facts[words] = f"{getattr(hours, name):,.1f} GPU-hours ({share:.0%})"
    facts["given back"] = f"{report.savings.total.gpu_hours:,.1f} GPU-hours in {report.savings.total.steps} steps"
    listed = [element("div", element("dt", name), element("dd", value)) for name, value in facts.items()]
    cost = money_line(report)
    return element(
        "header",
        element("p", "GPU usage and savings", class_="eyebrow"),
        element("h1", headline(report)),
        element("dl", *listed, class_="facts"),
        None if cost is None else element("p", cost),
        class_="card",
    )


def _described(one: Table) -> list[Markup]:
    if not one.rows:
        return [element("p", "None.")]
    return [table(one.head, one.rows, one.about[:1].upper() + one.about[1:])]


def _regrets(report: UsageReport) -> list[Markup]:
    rows = [(one.path, one.owner, one.rule, f"{one.how} after {in_words(one.after)}") for one in report.savings.regrets]
    return [table(("workload", "owner", "rule", "what happened"), rows, "Steps that were undone")] if rows else []


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Markup:
    lines = list(rows)
    numeric = [all(_is_number(row[i]) for row in lines) for i in range(len(head))]
    columns = (element("th", name.strip(), scope="col", class_=_class(numeric[i])) for i, name in enumerate(head))
    body = (_line(row, numeric) for row in lines)
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *columns)),
        element("tbody", *body),
    )
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _line(row: Sequence[str], numeric: Sequence[bool]) -> Markup:
    first = element("th", row[0], scope="row")
    cells = (element("td", cell.strip(), class_=_class(numeric[i])) for i, cell in enumerate(row[1:], 1))
    return element("tr", first, *cells)


def _is_number(cell: str) -> bool:
    return cell.strip()[:1].isdecimal() or cell.strip() in ("", "-")


def _class(numeric: bool) -> str | None:
    return "num" if numeric else None


def _figure(*children: Child) -> Markup:
    return element("figure", *children)


def _wide(picture: Markup) -> Markup:
    return element("div", picture, class_="wide", tabindex="0", role="region", aria_label="Picture, can be scrolled")

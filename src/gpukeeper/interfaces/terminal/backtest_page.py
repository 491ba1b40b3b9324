"""A backtest as one HTML file: the trade-off curve, tables, and every stop. No scripts, nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.interfaces.terminal.backtest_chart import tradeoff
from gpukeeper.interfaces.terminal.backtest_tables import Table, share, stops, tables, worst_first
from gpukeeper.interfaces.terminal.backtest_tables import facts as report_facts
from gpukeeper.interfaces.terminal.usage_page import text_table, usage_document
from gpukeeper.markup.elements import Markup, element, facts, section
from gpukeeper.views.backtest import BacktestReport

STYLE = """
svg .won{stroke:var(--active);fill:none;stroke-width:2}svg .dot{fill:var(--active)}
svg .today{fill:var(--idle)}
svg .line-1{stroke:var(--idle)}svg .line-2{stroke:var(--free)}svg .line-3{stroke:var(--unknown)}
"""


def page(report: BacktestReport) -> str:
    return usage_document("Backtest of a policy", STYLE, _sections(report))


def _sections(report: BacktestReport) -> Iterator[Markup]:
    yield element(
        "header",
        element("p", "What this policy would have done", class_="eyebrow"),
        element("h1", f"{report.total.stops} of {report.total.runs} runs stopped, {share(report.regret)} regretted"),
        facts(report_facts(report)),
        class_="card",
    )
    yield from (element("p", words, class_="note") for words in report.notes)
    if len(report.curve) > 1:
        yield section("tradeoff", "GPU-hours won against regret", _figure(report))
    for one in tables(report):
        yield section(one.name, one.title, *_described(one))
    listing = stops(worst_first(report.stops))
    yield section(listing.name, listing.title, *_described(listing))
    yield element("footer", "gpukeeper backtest · times in UTC")


def _described(one: Table) -> list[Markup]:
    return [text_table(one.head, one.rows, one.title)] if one.rows else [element("p", "None.")]


def _figure(report: BacktestReport) -> Markup:
    return element(
        "figure",
        element(
            "figcaption",
            "Each point is a policy: further up wins more, further left is regretted less. One line for each "
            "threshold; its points are idle times.",
        ),
        element("div", tradeoff(report.curve), class_="wide"),
    )

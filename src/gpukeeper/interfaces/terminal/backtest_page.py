"""A backtest as one HTML file: the trade-off curve, tables, and every stop. No scripts, nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.acceptance.reports.html import section
from gpukeeper.acceptance.reports.markup import Markup, element
from gpukeeper.interfaces.terminal.backtest_chart import tradeoff
from gpukeeper.interfaces.terminal.backtest_tables import Table, facts, share, stops, tables, worst_first
from gpukeeper.interfaces.terminal.usage_page import document, table
from gpukeeper.views.backtest import BacktestReport

STYLE = """
svg .won{stroke:var(--active);fill:none;stroke-width:2}svg .dot{fill:var(--active)}
svg .today{fill:var(--idle)}
svg .line-1{stroke:var(--idle)}svg .line-2{stroke:var(--free)}svg .line-3{stroke:var(--unknown)}
"""


def page(report: BacktestReport) -> str:
    return document("Backtest of a policy", STYLE, _sections(report))


def _sections(report: BacktestReport) -> Iterator[Markup]:
    listed = (element("div", element("dt", name), element("dd", words)) for name, words in facts(report).items())
    yield element(
        "header",
        element("p", "What this policy would have done", class_="eyebrow"),
        element("h1", f"{report.total.stops} of {report.total.runs} runs stopped, {share(report.regret)} regretted"),
        element("dl", *listed, class_="facts"),
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
    return [table(one.head, one.rows, one.title)] if one.rows else [element("p", "None.")]


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

"""A backtest as one HTML file: the trade-off curve, tables, and every stop. No scripts, nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

from gpukeeper.acceptance.reports.html import section
from gpukeeper.acceptance.reports.markup import Markup, element
from gpukeeper.interfaces.terminal.backtest_tables import Table, facts, share, stops, tables, worst_first
from gpukeeper.interfaces.terminal.usage_page import document, table
from gpukeeper.lifecycle.backtest.variants import GIVEN
from gpukeeper.model.durations import in_words
from gpukeeper.views.backtest import BacktestReport, VariantRow

WIDTH, LEFT, TOP, HEIGHT, RIGHT = 1000.0, 80.0, 16.0, 340.0, 30.0
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


def tradeoff(rows: Sequence[VariantRow]) -> Markup:
    """Points without a stop whose end is known have no place on it."""
    placed = [(row, row.regret) for row in rows if row.regret is not None]
    most = max((row.tally.won for row, _ in placed), default=0.0) or 1.0
    worst = max((regret for _, regret in placed), default=0.0) or 0.01
    parts = [*_axes(most, worst)]
    lines: dict[float | None, list[tuple[VariantRow, float]]] = {}
    for row, regret in placed:
        if row.variant != GIVEN:
            lines.setdefault(row.variant.threshold, []).append((row, regret))
    for number, (_, line) in enumerate(sorted(lines.items(), key=lambda pair: pair[0] or 0.0)):
        ordered = sorted(line, key=lambda pair: pair[0].variant.window or timedelta())
        points = " ".join(f"{_x(regret, worst):.1f},{_y(row.tally.won, most):.1f}" for row, regret in ordered)
        parts.append(element("polyline", points=points, class_=f"won line-{number % 4}"))
        for place, (row, regret) in enumerate(ordered):
            title = element("title", _point_words(row, regret))
            x, y = _x(regret, worst), _y(row.tally.won, most)
            parts.append(element("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, class_="dot"))
            if number == 0 and row.variant.window is not None and place % max(1, len(ordered) // 8) == 0:
                parts.append(_text(in_words(row.variant.window), x + 6, y - 6, "start"))
    for row, regret in placed:
        if row.variant == GIVEN:
            x, y = _x(regret, worst), _y(row.tally.won, most)
            title = element("title", f"this policy: {_point_words(row, regret)}")
            parts.append(element("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=8, class_="today"))
            parts.append(_text("this policy", x + 12, y + 4, "start"))
    words = "; ".join(f"{row.words}: {_point_words(row, regret)}" for row, regret in placed)
    height = TOP + HEIGHT + 44
    return element(
        "svg",
        element("title", "GPU-hours won against regret"),
        element("desc", words or "no policy has a stop with a known end"),
        *parts,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label="GPU-hours won against regret",
    )


def _axes(most: float, worst: float) -> Iterable[Markup]:
    bottom = TOP + HEIGHT
    for part in (0.0, 0.5, 1.0):
        y, x = _y(most * part, most), _x(worst * part, worst)
        yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid")
        yield _text(f"{most * part:,.0f} h", LEFT - 8, y + 4, "end")
        yield _text(f"{worst * part:.1%}", x, bottom + 18, "middle")
    yield _text("stops that were used again", (LEFT + WIDTH) / 2, bottom + 38, "middle")


def _x(regret: float, worst: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT - 60) * regret / worst


def _y(won: float, most: float) -> float:
    return TOP + HEIGHT - HEIGHT * won / most


def _point_words(row: VariantRow, regret: float) -> str:
    return f"{row.words}: {row.tally.won:,.0f} GPU-hours won, {row.tally.stops} stops, {regret:.1%} regretted"


def _text(words: str, x: float, y: float, anchor: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_="small ink")

"""A backtest as HTML files: the whole of it with the trade-off curve, tables, and every stop; or one recorded run
with the decisions about it: use of its GPUs over time, warnings and the stop. No scripts, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import isnan

from gpukeeper.interfaces.terminal.backtest import Table, share, stamp, stops, tables, tradeoff, worst_first
from gpukeeper.interfaces.terminal.backtest import facts as report_facts
from gpukeeper.interfaces.terminal.usage import UNMEASURED
from gpukeeper.interfaces.terminal.usage_page import text_table, usage_document
from gpukeeper.markup import svg
from gpukeeper.markup.elements import Markup, element, facts, section
from gpukeeper.model.decision import Action
from gpukeeper.model.series import RecordedRun, Signal, TraceTime
from gpukeeper.views.backtest import BacktestReport
from gpukeeper.wiring.backtests import Evaluation

BACKTEST_STYLE = """
svg .won{stroke:var(--active);fill:none;stroke-width:2}svg .dot{fill:var(--active)}
svg .today{fill:var(--idle)}
svg .line-1{stroke:var(--idle)}svg .line-2{stroke:var(--free)}svg .line-3{stroke:var(--unknown)}
"""


def backtest_page(report: BacktestReport) -> str:
    return usage_document("Backtest of a policy", BACKTEST_STYLE, _backtest_sections(report))


def _backtest_sections(report: BacktestReport) -> Iterator[Markup]:
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


WIDTH, LEFT, TOP, HEIGHT = 1000.0, 56.0, 14.0, 200.0
COLUMNS = 470  # one bar for each part of the time
TIMELINE_STYLE = """
svg .use{fill:var(--active)}svg .gap{fill:url(#unmeasured)}svg .threshold{stroke:var(--idle);stroke-dasharray:4 4}
svg .warn{stroke:var(--idle);stroke-width:2}svg .stop{stroke:#c0392b;stroke-width:3}
"""


def timeline_page(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> str:
    return usage_document(f"{run.name}: backtest", TIMELINE_STYLE, _timeline_sections(run, time, changes, threshold))


def _timeline_sections(
    run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float
) -> Iterator[Markup]:
    gpus = len(run.devices)
    about = {
        "owner": run.owner or "nobody",
        "class": changes[-1].decision.class_,
        "GPUs": str(gpus),
        "started": stamp(run.started),
        "ended": "it still ran when the trace ended" if run.ended is None else stamp(run.ended),
    }
    yield element(
        "header",
        element("p", "What the policy would have decided", class_="eyebrow"),
        element("h1", run.name),
        facts(about),
        class_="card",
    )
    caption = "Highest use of its GPUs, in percent. Hatched: not measured. Dashed: counts as use from there on."
    yield section(
        "use",
        "Use and decisions",
        element(
            "figure",
            element("figcaption", caption),
            element("div", picture(run, time, changes, threshold), class_="wide"),
        ),
    )
    rows = [(stamp(one.at), one.decision.action.value, one.decision.rule, one.decision.reason) for one in changes]
    listed = text_table(("at", "decision", "rule", "why"), rows, "Where the decision changed")
    yield section("decisions", "Decisions", listed)
    yield element("footer", "gpukeeper backtest · times in UTC")


def picture(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> Markup:
    begin, end = max(run.started, time.begin), run.ended or time.end
    span = max(end - begin, timedelta(minutes=1))

    def x(at: datetime) -> float:
        return LEFT + (WIDTH - LEFT - 10) * min(max((at - begin) / span, 0.0), 1.0)

    parts: list[Markup] = [svg.hatching(*UNMEASURED), *_axis(begin, end, x(begin), x(end))]
    width = (WIDTH - LEFT - 10) / COLUMNS
    for number, value in enumerate(highest(run, begin, end)):
        left = LEFT + number * width
        if value is None:
            parts.append(element("rect", x=left, y=TOP, width=f"{width:.2f}", height=HEIGHT, class_="gap"))
        elif value > 0:
            size = HEIGHT * min(value, 100.0) / 100
            at = TOP + HEIGHT - size
            parts.append(element("rect", class_="use", x=left, y=at, width=f"{width:.2f}", height=size))
    y = TOP + HEIGHT * (1 - threshold / 100)
    parts.append(svg.line(LEFT, y, WIDTH - 10, y, "threshold"))
    acts = [one for one in changes if one.decision.action is not Action.KEEP]
    for one in acts:
        kind = "warn" if one.decision.action is Action.WARN else "stop"
        title = f"{stamp(one.at)} {one.decision.action}: {one.decision.reason}"
        parts.append(svg.line(x(one.at), TOP, x(one.at), TOP + HEIGHT, kind, title))
    words = "; ".join(f"{stamp(one.at)} {one.decision.action}" for one in acts) or "no warning and no stop"
    return svg.frame(f"Use of {run.name} over time", words, WIDTH, TOP + HEIGHT + 26, *parts)


def highest(run: RecordedRun, begin: datetime, end: datetime) -> list[float | None]:
    """Of each part of the time, over its GPUs. None: a minute of it was not measured, and no use was."""
    minute = timedelta(minutes=1)
    total = max(1, -((begin - end) // minute))
    found: list[float | None] = []
    gpus = [one for one in run.series if one.signal is Signal.GPU]
    for number in range(COLUMNS):
        first, last = number * total // COLUMNS, max(number * total // COLUMNS + 1, (number + 1) * total // COLUMNS)
        values: list[float] = []
        for one in gpus:
            shift = (begin - one.start) // minute
            part = one.minutes[max(0, first + shift) : max(0, last + shift)]
            values += part
            values += [float("nan")] * (last - first - len(part))
        known = [value for value in values if not isnan(value)]
        top = max(known, default=0.0)
        found.append(None if len(known) < len(values) and top == 0 else top)
    return found


def _axis(begin: datetime, end: datetime, left: float, right: float) -> Iterable[Markup]:
    for percent in (0, 50, 100):
        y = TOP + HEIGHT * (1 - percent / 100)
        yield svg.line(LEFT, y, WIDTH - 10, y, "grid")
        yield svg.label(f"{percent}%", LEFT - 8, y + 4, "end", "small")
    bottom = TOP + HEIGHT + 18
    yield svg.label(stamp(begin), left, bottom, "start", "small")
    yield svg.label(stamp(end), right, bottom, "end", "small")
